"""The interface of a backend: its ops, its own versions of layers and weight methods, its memory, streams and graphs.

An empty subclass is a slow but working port. Code outside this folder names no vendor. Backends may bring weight methods and
layers besides ops, because packed weights and fused norms do not fit an op that takes a dense matrix.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trireme import host
from trireme.config import DeviceOptions
from trireme.ops import CacheSpec, KVCache, Ops
from trireme.parallel import Comm
from trireme.parallel.comm import ProcessComm
from trireme.quant import WeightMethod


class Backend:
    name: str = "reference"
    layers: Mapping[type, type] = {}
    methods: Mapping[str, type[WeightMethod]] = {}
    kv_kinds: tuple[str, ...] = ("plain", "int8", "fp8", "int4")  # the storage kinds of KV that its ops support
    chunked_windows: bool = True  # whether its attention knows windows that begin anew (`AttentionKind.chunked`)
    coarse_few_rows: bool = False  # whether products of few rows are less precise than those of many rows
    graph_tokens_surely: int = sys.maxsize  # steps with prompts of more tokens are captured only if the device waits for the host
    depth: int = 1  # steps launched before the oldest is collected; 2 where launching does not wait for the device

    def __init__(self, options: DeviceOptions, rank: int = 0):
        self.options, self.rank = options, rank
        self.ops: Ops = Ops()
        self.device = torch.device("cpu")

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this backend cannot run here; None if it can."""
        return None

    def dtype(self, wanted: str, stored: torch.dtype) -> torch.dtype:
        """The type of weights and activations, for what the user asked and the checkpoint holds."""
        return torch.float32 if wanted == "auto" else getattr(torch, wanted)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        return host.memory()

    def kv_budget(self, fraction: float) -> int:
        """Bytes that KV may take after the weights are loaded: half of the allowed share, because others use host memory too."""
        free, _ = self.memory()
        return int(free * fraction) // 2

    def workspace_bytes(self) -> int:
        """Bytes kept free for activations and captured graphs; 0 if they share the host's memory."""
        return 0

    def held_bytes(self) -> int:
        """What this process holds of a device's own memory: weights, KV, activations, graphs; 0 where the device has none."""
        return 0

    def kv_default_tokens(self, max_len: int, max_running: int) -> int:
        """The number of KV slots if the user does not set one."""
        return max(max_len, min(32768, max_len * max_running))

    def cache(self, spec: CacheSpec, num_slots: int, dtype: torch.dtype) -> KVCache:
        """The KV slots of one layer."""
        return KVCache.allocate(spec, num_slots, dtype, self.zeros)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A table on the device, all zero."""
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A host buffer for asynchronous copies to the device; pinned if the device supports it."""
        return torch.zeros(shape, dtype=dtype)

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any] | None:
        """A captured form of a step that reads and writes persistent buffers; replaying is calling it.

        None if it cannot be captured. An op that reads a value on the host would use this step's value at every replay.
        """
        return None

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        """The padded numbers of rows for which decode steps are captured; empty if graphs save no time."""
        return ()

    def graph_tokens(self, max_rows: int) -> tuple[int, ...]:
        """The padded numbers of tokens for which steps with prompts are captured; empty if graphs save no time."""
        return ()

    @property
    def graph_batches(self) -> tuple[int, ...]:
        """The padded numbers of sequences of steps with prompts. A few are enough, because tokens cost the time."""
        return 8, 64, 256

    def mark(self) -> Callable[[], None]:
        """Marks this point of the device's work; calling the mark waits until it is reached."""
        return lambda: None

    def stopwatch(self) -> Callable[[], Callable[[], float]]:
        """Marks this point of the device's work. Calling the result marks a second point and returns a function that tells the
        seconds between the two; call it when the device has reached the second."""
        begun = time.perf_counter()

        def stop() -> Callable[[], float]:
            spent = time.perf_counter() - begun
            return lambda: spent

        return stop

    def comm(self, rank: int, size: int, store: str) -> Comm:
        """The collectives of this device's ranks."""
        return ProcessComm(rank, size, store, self.options.collective_timeout)

    def describe(self) -> dict[str, str]:
        """The lines that `trireme doctor` shows for this backend."""
        return {"device": str(self.device)}
