"""Where programs of one launch meet: counters that every use leaves at zero, and room for the parts that the last one joins.
Knows devices, streams and recorded graphs, never what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.calls import tune
from trireme.kernels.launch import lasting, next_power


@triton.jit
def arrive(counter):
    """Says that something is stored; returns how many have said so before, whose stores may then be read."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")


_ARENA = 1 << 20  # counters set aside for recorded graphs, 4 MiB
_scratch: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_arenas: dict[int, list[Any]] = {}  # device → counters and how many are given away


def workspace(device: torch.device, parts: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial sums and counters that every use leaves at zero; one per stream, since streams may overlap."""
    index = device.index or 0
    if chips.capturing():
        return torch.empty(parts, dtype=torch.float32, device=device), _recorded(device, counters)
    key = (index, 0 if chips.current().interpreted else chips.current_stream(index))
    known = _scratch.get(key)
    if known is None or known[0].numel() < parts or known[1].numel() < counters:
        # Twice as much each time, since calls that are remembered keep what they were given.
        floats = torch.empty(max(next_power(parts), 1 << 20), dtype=torch.float32, device=device)
        known = _scratch[key] = (floats, torch.zeros(max(next_power(counters), 1 << 14), dtype=torch.int32, device=device))
    if index not in _arenas and not chips.current().interpreted:
        _arenas[index] = [torch.zeros(_ARENA, dtype=torch.int32, device=device), 0]
    lasting(*known)
    return known


def meeting(
    device: torch.device, programs: int, splits: int, numbers: int, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for so many numbers of each split, and the counters at which splits meet; nothing where nothing is split."""
    if splits == 1:
        return None, None
    parts, counters = workspace(device, splits * numbers * dtype.itemsize // 4, programs)
    return parts.view(dtype), counters


def _recorded(device: torch.device, count: int) -> torch.Tensor:
    """Counters of one recorded call, its own for ever, since graphs may replay side by side; zeroed in the graph when room ends."""
    arena = _arenas.get(device.index or 0)
    if arena is None or arena[1] + count > _ARENA:
        return torch.zeros(count, dtype=torch.int32, device=device)
    start, arena[1] = arena[1], arena[1] + -(-count // 4) * 4
    return arena[0][start : start + count]


def release() -> None:
    """Gives away anew the counters of recorded graphs, none of which may exist any more."""
    for arena in _arenas.values():
        arena[1] = 0


def _given() -> Callable[[], None]:
    """Notes how many counters of recorded graphs are given away; calling the answer takes back those that are given since."""
    before = {device: arena[1] for device, arena in _arenas.items()}

    def take_back() -> None:
        for device, given in before.items():
            _arenas[device][1] = given

    return take_back


tune.notes_of_memory.append(_given)
