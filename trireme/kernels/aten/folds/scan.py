"""Running sums along a dimension. Knows rows; a long row is cut into chunks, each adding up the totals of those before it."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.elementwise.layout import normalise
from trireme.kernels.aten.elementwise.pointwise import pointwise
from trireme.kernels.aten.folds.fold import Fold, begins, fold, lined_up
from trireme.kernels.aten.scalar import singly
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power

_IN_WARP = 512  # elements of small matrices that a warp adds up at once


@kernel
def _scan(
    x, y, totals, rows, inner, length, chunk, x_outer, x_inner, x_step, y_outer, y_inner, y_step,
    WORK: tl.constexpr, TOTALS: tl.constexpr, FLAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    OF: tl.constexpr, SINGLY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[row, i] = Σ_{j ≤ i} x[row, j] in a chunk, after the totals of those before it; with TOTALS only totals[chunk, row] = Σ x"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    rows, inner, y_outer, y_step = lined_up(rows, inner, y_outer, y_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    part = tl.program_id(1)
    work = tl.float64 if WORK == 1 else tl.int64 if WORK == 2 else tl.float32
    base = x + begins(row, inner, x_outer, x_inner, FLAT)
    out = y + begins(row, inner, y_outer, y_inner, FLAT)
    if SINGLY:
        base, out = singly(base), singly(out)
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


@kernel
def _scan_matrices(
    x, y, matrices, length, columns, x_outer, y_outer,
    WORK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[matrix, i, column] = Σ_{j ≤ i} x[matrix, j, column] of matrices that fit a tile of N by C, M of them, so that neighbours in
    memory come together however few columns there are"""
    chips.begin(EARLY, OPEN=False)
    work = tl.float64 if WORK == 1 else tl.int64 if WORK == 2 else tl.float32
    matrix = tl.program_id(0) * M + tl.arange(0, M)
    row, column = tl.arange(0, N), tl.arange(0, C)
    at = (row * columns)[None, :, None] + column[None, None, :]
    mask = (matrix < matrices)[:, None, None] & (row < length)[None, :, None] & (column < columns)[None, None, :]
    value = tl.load(x + (matrix.to(tl.int64) * x_outer)[:, None, None] + at, mask=mask, other=0).to(work)
    running = tl.cumsum(value, 1) + tl.zeros_like(value)  # so that −0 is 0
    tl.store(y + (matrix.to(tl.int64) * y_outer)[:, None, None] + at, running.to(y.dtype.element_ty), mask=mask)


@pointwise()
def _alone(x):
    """0 + x: the sum of a single element, so that −0 is 0"""
    return x + tl.zeros_like(x)


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
    if self.shape[dim] == 1:
        return _alone(self, out=y)
    _run(self, y, dim, 1 if result is torch.float64 else 0 if result.is_floating_point else 2)
    return y


def _run(x: torch.Tensor, y: torch.Tensor, dim: int, work: int) -> None:
    (x, f), (y, g) = fold(x, dim, True), fold(y, dim, True)
    tile = _matrix_tile(f, g, work)
    if tile is not None:
        m, n, c = tile
        matrices = f.rows // f.columns
        _scan_matrices((blocks(matrices, m),), x, y, matrices, f.length, f.columns, f.walk[0], g.walk[0], WORK=work, M=m, N=n, C=c,
                       warps=max(1, min(4, n * c // _IN_WARP)))  # fmt: skip
        return
    itemsize = max(x.element_size(), y.element_size())
    m, n, warps = _cut(f, itemsize, work)
    chip = chips.current()
    programs = blocks(f.rows, m)
    parts = 1
    if programs < chip.multiprocessors and f.length > 8 * n:
        # A tile waits for the one before it: 1048576 int64 took 11.9 µs in parts of four, of one 7.2.
        parts = min(blocks(f.length, 4 * n if f.across else n), 8 * chip.multiprocessors // programs, 1024)
    chunk = blocks(blocks(f.length, parts), n) * n
    parts = blocks(f.length, chunk)
    inner, *walks = *f.numbered, *g.numbered[1:]
    walk = (f.rows, inner, f.length, chunk, *walks)
    cut: dict[str, Any] = {"FLAT": inner == 1, "M": m, "N": n, "P": max(1, min(next_power(parts), 2048 // m))}
    cut |= {"OF": min(f.of, g.of), "SINGLY": _singly(f, itemsize), "warps": warps}
    totals = None
    if parts > 1:
        kind = {0: torch.float32, 1: torch.float64, 2: torch.int64}[work]
        totals = empty((parts - 1, f.rows), kind, x.device)  # nothing follows the last part
        _scan((programs, parts - 1), x, y, totals, *walk, WORK=work, TOTALS=True, **cut)
    _scan((programs, parts), x, y, totals, *walk, WORK=work, TOTALS=False, **cut)


def _matrix_tile(f: Fold, g: Fold, work: int) -> tuple[int, int, int] | None:
    """If many small matrices of a few columns are to be added up: how many a tile holds, their rows and columns. Where a thread had
    its columns alone, 186414 x 45 x 3 bfloat16 took 238 µs, so 59 (torch 188); 100000 x 60 x 2 floats 165 and 26, 157286 x 20 x 2
    int64 73 and 41."""
    columns, n, c = f.columns, next_power(f.length), next_power(f.columns)
    # Whole numbers of 64 bits go from lane to lane in two steps: 27962 x 45 x 5 took 59.9 and 59.5, 5825 x 120 x 9 50.7 and 67.1.
    most = 4096 if work < 2 else 512 if columns <= 3 else 256
    if not (f.cut.matrix and g.cut.matrix and 1 < columns < 16 and f.length > 4 and n * c <= most):
        return None
    m = max(1, _IN_WARP // (n * c))
    return (m, n, c) if blocks(f.rows // columns, m) >= chips.current().multiprocessors else None


def _cut(f: Fold, itemsize: int, work: int) -> tuple[int, int, int]:
    """Rows and elements of each in one tile, and its warps; `itemsize`: bytes of a sum; `work`: 2 if sums are whole numbers."""
    n, processors = next_power(f.length), chips.current().multiprocessors
    many = f.rows >= 4 * processors
    if _together(f, itemsize):
        return 1024 // f.itemsize, min(n, 4 if f.itemsize == 1 else 8), 2  # 16 bytes for each thread
    if f.across:
        # A thread for each row, several of very short ones: 16 x 300 x 2048 bfloat16 took 22.4 µs where two warps shared them, so
        # 15.9.
        if f.length <= 128:
            # 1625 x 9 x 234 bfloat16 took 7.7 µs in tiles of 64 by 16, so 5.8; 36 x 386312 int64 80.8 and 61.
            if f.rows >= 1 << 15 and f.length <= 64:
                if n > 32 and f.itemsize < itemsize == 8:
                    return 64, 16, 2  # 60 x 100004 bytes took 23.0 µs in tiles of four, so 16.4
                if n > 8:
                    return 128, 4, 2
                # Of eight int64 a thread takes one row: of four the compiler adds up one element before it asks for the next (38 x
                # 8 x 11331 took 43 µs, torch 18).
                alone = n == 8 and f.itemsize == 8 and work == 2
                return 128 if alone else 512, n, 4
            return 64, min(n, 16), 2
        # Programs of one warp are too few for very long ones: 8192 x 4096 took 168 µs so, with four warps for each tile 87.
        return (32, 32, 1) if _singly(f, itemsize) else (min(64, next_power(f.rows)), 64, 4)
    if f.rows == 1 and f.length > 1 << 20 and itemsize == 8:  # whose parts have several tiles: 4194304 32.7 µs as below, so 30.2
        return 1, 2048, 8
    # Of many rows each in one piece if it fits: 35 against 38 µs for 8192 x 4096 on an H200. But 3776 sums of int64 over 4847 took
    # 281 µs in pieces of 4096, so 119.
    if n > (4096 if many and itemsize < 8 else 1024):
        return 1, 1024, 8 if processors <= f.rows and not many else 4
    if n <= 256 and (n > 32 or itemsize == 8):
        # Few warps meet for each: 100000 sums over 33 floats took 25.7 µs as below, so 10.4; over int32, whose sums fill twice as
        # many registers, 122 and 22.
        size, warps = (512, 1 if n <= 64 else 2) if itemsize == 8 else (1024, 1)
        return min(size // n, 64, next_power(f.rows)), n, warps
    return max(1, min(2048 // n if n > 64 else 64, next_power(f.rows))), n, 4


def _together(f: Fold, itemsize: int) -> bool:
    """Whether there are so many short rows side by side that a thread takes elements of several at once; not where sums are wider
    than elements, which would fill its registers (41 x 189776 bytes took 32.4 µs, so 22.0; 584 x 6 x 1132 24.5 and 10.6)."""
    return f.cut.wide and f.even and (itemsize < 8 or f.itemsize == 8)


def _singly(f: Fold, itemsize: int) -> bool:
    """Whether a thread has one row side by side with others, or several, but takes their elements one by one."""
    return f.across and f.length <= 1024 and not _together(f, itemsize)
