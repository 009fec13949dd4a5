"""Seeded random numbers by Philox: rand, randn, rand_like, native_dropout. Element i takes word i % 4 of counter i // 4,
so the numbers depend on seed and place alone, never on how the launch was cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.launch import Unsupported, blocks, empty, empty_like, kernel_of_any, setting, unrepeatable

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# The fewest rounds that pass every test of BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
_ROUNDS = tl.constexpr(7)
_COUNTERS = 512  # counters of one program: 2048 numbers
_DROPPED = 256  # of dropout two counters a thread: none of its elements changes hands


_state = kernel_of_any("seed_low", "seed_high", "offset_low", "offset_high")  # others in every call, one compiled form for all


@triton.jit
def _whole(low, high):
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _words(seed, first, BLOCK: tl.constexpr):
    """four random 32-bit words of each of BLOCK counters from `first`; programs begin at multiples of BLOCK"""
    counter = first + tl.arange(0, BLOCK).to(tl.int64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0, low * 0, n_rounds=_ROUNDS)


@triton.jit
def _interleave(a, b, c, d):
    """a0 b0 c0 d0 a1 b1 …"""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@_state
def _random(
    out, seed_low, seed_high, offset_low, offset_high, count, NORMAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """out[i] uniform in [0, 1), or normal by Box and Muller"""
    chips.begin(EARLY, OPEN=False)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    a, b, c, d = _words(_whole(seed_low, seed_high), _whole(offset_low, offset_high) + first, BLOCK)
    a, b = tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b)
    c, d = tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d)
    if NORMAL:
        a, b = tl.pair_uniform_to_normal(a, b)
        c, d = tl.pair_uniform_to_normal(c, d)
    value = _interleave(a, b, c, d).to(out.dtype.element_ty)
    if not NORMAL:
        # Rounding to a half type may reach 1, which the interval excludes.
        value = tl.where(value < 1.0, value, 0.0).to(out.dtype.element_ty)
    place = tl.arange(0, 4 * BLOCK)
    left = tl.minimum(count - 4 * first, 4 * BLOCK).to(tl.int32)
    tl.store(out + 4 * first + place, value, mask=place < left)


@_state
def _dropout(
    x, y, kept, seed_low, seed_high, offset_low, offset_high, count, limit, scale, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """kept = word ≥ limit = p · 2³²; y = x · scale where kept, else 0"""
    chips.begin(EARLY, OPEN=False)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    a, b, c, d = _words(_whole(seed_low, seed_high), _whole(offset_low, offset_high) + first, BLOCK)
    least = limit.to(tl.uint32)
    keep = _interleave(a >= least, b >= least, c >= least, d >= least)
    place = tl.arange(0, 4 * BLOCK)
    mask = place < tl.minimum(count - 4 * first, 4 * BLOCK).to(tl.int32)
    value = tl.load(x + 4 * first + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + 4 * first + place, tl.where(keep, value * scale, 0.0).to(y.dtype.element_ty), mask=mask)
    tl.store(kept + 4 * first + place, keep, mask=mask)


def _fill(out: torch.Tensor, normal: bool) -> torch.Tensor:
    if out.dtype not in _FLOATS:
        raise Unsupported(f"random numbers of {out.dtype}")
    count = out.numel()
    if count:
        state = _drawn(count, out.device)
        _random((blocks(count, 4 * _COUNTERS),), out, *state, count, NORMAL=normal, BLOCK=_COUNTERS)
    return out


def _drawn(count: int, device: torch.device) -> tuple[int, ...]:
    unrepeatable()  # other numbers in every call
    state = chips.random_state(count, device)
    if state is None:
        raise Unsupported("random numbers while a graph is recorded")
    return state


def _target(dtype: torch.dtype | None, layout: Any, device: torch.device | None, pin_memory: bool | None) -> dict[str, Any]:
    device = torch.device(device) if device is not None else setting(torch.get_default_device)
    if device.type != chips.current().device_type or pin_memory or layout not in (None, torch.strided):
        raise Unsupported(f"random numbers on {device}")
    return {"dtype": dtype or setting(torch.get_default_dtype), "device": device}


def rand(
    size: Sequence[int], *, dtype: torch.dtype | None = None, layout: Any = None, device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """uniform in [0, 1)"""
    return _fill(empty(size, **_target(dtype, layout, device, pin_memory)), False)


def randn(
    size: Sequence[int], *, dtype: torch.dtype | None = None, layout: Any = None, device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """normal with mean 0 and variance 1"""
    return _fill(empty(size, **_target(dtype, layout, device, pin_memory)), True)


def rand_like(
    self: torch.Tensor, *, dtype: torch.dtype | None = None, layout: Any = None, device: torch.device | None = None,
    pin_memory: bool | None = None, memory_format: torch.memory_format | None = None,
) -> torch.Tensor:  # fmt: skip
    """uniform in [0, 1), shaped and laid out like x"""
    target = _target(dtype or self.dtype, layout, device or self.device, pin_memory)
    if target["dtype"] is self.dtype and target["device"] == self.device and memory_format in (None, torch.preserve_format):
        return _fill(empty_like(self), False)
    unrepeatable()
    return _fill(torch.empty_like(self, memory_format=memory_format or torch.preserve_format, **target), False)


def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x / (1 − p) with probability 1 − p, else 0; and which were kept"""
    if input.dtype not in _FLOATS:
        raise Unsupported(f"dropout of {input.dtype}")
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    count, certain = input.numel(), p in (0.0, 1.0)
    if count and not 0.0 <= p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    # Asked before anything is copied: where there are no numbers torch does it all, and a recorded graph would keep the copy.
    state = _drawn(count, input.device) if count and not certain else ()
    y = empty_like(input)
    # Counted through as the result lies, which is as the input lies unless that has gaps.
    x = input if input.stride() == y.stride() else torch.empty_like(input).copy_(input)
    if x is not input or certain:
        unrepeatable()  # torch's kernels write
    kept = empty(x.shape, torch.bool, x.device, y.stride())
    if certain:
        return y.copy_(x) if p == 0.0 else y.zero_(), kept.fill_(p == 0.0)
    if count:
        # At least 2, so that Triton always takes the limit as a run-time number.
        limit = max(2, min(int(p * 2**32), 2**32 - 1))
        grid = (blocks(count, 4 * _DROPPED),)
        _dropout(grid, x, y, kept, *state, count, limit, 1.0 / (1.0 - p), BLOCK=_DROPPED, warps=4)
    return y, kept
