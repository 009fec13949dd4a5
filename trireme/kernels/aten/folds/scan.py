"""y[i] = x[0] + … + x[i]: running sums along a dimension.
Knows rows; a long row is cut into chunks, each adding up the totals of those before it."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.elementwise.layout import normalise
from trireme.kernels.aten.folds.fold import Fold, begins, fold, lined_up
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power

FLOAT32, FLOAT64, INT64 = (tl.constexpr(work) for work in range(3))  # the types that sums are kept in
_KEPT = [torch.float32, torch.float64, torch.int64]


@kernel
def _scan(
    x, y, totals, rows, inner, length, chunk, x_outer, x_inner, x_step, y_outer, y_inner, y_step,
    WORK: tl.constexpr, TOTALS: tl.constexpr, FLAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[row, i] = Σ_{j ≤ i} x[row, j] in a chunk, after the totals of those before it; with TOTALS only totals[chunk, row] = Σ x"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    rows, inner, y_outer, y_step = lined_up(rows, inner, y_outer, y_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    part = tl.program_id(1)
    work = tl.float64 if WORK == FLOAT64 else tl.int64 if WORK == INT64 else tl.float32
    base = x + begins(row, inner, x_outer, x_inner, FLAT)
    out = y + begins(row, inner, y_outer, y_inner, FLAT)
    start = part * chunk
    stop = tl.minimum(start + chunk, length)
    carry = tl.zeros((M,), work)
    lanes = tl.zeros((M, N), work)
    if totals is not None and not TOTALS:
        before = tl.zeros((M, P), work)
        for first in range(0, part, P):
            earlier = (first + tl.arange(0, P))[None, :]
            place = totals + earlier.to(tl.int64) * rows + row[:, None]
            before += tl.load(place, mask=(row < rows)[:, None] & (earlier < part), other=0)
        carry = tl.sum(before, 1)
    for at in range(start, stop, N):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        value = tl.load(base[:, None] + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=0).to(work)
        if TOTALS:
            lanes += value
        else:
            running = tl.cumsum(value, 1) + carry[:, None]
            tl.store(out[:, None] + (column.to(tl.int64) * y_step)[None, :], running.to(y.dtype.element_ty), mask=mask)
            # The last running sum, picked out by a sum over one term: adding up the tile again would round differently.
            carry = tl.sum(tl.where((tl.arange(0, N) == N - 1)[None, :], running, tl.zeros_like(running)), 1)
    if TOTALS:
        tl.store(totals + part.to(tl.int64) * rows + row, tl.sum(lanes, 1), mask=row < rows)


def cumsum(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """y_i = x_0 + … + x_i; integers add up in int64"""
    result = dtype or (self.dtype if self.is_floating_point() or self.is_complex() else torch.int64)
    if self.is_complex() or result.is_complex or result is torch.bool:
        raise Unsupported(f"no running sum of {self.dtype} in {result}")
    normalise([dim], self.dim())
    if self.dim() == 0:
        return self.to(result, copy=True)
    y = empty(self.shape, result, self.device)
    if y.numel() == 0:
        return y
    if not result.is_floating_point and self.is_floating_point():
        self = self.to(result)
    kept = torch.int64 if not result.is_floating_point else torch.float64 if result is torch.float64 else torch.float32
    _run(self, y, dim, _KEPT.index(kept))
    return y


def _run(x: torch.Tensor, y: torch.Tensor, dim: int, work: int) -> None:
    (x, f), (y, g) = fold(x, dim, True), fold(y, dim, True)
    m, n, warps = _cut(f, max(x.element_size(), y.element_size()))
    processors = chips.current().multiprocessors
    programs, parts = blocks(f.rows, m), 1
    if programs < processors and f.length > 8 * n:  # a tile waits for the one before it, so few tiles to a part
        parts = min(blocks(f.length, 4 * n if f.across else n), 8 * processors // programs, 1024)
    chunk = blocks(blocks(f.length, parts), n) * n
    parts = blocks(f.length, chunk)
    inner, *walks = *f.numbered, *g.numbered[1:]
    walk = (f.rows, inner, f.length, chunk, *walks)
    cut: dict[str, Any] = {"FLAT": inner == 1, "M": m, "N": n, "P": max(1, min(next_power(parts), 2048 // m))}
    cut |= {"OF": min(f.of, g.of), "warps": warps, "WORK": work}
    totals = None
    if parts > 1:
        totals = empty((parts - 1, f.rows), _KEPT[work], x.device)  # nothing follows the last part
        _scan((programs, parts - 1), x, y, totals, *walk, TOTALS=True, **cut)
    _scan((programs, parts), x, y, totals, *walk, TOTALS=False, **cut)


def _cut(f: Fold, itemsize: int) -> tuple[int, int, int]:
    """Rows and elements of each in one tile, and its warps; `itemsize`: bytes of a sum. Side by side a thread has a row or several,
    and adds up without the others. One after the other a warp has a row if it is short; a long one that programs share goes in
    tiles of 1024, of which each waits for the one before."""
    n, processors = next_power(f.length), chips.current().multiprocessors
    if f.across:
        if f.length > 128:
            few = f.length <= 1024
            return (32, 32, 1) if few else (min(64, next_power(f.rows)), 64, 4)
        if f.rows >= 128 * processors and itemsize < 8:
            return 128 * max(1, min(4, f.vector)), min(n, 4), 4
        return 64, min(n, 16), 2
    if n > (4096 if f.rows >= 4 * processors and itemsize < 8 else 1024):
        return 1, 1024, 8 if processors <= f.rows < 4 * processors else 4
    if 32 < n <= 256:
        size = 512 if itemsize == 8 else 1024
        return min(size // n, next_power(f.rows)), n, 2 if itemsize == 8 and n > 64 else 1
    return max(1, min(2048 // n if n > 64 else 64, next_power(f.rows))), n, 4
