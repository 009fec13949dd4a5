"""Records one run of a step as C programs and torch calls over the same memory, and replays it. Does not know what ops mean.

To the runner it is the same seam as a CUDA graph: a decode step is a few calls instead of many through Python. `--no-graphs` turns
it off, for comparison.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trireme.backends.cpu.fuse import fused
from trireme.backends.cpu.library import StepStruct, library
from trireme.backends.cpu.program import Program

_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Arena:
    """Memory for a recording's results. As in a normal run, a block is free again when its last tensor is deleted."""

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []
        self.free: dict[int, list[int]] = {}  # size in bytes -> blocks

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = -(-max(math.prod(shape) * dtype.itemsize, 1) // 64) * 64
        waiting = self.free.setdefault(size, [])
        if not waiting:
            raw = np.zeros(size + 64, dtype=np.uint8)
            skip = -raw.ctypes.data % 64
            self.blocks.append(raw[skip : skip + size])
            waiting.append(len(self.blocks) - 1)
        index = waiting.pop()
        view = self.blocks[index][: math.prod(shape) * dtype.itemsize]
        tensor = torch.from_numpy(view).view(dtype).view(shape)
        weakref.finalize(view, waiting.append, index)  # the tensor's storage holds the view
        return tensor

    def is_free(self, address: int) -> bool:
        """Whether this address is in a block over which there is no tensor."""
        blocks = (self.blocks[index] for waiting in self.free.values() for index in waiting)
        return any(0 <= address - block.ctypes.data < block.nbytes for block in blocks)


class _Watch(TorchDispatchMode):
    """Sees every torch call of a recording."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoids that torch loads its compiler (two seconds, 60 MB) only to exclude this class from compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tape.call(func, args, kwargs or {}, result)
        return result


class _WatchReads(TorchFunctionMode):
    """Sees the reads of a tensor's values that make no torch call of their own."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _READS:
            self.tape.broken = f"{func} brings values to the host"
        return func(*args, **(kwargs or {}))


class Tape:
    """A recorded list of programs and calls. `broken` gives the reason if the recording cannot be replayed correctly."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.entries: list[Program | Callable[[], object]] = []
        self.broken: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records what is done meanwhile."""
        with _WatchReads(self), _Watch(self):
            yield

    def take(self, program: Program) -> None:
        """Adds C steps, joining those before."""
        if not self.entries or not isinstance(self.entries[-1], Program):
            self.entries.append(Program())
        last = self.entries[-1]
        assert isinstance(last, Program)
        last.steps += program.steps
        last.kept += program.kept

    def call(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Adds a torch call, unless it only made a view or allocated memory."""
        if func._schema.is_mutable:
            self.entries.append(lambda: func(*args, **kwargs))
            return
        outputs = _results(result)
        if not outputs:
            self.broken = f"{func} brings a value to the host"
        inputs = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        if func._schema.name.partition("::")[2] in _ALLOCATIONS or all(t.untyped_storage().data_ptr() in inputs for t in outputs):
            return
        self.entries.append(_again(func, args, kwargs, outputs))

    def replay(self) -> Callable[[], None]:
        """A call that does everything again."""
        run, entries, later = library().trireme_run, list[Callable[[], object]](), list[StepStruct]()
        for entry in reversed(self.entries):
            if not isinstance(entry, Program):
                entries.insert(0, entry)
                continue
            kept = fused(entry.steps, later, self.arena.is_free)
            entries.insert(0, _program_call(run, (StepStruct * len(kept))(*kept), entry))
            later = kept + later

        def again() -> None:
            for entry in entries:
                entry()

        return again


def _results(result: Any) -> list[Tensor]:
    """The tensors that a call returned. Leaves out nested lists: collectives return them, and must be waited for, not recorded."""
    return [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, Tensor)]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _program_call(run: Any, steps: ctypes.Array[StepStruct], program: Program) -> Callable[[], object]:
    address, count, kept = ctypes.addressof(steps), len(steps), (steps, program)

    def call() -> None:
        assert kept, "the steps and what they point at live as long as this call"
        run(address, count)

    return call


def _again(func: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> Callable[[], object]:
    """Runs the call again and writes its results over those of the recording."""

    def call() -> None:
        result = func(*args, **kwargs)
        for target, value in zip(outputs, _results(result), strict=True):
            target.copy_(value)

    return call
