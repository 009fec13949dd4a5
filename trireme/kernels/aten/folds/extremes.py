"""Extremes with their places: argmax, max and min along a dimension. Knows rows: short ones are looked through twice in
registers; of long ones a value and its place make one sortable 64-bit key, for types up to 32 bits."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten import relay
from trireme.kernels.aten.counters import meeting
from trireme.kernels.aten.elementwise.layout import normalise
from trireme.kernels.aten.elementwise.pointwise import pointwise
from trireme.kernels.aten.elementwise.unary import same
from trireme.kernels.aten.folds.cut import Cut
from trireme.kernels.aten.folds.fold import Fold, aligned, begins, ends, fold, lined_up, placed
from trireme.kernels.aten.folds.reduce import best_cut, require_elements
from trireme.kernels.aten.scalar import highest, larger, lowest, singly, smaller
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power

_NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool)
_WIDE = (torch.float64, torch.int64)
_JOINED = 2048  # keys that one program joins at once


@triton.jit
def _rank(value, FLOAT: tl.constexpr, LEAST: tl.constexpr):
    """An int32 that sorts as the value does, NaN above all and both zeros alike; complemented where the least wins"""
    if FLOAT:
        single = value.to(tl.float32) + 0.0
        bits = single.to(tl.int32, bitcast=True)
        rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        if LEAST:
            rank = ~rank
        rank = tl.where(single != single, 0x7FFFFFFF, rank)
    else:
        rank = value.to(tl.int32)
        if LEAST:
            rank = ~rank
    return rank


@triton.jit
def _key(value, place, FLOAT: tl.constexpr, LEAST: tl.constexpr):
    """64 bits that sort by the value, of equal ones the first place above the others"""
    return (_rank(value, FLOAT, LEAST).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _value(rank, FLOAT: tl.constexpr, LEAST: tl.constexpr):
    """The value that a rank was made of"""
    plain = ~rank if LEAST else rank
    if FLOAT:
        bits = plain ^ ((plain >> 31) & 0x7FFFFFFF)
        plain = tl.where(rank == 0x7FFFFFFF, float("nan"), bits.to(tl.float32, bitcast=True))
    return plain


@triton.jit
def _last(FLOAT: tl.constexpr, LEAST: tl.constexpr):
    """What every other value beats"""
    if FLOAT:
        last = float("inf") if LEAST else float("-inf")
    else:
        last = 2**31 - 1 if LEAST else -(2**31)
    return last


@kernel
def _row_extreme(
    x, values, indices, rows, inner, length, x_outer, x_inner, x_step, out_outer, out_inner,
    FLOAT: tl.constexpr, LEAST: tl.constexpr, FLAT: tl.constexpr, TURNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    EVEN: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows that fit one tile: the extreme, NaN before all, then the first column that has it; EVEN: nothing is masked"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, N)
    mask = (row < rows)[:, None] & (column < length)[None, :]
    at = begins(row, inner, x_outer, x_inner, FLAT)[:, None] + (column.to(tl.int64) * x_step)[None, :]
    last = _last(FLOAT, LEAST)
    if EVEN:
        value = tl.load(x + at).to(tl.float32 if FLOAT else tl.int32)
    else:
        value = tl.load(x + at, mask=mask, other=0).to(tl.float32 if FLOAT else tl.int32)
        value = tl.where(mask, value, last)
    extreme = tl.reduce(value, 1, smaller if LEAST else larger)
    # Where the extreme is NaN nothing equals it, and what is not equal to itself are the NaNs.
    found = (value == extreme[:, None]) | (value != value) if FLOAT else value == extreme[:, None]
    if not EVEN:
        found = found & mask
    first = tl.min(tl.where(found, tl.broadcast_to(column[None, :], (M, N)), N), 1)
    place = placed(row, inner, out_outer, out_inner, TURNED)
    tl.store(indices + place, first.to(tl.int64), mask=row < rows)
    if values is not None:
        tl.store(values + place, extreme.to(values.dtype.element_ty), mask=row < rows)


@kernel
def _extreme(
    x, keys, counters, values, indices, rows, inner, length, split_length, x_outer, x_inner, x_step, out_outer, out_inner,
    FLOAT: tl.constexpr, LEAST: tl.constexpr, FLAT: tl.constexpr, TURNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    S: tl.constexpr, SHIFTED: tl.constexpr, BARE: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, OF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The greatest key (rank, complement of place) of each row; of programs that share one the last joins their keys, S at once"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    start = split * split_length
    stop = tl.minimum(start + split_length, length)
    base = begins(row, inner, x_outer, x_inner, FLAT)
    head, even = 0, length
    if SHIFTED:  # all but the ends of rows; places are counted from the first of these
        base, head, even = aligned(base, length)
        head, even = head[:, None], even[:, None]
    base = (x + base)[:, None]
    least = -(2**63)
    # Each lane keeps the first extreme of its own columns; only these become keys.
    work = tl.float32 if FLOAT else tl.int32
    last = _last(FLOAT, LEAST)
    best = tl.full((M, N), last, work)
    place = tl.broadcast_to((start + tl.arange(0, N))[None, :], (M, N))
    if N == 1:  # what is left over by unrolling would come one by one
        stop = tl.cdiv(stop, UNROLL) * UNROLL
    if BARE:
        # Plus nothing (the grid has two dimensions), which hides that 16 divides it: rows of 64 floats were then asked for one
        # element after the other (50257 of them took 11.4 µs).
        even += tl.program_id(2)
    ahead = (tl.arange(0, N).to(tl.int64) * x_step)[None, :]
    for at in tl.range(start, stop, N, num_stages=STAGES, loop_unroll_factor=UNROLL):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column[None, :] < even)
        if BARE:  # without a multiplication and a choice for each element
            other = highest(x.dtype.element_ty) if LEAST else lowest(x.dtype.element_ty)
            value = tl.load(base + tl.cast(at, tl.int64) * x_step + ahead, mask=mask, other=other).to(work)
        else:
            value = tl.load(base + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=0).to(work)
            value = tl.where(mask, value, tl.full((), last, work))
        better = value < best if LEAST else value > best
        if FLOAT:
            better = better | ((value != value) & (best == best))
        best = tl.where(better, value, best)
        place = tl.where(better, column[None, :], place)
    top = tl.max(tl.where(place < tl.minimum(stop, even), _key(best, place + head, FLOAT, LEAST), tl.full((), least, tl.int64)), 1)
    if SHIFTED and split == tl.num_programs(1) - 1:
        column, mask = ends(head, even, length)
        mask = mask & (row < rows)[:, None]
        key = _key(tl.load(base + column, mask=mask, other=0), column + head, FLOAT, LEAST)
        top = tl.maximum(top, tl.max(tl.where(mask, key, tl.full((), least, tl.int64)), 1))
    last = True
    if counters is not None:
        tl.store(keys + split.to(tl.int64) * rows + row, top, mask=row < rows)
        last = relay.arrive(counters + tl.program_id(0)) == tl.num_programs(1) - 1
    if last:
        if counters is not None:
            joined = tl.full((M, S), least, tl.int64)
            for first in range(0, tl.num_programs(1), S):
                part = (first + tl.arange(0, S))[None, :]
                mask = (row < rows)[:, None] & (part < tl.num_programs(1))
                found = keys + part.to(tl.int64) * rows + row[:, None]
                joined = tl.maximum(joined, tl.load(found, mask=mask, other=least, cache_modifier=".cg"))
            top = tl.max(joined, 1)
            tl.store(counters + tl.program_id(0), 0)
        to = placed(row, inner, out_outer, out_inner, TURNED)
        tl.store(indices + to, 0x7FFFFFFF - (top & 0xFFFFFFFF), mask=row < rows)
        if values is not None:
            value = _value((top >> 32).to(tl.int32), FLOAT, LEAST)
            tl.store(values + to, value.to(values.dtype.element_ty), mask=row < rows)


@kernel
def _wide_extreme(
    x, given, values, indices, rows, inner, length, split_length, x_outer, x_inner, x_step,
    LEAST: tl.constexpr, FLOAT: tl.constexpr, FLAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SINGLY: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """64-bit types: the first greatest (or least) element and its place; NaN outranks all; rows that fit a tile may be
    extremes found before, of `given` places"""
    chips.begin(EARLY, OPEN=False)
    if SINGLY:
        x = singly(x)
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    at_row = begins(row, inner, x_outer, x_inner, FLAT)
    start = split * split_length
    stop = tl.minimum(start + split_length, length)
    work = tl.float64 if FLOAT else tl.int64
    if LEAST:
        neutral = float("inf") if FLOAT else 2**63 - 1
    else:
        neutral = float("-inf") if FLOAT else -(2**63)
    far = 2**63 - 1
    last = tl.full((), neutral, work)
    if given is None:  # each lane keeps the first extreme of its own columns
        best = tl.full((M, N), neutral, work)
        place = tl.broadcast_to((start + tl.arange(0, N))[None, :], (M, N))
        ahead = (tl.arange(0, N).to(tl.int64) * x_step)[None, :]
        for at in tl.range(start, stop, N, loop_unroll_factor=4 if N == 1 else 1):
            column = at + tl.arange(0, N)
            mask = (row < rows)[:, None] & (column < length)[None, :]
            value = tl.load(x + (at_row[:, None] + tl.cast(at, tl.int64) * x_step + ahead), mask=mask, other=last)
            better = (value < best) if LEAST else (value > best)
            if FLOAT:
                better = better | ((value != value) & (best == best))
            best = tl.where(better, value, best)
            place = tl.where(better, column[None, :], place)
        index = tl.where(place < stop, place.to(tl.int64), far)
    else:
        column = tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        offset = at_row[:, None] + (column.to(tl.int64) * x_step)[None, :]
        best = tl.load(x + offset, mask=mask, other=last)
        index = tl.load(given + offset, mask=mask, other=far)
    blank = best != best
    some_blank = tl.max(blank.to(tl.int32), 1) > 0
    clean = tl.where(blank, tl.full((), neutral, work), best)
    extreme = tl.min(clean, 1) if LEAST else tl.max(clean, 1)
    wins = tl.where(some_blank[:, None], blank, best == extreme[:, None])
    first = tl.min(tl.where(wins, index, far), 1)
    extreme = tl.where(some_blank, float("nan"), extreme) if FLOAT else extreme
    where = split.to(tl.int64) * rows + row
    tl.store(indices + where, first, mask=row < rows)
    if values is not None:
        tl.store(values + where, extreme.to(values.dtype.element_ty), mask=row < rows)


@pointwise()
def _first(place):
    """the place of an only element, whatever stood there: it is not read"""
    return tl.zeros_like(place)


def _find(
    x: torch.Tensor, dim: int | None, keepdim: bool, least: bool, want_values: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The extreme along `dim` (over all if None) and where it is first met."""
    require_elements(x, dim, "min" if least else "max")
    if x.dim() == 0:
        normalise(dim, 0)
        x = x.reshape(1)
        dim, keepdim = None, False
    lone = x
    x, f = fold(x, dim, keepdim, turn=dim is not None and x.dtype in _NARROW)
    if x.dtype not in _NARROW and x.dtype not in _WIDE:
        raise Unsupported(f"no extreme of {x.dtype}")
    indices = empty(f.shape, torch.int64, x.device)
    values = empty(f.shape, x.dtype, x.device) if want_values else None
    if f.length == 1:
        _first(indices, out=indices)
        if values is not None:
            same(lone.reshape(f.shape), out=values)
    elif f.scattered:
        found, at = _find(f.lying(x), 1, False, least, want_values)
        same(at, out=f.places(indices))
        if values is not None:
            same(found, out=f.places(values))
    elif f.rows:
        (_run if x.dtype in _NARROW else _run_wide)(x, f, values, indices, least)
    return values, indices


def _tile(f: Fold, cut: Cut) -> tuple[int, int]:
    """Rows and columns of a tile: fewer columns where many programs keep two numbers for each (42912 extremes of 139 took 17.2 µs
    with 128 of them, so 7.8)."""
    m, n = cut.tile
    if _single_floats(f, cut) and cut.wide:
        # One for each thread: 349525 x 12 x 3 took 32.8 µs with two, so 19.4; 200000 x 20 x 3 34.0 and 17.4.
        return min(m, 128), 1
    if f.across and f.length > 64 and not cut.measured:
        n = min(n, 256 if m <= 16 else 32 if blocks(f.rows, m) >= 4 * chips.current().multiprocessors else n)
    return m, n


def _unroll(f: Fold, cut: Cut) -> int:
    """Tiles that a loop asks for at once, fewer than others do: two numbers are kept for each element."""
    if cut.measured or not f.across:
        return cut.unroll
    if cut.wide:
        return cut.asked(12 if _single_floats(f, cut) else 8)
    # 6000 x 32001 floats took 277 µs with one, so 226; 932 x 300 x 45 21.7 and 17.4.
    return min(cut.unroll, 2 if f.itemsize <= 2 or _single_floats(f, cut) else 1)


def _single_floats(f: Fold, cut: Cut) -> bool:
    """Whether threads take single elements of four bytes of rows side by side, and the rules say how."""
    return f.across and not f.even and f.itemsize == 4 and not cut.measured


def _run(x: torch.Tensor, f: Fold, values: torch.Tensor | None, indices: torch.Tensor, least: bool) -> None:
    start = functools.partial(_start, x, f, values, indices, least)
    start(best_cut("extreme", f, start))


def _start(x: torch.Tensor, f: Fold, values: torch.Tensor | None, indices: torch.Tensor, least: bool, cut: Cut) -> None:
    m, n = _tile(f, cut)
    inner, *walk = f.numbered
    kind: dict[str, Any] = {"FLOAT": x.is_floating_point(), "LEAST": least, "FLAT": inner == 1, "TURNED": f.turned is not None}
    kind |= {"M": m, "N": n}
    sizes = (f.rows, inner, f.length)
    if cut.splits == 1 and f.length <= n:
        _row_extreme((blocks(f.rows, m),), x, values, indices, *sizes, *walk, *f.apart,
                     **kind, EVEN=f.length == n and f.rows % m == 0, OF=f.of, warps=cut.warps)  # fmt: skip
        return
    programs, splits = blocks(f.rows, m), blocks(f.length, cut.part)
    keys, counters = meeting(x.device, programs, splits, f.rows, torch.int64)
    _extreme((programs, splits), x, keys, counters, values, indices, *sizes, cut.part, *walk, *f.apart,
             **kind, S=max(1, min(next_power(splits), _JOINED // m)), SHIFTED=cut.shifted, BARE=cut.bare,
             STAGES=cut.stages, UNROLL=_unroll(f, cut), OF=f.of, warps=cut.warps)  # fmt: skip


def _run_wide(x: torch.Tensor, f: Fold, values: torch.Tensor | None, indices: torch.Tensor, least: bool) -> None:
    m, n = f.cut.tile
    m, n = min(m, 512), max(1, min(n, 2048 // m))  # more fill the registers: 2 x 2032144 took 33.1 µs with 2048
    if f.cut.wide and not f.even and f.length <= 8:
        m = 512  # 3000 x 3 x 999 took 26.3 µs with as many as sums have, so 23.9
    if f.across:
        # Each thread its own: 64 x 50256 took 10.3 µs, so 4.9. Of lines that begin anywhere, however long they are: in tiles of 16
        # the compiler compares one element before it asks for the next (225 x 1056 x 119 took 100 µs, torch 81).
        if f.rows >= 1024 and (f.length <= 1024 or m == 64) and not f.cut.wide:
            m, n = 64, min(n, 8)
    elif f.length > 64:  # each warp a row: 4096 x 1024 took 12.6 µs in tiles that hold them whole, so 6.9
        m, n = (8, 32) if f.rows >= 64 and f.length <= 4096 else (1, 512)
    inner, *walk = f.numbered
    kind = {"LEAST": least, "FLOAT": x.is_floating_point()}
    shares = f.cut.shares(m, n)
    if m == 1:  # 342 x 56400 took 48.7 µs unshared, by two 37.9
        shares = max(shares, min(6 * chips.current().multiprocessors // f.rows, blocks(f.length, 16 * n), 4))
    part = blocks(blocks(f.length, shares), n) * n
    splits = blocks(f.length, part)
    sizes, warps = (f.rows, inner, f.length, part, *walk), 4 if f.across else 8
    if splits == 1:
        _wide_extreme((blocks(f.rows, m), 1), x, None, values, indices, *sizes, **kind, FLAT=inner == 1, M=m, N=n,
                      SINGLY=m == 64, warps=warps)  # fmt: skip
        return
    some = empty((splits, f.rows), x.dtype, x.device)
    places = empty((splits, f.rows), torch.int64, x.device)
    _wide_extreme((blocks(f.rows, m), splits), x, None, some, places, *sizes, **kind, FLAT=inner == 1, M=m, N=n,
                  SINGLY=m == 64, warps=warps)  # fmt: skip
    columns = next_power(splits)
    height = max(1, min(64, 1024 // columns))
    joined = (f.rows, 1, splits, splits, 1, 0, f.rows)
    _wide_extreme((blocks(f.rows, height), 1), some, places, values, indices, *joined, **kind, FLAT=True, M=height, N=columns,
                  SINGLY=False)  # fmt: skip


def argmax(self: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """the place of the first maximum"""
    if self.dtype is torch.bool:
        raise Unsupported("places of truth, which torch refuses in its own words")
    _, indices = _find(self, dim, keepdim, False, False)
    return indices if dim is not None or not keepdim else indices.reshape([1] * self.dim())


def max_dim(self: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor | None, torch.Tensor]:
    """max x and its place"""
    return _find(self, dim, keepdim, False, True)


def min_dim(self: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor | None, torch.Tensor]:
    """min x and its place"""
    return _find(self, dim, keepdim, True, True)
