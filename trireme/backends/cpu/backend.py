"""The CPU backend: the C kernels behind the op table, packed weights, and decode steps recorded to be run again by few calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trireme.backends.base import Backend
from trireme.backends.cpu import library
from trireme.backends.cpu.cache import PackCache
from trireme.backends.cpu.layers import CpuAttention, CpuGatedMLP
from trireme.backends.cpu.methods import METHODS
from trireme.backends.cpu.ops import CpuOps
from trireme.backends.cpu.resident import forget_code
from trireme.backends.cpu.tape import Arena, Tape
from trireme.backends.cpu.weights import aligned_zeros
from trireme.config import DeviceOptions, cache_folder
from trireme.layers import Attention, GatedMLP

PROMPT_ROOM = 512  # tokens of a step with prompts that is recorded; with more, Python's share is small


class Cpu(Backend):
    name = "cpu"
    kv_kinds = ("plain", "int8", "fp8", "int4")
    layers = {Attention: CpuAttention, GatedMLP: CpuGatedMLP}
    methods = METHODS
    coarse_few_rows = True  # to whole numbers of 8 bits; those of many to bf16 where the CPU multiplies that

    def __init__(self, options: DeviceOptions, rank: int = 0):
        super().__init__(options, rank)
        library.set_threads(options.threads)
        forget_code()
        self.ops: CpuOps = CpuOps()
        self.arena = Arena()
        self.pack_cache: PackCache | None = None
        if options.pack_cache != "off":
            self.pack_cache = PackCache(cache_folder() / "packed", everything=options.pack_cache == "on")
            self.methods = {name: method.kept_in(self.pack_cache) for name, method in METHODS.items()}

    @classmethod
    def unavailable(cls) -> str | None:
        return library.missing()

    def dtype(self, wanted: str, stored: torch.dtype) -> torch.dtype:
        """Activations are float32; weights keep their own kinds whatever this says."""
        return torch.float32 if wanted == "auto" else getattr(torch, wanted)

    def memory(self) -> tuple[int, int]:
        """Counts mapped weights as used. The system counts them as free, but reading them again would slow down every step."""
        free, total = super().memory()
        return max(free - (self.pack_cache.mapped_bytes if self.pack_cache else 0), 0), total

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Takes memory when it is first written, not before."""
        return aligned_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        sizes = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
        return tuple(size for size in sizes if size <= max_rows)

    def graph_tokens(self, max_rows: int) -> tuple[int, ...]:
        """One size is enough, because rows beyond the step's own are not computed. Several ranks would still exchange such rows."""
        return (PROMPT_ROOM,) if self.options.tp == 1 else ()

    @property
    def graph_batches(self) -> tuple[int, ...]:
        """Each sequence of room costs a row of logits."""
        return 1, 2, 4, 8, 16, 32

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any] | None:
        """Records the step while running it; None if an op brought a value to the host."""
        tape = self.ops.tape = Tape(self.arena)
        try:
            with tape.watching():
                result = step()
        finally:
            self.ops.tape = None
        if tape.broken:
            return None
        again = tape.replay()

        def replay() -> Any:
            again()
            return result

        return replay

    def describe(self) -> dict[str, str]:
        return {"device": str(self.device), **library.describe()}
