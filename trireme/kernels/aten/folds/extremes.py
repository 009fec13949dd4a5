"""value[row] = the extreme of x[row, i], place[row] = the first i that has it: argmax, max.dim, min.dim. NaN outranks all.
Knows rows; programs that share a long one leave their extremes and places, of which a second launch takes the extreme."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.elementwise.layout import normalise
from trireme.kernels.aten.folds.cut import Cut
from trireme.kernels.aten.folds.fold import Fold, aligned, begins, ends, fold, lined_up, placed
from trireme.kernels.aten.folds.reduce import best_cut, require_elements
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power
from trireme.kernels.scalar import highest, larger, lowest, smaller

# The type in which values are compared; kernels know it by its place in the list.
_WORK = {
    torch.float32: torch.float32, torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64,
    torch.int8: torch.int32, torch.uint8: torch.int32, torch.int16: torch.int32, torch.int32: torch.int32, torch.bool: torch.int32,
    torch.int64: torch.int64,
}  # fmt: skip
_NUMBERS = [torch.float32, torch.float64, torch.int64, torch.int32]
_HELD = 2048  # elements of a tile: two numbers are kept for each


@triton.constexpr_function
def _type(work: int) -> Any:
    return (tl.float32, tl.float64, tl.int64, tl.int32)[work]


@triton.jit
def _better(value, best, LEAST: tl.constexpr):
    """Whether a value comes before the best so far; NaN does, unless there is one already"""
    better = value < best if LEAST else value > best
    if value.dtype.is_floating():
        better = better | ((value != value) & (best == best))
    return better


@kernel
def _extreme(
    x, given, values, places, rows, inner, length, split_length, x_outer, x_inner, x_step, out_outer, out_inner,
    LEAST: tl.constexpr, WORK: tl.constexpr, FLAT: tl.constexpr, TURNED: tl.constexpr, SHIFTED: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The extreme and its place of each row's part; each lane keeps the first of its own columns. Of rows that are parts' extremes
    the places are `given`; such a row fits a tile. SHIFTED: rows begin anywhere, and their ends go apart"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    start = split * split_length
    stop = tl.minimum(start + split_length, length)
    base = begins(row, inner, x_outer, x_inner, FLAT)
    head, even = 0, length
    if SHIFTED:
        base, head, even = aligned(base, length)
        head, even = head[:, None], even[:, None]
    base = (x + base)[:, None]
    work: tl.constexpr = _type(WORK)
    last = highest(work) if LEAST else lowest(work)
    blank = highest(x.dtype.element_ty) if LEAST else lowest(x.dtype.element_ty)
    far: tl.constexpr = 0x7FFFFFFF
    ahead = (tl.arange(0, N).to(tl.int64) * x_step)[None, :]
    best = tl.full((M, N), last, work)
    place = tl.broadcast_to((start + tl.arange(0, N))[None, :], (M, N))
    for at in tl.range(start, stop, N, num_stages=STAGES, loop_unroll_factor=UNROLL):
        column = (at + tl.arange(0, N))[None, :]
        mask = (row < rows)[:, None] & (column < even)
        value = tl.load(base + tl.cast(at, tl.int64) * x_step + ahead, mask=mask, other=blank).to(work)
        better = _better(value, best, LEAST)
        best = tl.where(better, value, best)
        place = tl.where(better, column, place)
    place = tl.where(place < tl.minimum(stop, even), place, far)
    if given is not None:
        place = tl.load(given + begins(row, inner, x_outer, x_inner, FLAT)[:, None] + ahead, mask=place < length, other=far)
    place = tl.where(place < far, place + head, far)
    extreme, first = _first_of(best, place, LEAST)
    if SHIFTED and split == tl.num_programs(1) - 1:
        column, mask = ends(head, even, length)
        edge = tl.load(base + column, mask=mask & (row < rows)[:, None], other=blank).to(work)
        edge, edge_first = _first_of(edge, tl.where(mask, column + head, far), LEAST)
        better = _better(edge, extreme, LEAST)
        alike = (edge == extreme) | ((edge != edge) & (extreme != extreme))
        first = tl.where(better | (alike & (edge_first < first)), edge_first, first)
        extreme = tl.where(better, edge, extreme)
    to = placed(row, inner, out_outer, out_inner, TURNED) + split.to(tl.int64) * rows
    tl.store(places + to, first, mask=row < rows)
    if values is not None:
        tl.store(values + to, extreme.to(values.dtype.element_ty), mask=row < rows)


@triton.jit
def _first_of(best, place, LEAST: tl.constexpr):
    """Of each row of a tile the extreme, and the least of the places that have it"""
    extreme = tl.reduce(best, 1, smaller if LEAST else larger)
    found = best == extreme[:, None]
    if best.dtype.is_floating():  # where the extreme is NaN nothing equals it, and what is not equal to itself are the NaNs
        found = found | (best != best)
    return extreme, tl.min(tl.where(found, place, 0x7FFFFFFF), 1)


def _find(
    x: torch.Tensor, dim: int | None, keepdim: bool, least: bool, want_values: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The extreme along `dim` (over all if None) and where it is first met."""
    require_elements(x, dim, "min" if least else "max")
    if x.dim() == 0:
        normalise(dim, 0)
        x = x.reshape(1)
        dim, keepdim = None, False
    x, f = fold(x, dim, keepdim, turn=dim is not None)
    if x.dtype not in _WORK:
        raise Unsupported(f"no extreme of {x.dtype}")
    indices = empty(f.shape, torch.int64, x.device)
    values = empty(f.shape, x.dtype, x.device) if want_values else None
    if f.rows:
        start = functools.partial(_start, x, f, values, indices, least)
        start(best_cut("extreme", f, start))
    return values, indices


def _start(x: torch.Tensor, f: Fold, values: torch.Tensor | None, indices: torch.Tensor, least: bool, cut: Cut) -> None:
    n = max(1, min(cut.N, _HELD // cut.M))
    part = blocks(blocks(f.length, cut.splits), n) * n
    splits = blocks(f.length, part)
    work = _NUMBERS.index(_WORK[x.dtype])
    inner, *walk = f.numbered
    kind: dict[str, Any] = {"LEAST": least, "WORK": work}
    lie: dict[str, Any] = {
        "FLAT": inner == 1,
        "TURNED": f.turned is not None and splits == 1,
        "SHIFTED": f.shifted and f.length > n,
        "OF": f.of,
    }
    some, places = values, indices
    if splits > 1:
        some, places = empty((splits, f.rows), _NUMBERS[work], x.device), empty((splits, f.rows), torch.int32, x.device)
    _extreme((blocks(f.rows, cut.M), splits), x, None, some, places, f.rows, inner, f.length, part, *walk, *f.apart, **kind, **lie,
             M=cut.M, N=n, STAGES=cut.stages, UNROLL=min(cut.unroll, 8), warps=cut.warps)  # fmt: skip
    if splits > 1:
        n = next_power(splits)
        m = max(1, min(64, 1024 // n))
        sizes = (f.rows, f.inner, splits, splits, f.inner, 1, f.rows) if f.turned else (f.rows, 1, splits, splits, 1, 0, f.rows)
        _extreme((blocks(f.rows, m), 1), some, places, values, indices, *sizes, *f.apart, **kind, FLAT=not f.turned,
                 TURNED=f.turned is not None, SHIFTED=False, M=m, N=n, STAGES=1, UNROLL=1, OF=1)  # fmt: skip


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
