"""softmax: y = exp(x − max x) / Σ exp(x − max x), log_softmax: y = x − max x − log Σ exp(x − max x), along any dimension, and their
gradients. Knows rows: short ones stay in registers, long ones are read twice, few long ones by several programs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.elementwise.unary import same
from trireme.kernels.aten.folds.fold import Fold, aligned, begins, ends, fold, lined_up
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power, shared_by
from trireme.kernels.scalar import log_of_sum, multiple

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_PIECE = 4096  # elements that a program takes at once of rows that several share
_PARTS = 32  # the most programs that share a row
_COPIED = 1 << 17  # elements from which on short rows that lie in another order than their results are copied first


@triton.jit
def _share(power, whole):
    """power / whole; a division of float64 for each element would take as long as its exponential"""
    return power * (1.0 / whole) if power.dtype == tl.float64 else power / whole


@triton.jit
def risen(top, total, value):
    """running maxima, and sums of powers below them, after another value of each: one of the two powers is 1, the other computed"""
    rises = (value > top) | (value != value)
    higher, lower = tl.where(rises, value, top), tl.where(rises, top, value)
    power = tl.where(lower == float("-inf"), 0.0, tl.exp(lower - higher))
    return higher, tl.where(rises, total * power + 1.0, total + power)


@triton.jit
def _scaled(value, whole, log, LOG: tl.constexpr):
    """The result for values less their maximum"""
    return value - log if LOG else _share(tl.exp(value), whole)


@kernel
def _softmax(
    x, y, rows, inner, length, x_outer, x_inner, x_step, y_outer, y_inner, y_step,
    LOG: tl.constexpr, DOUBLE: tl.constexpr, FLAT: tl.constexpr, BESIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    OF: tl.constexpr, OPEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The whole row in one tile. OF divides where rows begin and end, or the lines of rows BESIDE each other"""
    chips.begin(EARLY, OPEN)
    if BESIDE:
        rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
        rows, inner, y_outer, y_step = lined_up(rows, inner, y_outer, y_step, OF, FLAT)
    else:
        length, x_outer, y_outer = multiple(length, OF), multiple(x_outer, OF), multiple(y_outer, OF)
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, N)
    mask = (row < rows)[:, None] & (column < length)[None, :]
    at = begins(row, inner, x_outer, x_inner, FLAT)[:, None] + (column.to(tl.int64) * x_step)[None, :]
    value = tl.load(x + at, mask=mask, other=float("-inf")).to(tl.float64 if DOUBLE else tl.float32)
    value = value - tl.max(value, 1)[:, None]
    power = tl.exp(value)
    total = tl.sum(power, 1)[:, None]
    result = value - log_of_sum(total) if LOG else _share(power, total)
    to = begins(row, inner, y_outer, y_inner, FLAT)[:, None] + (column.to(tl.int64) * y_step)[None, :]
    tl.store(y + to, result.to(y.dtype.element_ty), mask=mask)


@kernel
def _partial(
    x, tops, totals, rows, inner, length, part, x_outer, x_inner, x_step,
    DOUBLE: tl.constexpr, FLAT: tl.constexpr, SHIFTED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, OF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """tops[part, row] = max x and totals[part, row] = Σ exp(x − max x) of one part of each row. SHIFTED: rows begin anywhere"""
    chips.begin(EARLY, OPEN=True)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    base, head, even = begins(row, inner, x_outer, x_inner, FLAT), 0, length
    if SHIFTED:
        base, head, even = aligned(base, length)
        head, even = head[:, None], even[:, None]
    base = (x + base)[:, None]
    work = tl.float64 if DOUBLE else tl.float32
    top = tl.full((M, N), float("-inf"), work)
    total = tl.zeros((M, N), work)
    start = tl.program_id(1) * part
    ahead = (tl.arange(0, N).to(tl.int64) * x_step)[None, :]
    for at in range(start, tl.minimum(start + part, length), N):
        mask = (row < rows)[:, None] & ((at + tl.arange(0, N))[None, :] < even)
        value = tl.load(base + (tl.cast(at, tl.int64) * x_step + ahead), mask=mask, other=float("-inf")).to(work)
        top, total = risen(top, total, value)
    peak = tl.max(top, 1)
    beyond = tl.zeros((M,), work)
    if SHIFTED and tl.program_id(1) == tl.num_programs(1) - 1:
        column, mask = ends(head, even, length)
        edge = tl.load(base + column, mask=mask & (row < rows)[:, None], other=float("-inf")).to(work)
        peak = tl.maximum(peak, tl.max(edge, 1))
        beyond = tl.sum(tl.where(edge == float("-inf"), 0.0, tl.exp(edge - peak[:, None])), 1)
    lanes = tl.where(top == float("-inf"), 0.0, total * tl.exp(top - peak[:, None]))
    at = tl.program_id(1).to(tl.int64) * rows + row
    tl.store(tops + at, peak, mask=row < rows)
    tl.store(totals + at, tl.sum(lanes, 1) + beyond, mask=row < rows)


@kernel
def _whole(
    x, y, tops, totals, parts, rows, inner, length, part, x_outer, x_inner, x_step, y_outer, y_inner, y_step,
    LOG: tl.constexpr, DOUBLE: tl.constexpr, FLAT: tl.constexpr, SHIFTED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    S: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of each row, once the maxima and sums of all its parts are known"""
    chips.begin(EARLY, OPEN=True)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    rows, inner, y_outer, y_step = lined_up(rows, inner, y_outer, y_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.arange(0, S)[None, :]
    known = (row < rows)[:, None] & (split < parts)
    at = split.to(tl.int64) * rows + row[:, None]
    top = tl.load(tops + at, mask=known, other=float("-inf"))
    total = tl.load(totals + at, mask=known, other=0.0)
    peak = tl.max(top, 1)[:, None]
    whole = tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - peak)), 1)[:, None] + (peak - peak)
    log = log_of_sum(whole)
    base, head, even = begins(row, inner, x_outer, x_inner, FLAT), 0, length
    out = begins(row, inner, y_outer, y_inner, FLAT)
    if SHIFTED:  # of both tensors alike
        base, head, even = aligned(base, length)
        out, head, even = base, head[:, None], even[:, None]
    base, out = (x + base)[:, None], (y + out)[:, None]
    start = tl.program_id(1) * part
    column = tl.arange(0, N).to(tl.int64)[None, :]
    for at in range(start, tl.minimum(start + part, length), N):
        mask = (row < rows)[:, None] & ((at + tl.arange(0, N))[None, :] < even)
        far = tl.cast(at, tl.int64)
        value = tl.load(base + (far * x_step + column * x_step), mask=mask, other=0.0).to(top.dtype) - peak
        tl.store(out + (far * y_step + column * y_step), _scaled(value, whole, log, LOG).to(y.dtype.element_ty), mask=mask)
    if SHIFTED and tl.program_id(1) == tl.num_programs(1) - 1:
        place, mask = ends(head, even, length)
        mask = mask & (row < rows)[:, None]
        edge = tl.load(base + place, mask=mask, other=0.0).to(top.dtype) - peak
        tl.store(out + place, _scaled(edge, whole, log, LOG).to(y.dtype.element_ty), mask=mask)


def _tile(f: Fold, limit: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program that holds whole rows, or `limit` elements of each. One after the other: a few short
    rows together, since only so many programs begin in a microsecond. Side by side: as many as fill whole sectors of memory, or,
    of very many short ones, several for each thread."""
    n = min(next_power(f.length), limit)
    double = f.itemsize == 8
    if not f.across:
        m = max(1, min((512 if double else 2048) // n, next_power(f.rows)))
    elif n <= 16 and f.rows >= 128 * chips.current().multiprocessors:
        return 1024 // n if double else 2048 // f.itemsize, n, 4
    else:
        m = min(next_power(f.rows), max(32, 2048 // n) if not double or n < 128 else 8)
        n = min(n, max(1, (limit // 4 if double else limit) // m))
    size = m * n * (2 if double else 1)
    return m, n, 4 if size < 4096 else 8 if size < 8192 else 16


def _apply(x: torch.Tensor, dim: int, dtype: torch.dtype | None, log: bool) -> torch.Tensor:
    result = dtype or x.dtype
    if dtype is not None and (x.dtype not in _FLOATS or dtype.itemsize < x.dtype.itemsize):
        x = x.to(dtype)  # first, as torch does: what a smaller type cannot hold is infinite in it
    if x.dtype not in _FLOATS or result not in _FLOATS:
        raise Unsupported(f"no softmax of {x.dtype} to {result}")
    if x.dim() == 0:
        return _apply(x.reshape(1), dim, dtype, log).reshape(())
    x, f = fold(x, dim, True)
    y = empty(x.shape, result, x.device)
    if y.numel() == 0:
        return y
    y, g = fold(y, dim, True)
    apart = f.step != 1 and f.inner > 1 and 0 < f.walk[0] < f.walk[1]  # neighbours in memory are rows far apart in the result
    if apart and f.length <= 16 and f.rows * f.length >= _COPIED:
        x, f = fold(same(x, out=empty(x.shape, x.dtype, x.device)), dim, True)
    _run(x, y, f, g, log)
    return y


def _run(x: torch.Tensor, y: torch.Tensor, f: Fold, g: Fold, log: bool) -> None:
    """In one tile what fits, else in parts."""
    double = torch.float64 in (x.dtype, y.dtype)
    limit = chips.current().row_elements // (2 if double else 1)
    m, n, warps = _tile(f, limit)
    if f.length > n:
        tops, totals, part = _partial_sums(x, f, double)
        (m, n, warps), parts = _part_tile(f, double), tops.shape[0]
        inner, *walks = *f.numbered, *g.numbered[1:]
        _whole((blocks(f.rows, m), parts), x, y, tops, totals, parts, f.rows, inner, f.length, part, *walks, LOG=log, DOUBLE=double,
               FLAT=inner == 1, SHIFTED=f.shifted and f.numbered == g.numbered, M=m, N=n, S=next_power(parts),
               OF=min(f.of, g.of), warps=warps)  # fmt: skip
        return
    programs, (inner, *walks) = blocks(f.rows, m), (*f.numbered, *g.numbered[1:])
    alone = all(walk[0] == 1 and walk[3] == 1 for walk in (f.numbered, g.numbered))
    of = shared_by(f.length, f.numbered[1], g.numbered[1]) if alone else min(f.of, g.of)
    _softmax((programs,), x, y, f.rows, inner, f.length, *walks, LOG=log, DOUBLE=double, FLAT=inner == 1, BESIDE=not alone,
             M=m, N=n, OF=of, OPEN=chips.crowded(programs, warps), warps=warps)  # fmt: skip


def _part_tile(f: Fold, double: bool) -> tuple[int, int, int]:
    """Rows, elements of each and warps of a tile of rows that are read twice."""
    piece = _PIECE // (4 if double else 1)
    if not f.across:
        return 1, piece, 8
    m = min(next_power(f.rows), 64 if f.itemsize < 8 else 32)
    return m, min(next_power(f.length), piece // m // 2), 4


def _partial_sums(x: torch.Tensor, f: Fold, double: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Maxima and Σ exp(x − maximum) of parts of rows, as [part, row], and the elements of a part; as many as fill the chip."""
    m, n, warps = _part_tile(f, double)
    tracks = blocks(f.rows, m)
    parts = max(1, min(_PARTS, 8 * chips.current().multiprocessors // tracks, blocks(f.length, n)))
    part = blocks(blocks(f.length, parts), n) * n
    parts = blocks(f.length, part)
    tops, totals = empty((2, parts, f.rows), torch.float64 if double else torch.float32, x.device)
    inner, *walk = f.numbered
    _partial((tracks, parts), x, tops, totals, f.rows, inner, f.length, part, *walk, DOUBLE=double, FLAT=inner == 1,
             SHIFTED=f.shifted, M=m, N=n, OF=f.of, warps=warps)  # fmt: skip
    return tops, totals, part


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None, log: bool) -> torch.Tensor:
        y = _apply(x, dim, dtype, log)
        ctx.save_for_backward(y)
        ctx.dim, ctx.dtype, ctx.log = dim, x.dtype, log
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (y,) = ctx.saved_tensors
        if torch.is_grad_enabled() or y.dtype is not ctx.dtype:  # to be derived once more, or of another type than its input
            dx = grad - y.exp() * grad.sum(ctx.dim, True) if ctx.log else y * (grad - (grad * y).sum(ctx.dim, True))
            return dx.to(ctx.dtype), None, None, None
        derive = torch.ops.aten._log_softmax_backward_data if ctx.log else torch.ops.aten._softmax_backward_data
        return derive(grad, y, ctx.dim, ctx.dtype), None, None, None


def softmax_forward(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """exp(x − max x) / Σ exp(x − max x)"""
    return _apply(self, dim, dtype, False)


def log_softmax_forward(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x − max x − log Σ exp(x − max x)"""
    return _apply(self, dim, dtype, True)


def softmax(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """softmax, differentiable"""
    return _Softmax.apply(self, dim, dtype, False)


def log_softmax(self: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """log_softmax, differentiable"""
    return _Softmax.apply(self, dim, dtype, True)
