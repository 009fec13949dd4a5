"""The CUDA backend: Triton kernels, cuBLAS for large products, decode steps as captured graphs.

Knows the device and its memory; nothing of models or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trireme.backends.base import Backend
from trireme.backends.cuda import device as gpu
from trireme.backends.cuda.methods import FLOATS, WHOLE
from trireme.backends.cuda.ops import CudaOps
from trireme.config import DeviceOptions
from trireme.kernels import chips
from trireme.parallel import Comm
from trireme.parallel.comm import ProcessComm

# Padding costs a row's attention and nothing else below 64 rows, so sizes are sparse there and dense where rows cost time.
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16), *range(288, 513, 32))
# Steps with prompts: the host needs 8 to 20 ms for one that is not captured, which the device hides only in larger ones; in none of
# them where the model is small.
GRAPH_TOKENS = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256), 3072, 4096, 6144, 8192)
# Left beside weights and KV for activations of a full step, logits, captured graphs and cuBLAS: with an 8B model, 8192 tokens and
# 256 rows a step 1.9 GiB are in use (H200); with what torch keeps for reuse it holds 4.5, which goes back when memory is short.
WORKSPACE = 3 << 30


class Cuda(Backend):
    name = "cuda"
    depth = 2
    chunked_windows = False
    graph_tokens_surely = 2048

    def __init__(self, options: DeviceOptions, rank: int = 0):
        super().__init__(options, rank)
        self.device = gpu.select(rank)
        self.kv_kinds = gpu.kv_kinds(self.device)
        self.methods = WHOLE | FLOATS if "fp8" in self.kv_kinds else WHOLE
        self.ops = CudaOps(pdl=chips.current().early)
        self.graphs = gpu.Graphs(self.device, self.workspace_bytes())

    @classmethod
    def unavailable(cls) -> str | None:
        return gpu.missing()

    def dtype(self, wanted: str, stored: torch.dtype) -> torch.dtype:
        """16 bits unless asked otherwise: a checkpoint's own 16-bit type, or the device's better one."""
        if wanted != "auto":
            return getattr(torch, wanted)
        half = gpu.half_type(self.device)
        return stored if stored == torch.float16 else half

    def memory(self) -> tuple[int, int]:
        return gpu.memory(self.device)

    def kv_budget(self, fraction: float) -> int:
        """The bytes of the user's memory fraction that remain after the weights and the workspace."""
        free, total = self.memory()
        used = total - free
        return max(int(total * fraction) - used - self.workspace_bytes(), 0)

    def workspace_bytes(self) -> int:
        return min(WORKSPACE, self.memory()[1] // 8)

    def held_bytes(self) -> int:
        return gpu.reserved(self.device)

    def kv_default_tokens(self, max_len: int, max_running: int) -> int:
        """As many slots as all running requests could use. Usually the free memory sets a lower limit."""
        return max_len * max_running

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return gpu.pinned(shape, dtype)

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any] | None:
        return self.graphs.capture(step)

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        """Sizes up to the first that holds every row."""
        below = [size for size in GRAPH_SIZES if size < max_rows]
        return (*below, min(max_rows, GRAPH_SIZES[-1]))

    def graph_tokens(self, max_rows: int) -> tuple[int, ...]:
        return GRAPH_TOKENS

    def mark(self) -> Callable[[], None]:
        return gpu.mark(self.device)

    def stopwatch(self) -> Callable[[], Callable[[], float]]:
        return gpu.stopwatch(self.device)

    def comm(self, rank: int, size: int, store: str) -> Comm:
        return ProcessComm(rank, size, store, self.options.collective_timeout, backend="nccl")

    def describe(self) -> dict[str, str]:
        return gpu.describe(self.device)
