"""All calls of this backend to torch's device module: memory, streams, events, graphs. Knows nothing of models or kernels.

ROCm's torch has the same names, so the backend also loads there. Its kernels compile for AMD's chips but have not run on them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def missing() -> str | None:
    """Why there is no such device here; None if there is one."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA or ROCm device"
    return None


def select(rank: int) -> torch.device:
    """Makes the rank's device the current one."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    vendor = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return {
        "device": properties.name,
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "multiprocessors": str(properties.multi_processor_count),
        "toolkit": vendor,
    }


def sums_stay_wide(device: torch.device) -> bool:
    """Whether a product of 16-bit numbers can be had in float32; torch asks it of NVIDIA's library alone."""
    return device.type == "cuda" and torch.version.hip is None


def kv_kinds(device: torch.device) -> tuple[str, ...]:
    """What keys and values can be kept as. For NVIDIA's chips before Ada (8.9) Triton compiles no floats of eight bits."""
    eight_bits = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)
    return ("plain", "int8", "int4", "fp8") if eight_bits else ("plain", "int8", "int4")


def half_type(device: torch.device) -> torch.dtype:
    """The 16-bit type that matrix units take at full speed."""
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes; what torch holds without using counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


def reserved(device: torch.device) -> int:
    """Bytes that torch holds on the device: weights, KV, captured graphs, and what it keeps for reuse."""
    return torch.cuda.memory_reserved(device)


def release() -> None:
    """Returns the memory that torch holds for reuse to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def causal_attention(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """Attention of whole prompts of one length, by the vendor's library or the best that torch has instead.

    q: [sequences * length, heads, dim]; k, v: [sequences * length, kv_heads, dim]
    """
    query, key, value = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=True)


def mark(device: torch.device) -> Callable[[], None]:
    """Marks this point of the current stream; calling the mark waits until it is reached."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Marks this point of the current stream. Calling the result marks a second point and returns a function that tells the
    seconds between the two; call it when the device has reached the second."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record(torch.cuda.current_stream(device))

    def stop() -> Callable[[], float]:
        ended.record(torch.cuda.current_stream(device))
        return lambda: begun.elapsed_time(ended) / 1e3

    return stop


@contextmanager
def _uncollected() -> Iterator[None]:
    """Stops the garbage collector, which might free memory of the device during a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Graphs:
    """Captured steps. They share one pool of memory: no two run at once, and each result is used before the next replay."""

    def __init__(self, device: torch.device, room: int):
        """room: bytes that the largest step may need; torch gives nothing back while it captures"""
        self.device, self.room = device, room
        self.pool: Any = None
        self.stream: Any = None
        self.held_by = WeakSet[torch.cuda.CUDAGraph]()  # a pool ends with the last of its graphs

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture that failed. Torch may believe from then on that memory is taken for it from this pool, and would begin
        no other capture with the pool; so later ones have another."""
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.device(self.device).index or 0, self.pool)
        self.held_by.clear()

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any] | None:
        """Runs the step once, so that every kernel is compiled and loaded, records it, and returns what replays it.

        None where the step ran but cannot be recorded, because an op waits for the device. Raises torch.OutOfMemoryError where
        the memory does not suffice.
        """
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            step()
        current.wait_stream(self.stream)
        if torch.cuda.mem_get_info(self.device)[0] < self.room:
            release()
        graph = torch.cuda.CUDAGraph()
        # Not torch's own context: it waits for the device, collects garbage and gives unused memory back, a third of the time.
        with torch.cuda.stream(self.stream), _uncollected():
            if not self.held_by:
                self.pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")  # another thread may read answers meanwhile
            try:
                result = step()
                graph.capture_end()
            except RuntimeError as error:
                self._give_up(graph)
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                return None
        self.held_by.add(graph)

        def replay() -> Any:
            graph.replay()
            return result

        return replay
