"""Reductions to a value: sum, mean, prod, max, min, amax, any, all, vector norms, var_mean.
Knows rows; a few long ones are split over programs and finished by a second pass, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels.fold import Fold, fold, normalise
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power
from trireme.kernels.pointwise import Number
from trireme.kernels.scalar import larger, smaller

SUM, PROD, MAX, MIN, ANY, ALL, NORM0, NORM1, NORM2, NORM_P, LARGEST, SMALLEST = range(12)
_SUPPORTED = {torch.float32, torch.float16, torch.bfloat16, torch.float64} | {
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
}


@triton.jit
def _multiply(a, b):
    return a * b


@kernel
def _fold(
    x, out, rows, inner, length, split_length, x_outer, x_inner, x_step, divisor, order,
    KIND: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, WORK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """out[split, row] = fold of x[row, split · split_length : …]; FIRST maps elements, LAST finishes the value"""
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    row64 = row.to(tl.int64)
    base = x + (row64 // inner) * x_outer + (row64 % inner) * x_inner
    start = split * split_length
    stop = tl.minimum(start + split_length, length)
    if WORK == 1:
        work = tl.float64
    elif WORK == 2:
        work = tl.int64
    elif WORK == 3:
        work = tl.int32
    else:
        work = tl.float32
    if KIND == 2 or KIND == 10:
        neutral = float("-inf") if work.is_floating() else -(2**31) if WORK == 3 else -(2**63)
    elif KIND == 3 or KIND == 11:
        neutral = float("inf") if work.is_floating() else 2**31 - 1 if WORK == 3 else 2**63 - 1
    elif KIND == 1 or KIND == 5:
        neutral = 1
    else:
        neutral = 0
    total = tl.full((M, N), neutral, work)
    for at in range(start, stop, N):
        column = at + tl.arange(0, N)
        # Splits are whole tiles, so the row's own end is the only ragged one, and its divisibility is known.
        mask = (row < rows)[:, None] & (column < length)[None, :]
        raw = tl.load(base[:, None] + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=0)
        value = raw.to(work) if KIND < 4 or KIND > 5 else (raw != 0).to(work)
        if FIRST and KIND == 6:
            value = (raw != 0).to(work)
        elif FIRST and (KIND == 7 or KIND >= 10):
            value = tl.abs(value)
        elif FIRST and KIND == 8:
            value = value * value
        elif FIRST and KIND == 9:
            value = tl.where(value == 0, tl.where(order == 0, 1.0, 0.0), tl.exp2(order * tl.log2(tl.abs(value))))
        value = tl.where(mask, value, tl.full((), neutral, work))
        if KIND == 1:
            total = total * value
        elif KIND == 2 or KIND == 10:
            total = larger(value, total)
        elif KIND == 3 or KIND == 11:
            total = smaller(value, total)
        elif KIND == 4:
            total = total | value
        elif KIND == 5:
            total = total & value
        else:
            total += value
    if KIND == 1:
        result = tl.reduce(total, 1, _multiply)
    elif KIND == 2 or KIND == 10:
        result = tl.reduce(total, 1, larger)
    elif KIND == 3 or KIND == 11:
        result = tl.reduce(total, 1, smaller)
    elif KIND == 4:
        result = tl.max(total, 1)
    elif KIND == 5:
        result = tl.min(total, 1)
    else:
        result = tl.sum(total, 1)
    if LAST and KIND == 0 and work.is_floating():
        result = result / divisor
    elif LAST and KIND == 8:
        result = tl.sqrt(result)
    elif LAST and KIND == 9:
        result = tl.where(result == 0, 0.0, tl.exp2(tl.log2(result) / order))
    tl.store(out + split.to(tl.int64) * rows + row, result.to(out.dtype.element_ty), mask=row < rows)


@kernel
def _moments(
    x, count_out, mean_out, square_out, rows, inner, length, split_length, x_outer, x_inner, x_step,
    DOUBLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """count, mean and Σ(x − mean)² of each split, each lane by Welford's update, lanes joined by Chan's"""
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    row64 = row.to(tl.int64)
    base = x + (row64 // inner) * x_outer + (row64 % inner) * x_inner
    start = split * split_length
    stop = tl.minimum(start + split_length, length)
    work = tl.float64 if DOUBLE else tl.float32
    count = tl.zeros((M, N), work)
    mean = tl.zeros((M, N), work)
    square = tl.zeros((M, N), work)
    for at in range(start, stop, N):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        value = tl.load(base[:, None] + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=0).to(work)
        count += mask.to(work)
        # Every lane that counts has seen the same number of elements, so one division serves all.
        share = 1.0 / ((at - start) // N + 1).to(work)
        delta = tl.where(mask, value - mean, 0.0)
        mean += delta * share
        square += tl.where(mask, delta * (value - mean), 0.0)
    total = tl.sum(count, 1)
    centre = tl.sum(tl.where(count > 0, mean * count, 0.0), 1) / tl.maximum(total, 1.0)
    off = tl.where(count > 0, mean - centre[:, None], 0.0)
    spread = tl.sum(square + count * off * off, 1)
    where = split.to(tl.int64) * rows + row
    tl.store(count_out + where, total, mask=row < rows)
    tl.store(mean_out + where, centre, mask=row < rows)
    tl.store(square_out + where, spread, mask=row < rows)


@kernel
def _row_moments(
    x, var_out, mean_out, rows, inner, length, x_outer, x_inner, x_step, correction,
    DOUBLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """mean = Σ x / n and var = Σ (x − mean)² / max(n − correction, 0) of rows that fit one tile"""
    work = tl.float64 if DOUBLE else tl.float32
    row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    column = tl.arange(0, N)
    mask = (row < rows)[:, None] & (column < length)[None, :]
    at = ((row // inner) * x_outer + (row % inner) * x_inner)[:, None] + (column.to(tl.int64) * x_step)[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(work)
    mean = tl.sum(value, 1) / length
    off = tl.where(mask, value - mean[:, None], 0.0)
    var = tl.sum(off * off, 1) / tl.maximum(length - correction, 0.0).to(work)
    tl.store(var_out + row, var.to(var_out.dtype.element_ty), mask=row < rows)
    tl.store(mean_out + row, mean.to(mean_out.dtype.element_ty), mask=row < rows)


@kernel
def _finish_moments(count, mean, square, var_out, mean_out, rows, splits, correction, M: tl.constexpr, S: tl.constexpr):
    """joins the splits; var = Σ(x − mean)² / max(n − correction, 0)"""
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.arange(0, S)
    mask = (split < splits)[:, None] & (row < rows)[None, :]
    at = split[:, None].to(tl.int64) * rows + row[None, :]
    n = tl.load(count + at, mask=mask, other=0)
    m = tl.load(mean + at, mask=mask, other=0)
    q = tl.load(square + at, mask=mask, other=0)
    total = tl.sum(n, 0)
    centre = tl.sum(n * m, 0) / total
    off = tl.where(n > 0, m - centre[None, :], 0.0)
    spread = tl.sum(q + n * off * off, 0)
    divisor = tl.maximum(total - correction, 0.0)
    tl.store(var_out + row, (spread / divisor).to(var_out.dtype.element_ty), mask=row < rows)
    tl.store(mean_out + row, centre.to(mean_out.dtype.element_ty), mask=row < rows)


def _work(dtype: torch.dtype) -> int:
    """Which accumulator a type takes: 0 float32, 1 float64, 2 int64, 3 int32."""
    if dtype.is_floating_point:
        return 1 if dtype is torch.float64 else 0
    return 2 if dtype is torch.int64 else 3


_WORK_TYPE = [torch.float32, torch.float64, torch.int64, torch.int32]


def _run(
    kind: int, x: torch.Tensor, dims: Any, keepdim: bool, dtype: torch.dtype, divisor: int = 1, order: float = 1.0
) -> torch.Tensor:
    """One reduction of a supported type into a new tensor of type `dtype`."""
    if x.dtype not in _SUPPORTED or dtype not in _SUPPORTED:
        raise Unsupported(f"no reduction of {x.dtype} to {dtype}")
    x, f = fold(x, dims, keepdim)
    out = empty(f.shape, dtype, x.device)
    if f.rows == 0:
        return out
    if f.length == 0:
        return out.fill_(1 if kind in (PROD, ALL) else float("nan") if divisor == 0 else 0)
    if kind in (ANY, ALL):
        work = 3
    else:
        work = _work(dtype if kind in (SUM, PROD) or NORM0 <= kind <= NORM_P else x.dtype)
    m, n = f.tile
    constants: dict[str, Any] = {"KIND": kind, "FIRST": True, "LAST": f.splits == 1, "WORK": work, "M": m, "N": n}
    warps = 8 if m * n >= 4096 else 4
    if f.splits == 1:
        walk = (f.rows, f.inner, f.length, f.length, *f.walk, divisor, order)
        _fold((blocks(f.rows, m), 1), x, out, *walk, **constants, warps=warps)
        return out
    splits = blocks(f.length, f.part)
    partial = empty((splits, f.rows), _WORK_TYPE[work], x.device)
    grid = (blocks(f.rows, m), splits)
    _fold(grid, x, partial, f.rows, f.inner, f.length, f.part, *f.walk, divisor, order, **constants, warps=warps)
    columns = min(next_power(splits), 1024)
    height = max(1, min(2048 // columns, next_power(f.rows)))
    _fold((blocks(f.rows, height), 1), partial, out, f.rows, f.rows, splits, splits, 0, 1, f.rows, divisor, order,
          KIND=kind, FIRST=False, LAST=True, WORK=work, M=height, N=columns)  # fmt: skip
    return out


def _sum_type(x: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64


def sum_dim(
    self: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Σ x over `dim`; integers add up in int64"""
    return _run(SUM, self, dim, keepdim, _sum_type(self, dtype))


def sum_all(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Σ x"""
    return sum_dim(self, dtype=dtype)


def mean_dim(
    self: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Σ x / n over `dim`"""
    result = dtype or self.dtype
    if not result.is_floating_point and not result.is_complex:
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: {result}"
        )
    count = self.numel() if dim is None else math.prod([self.shape[d] for d in normalise(dim, self.dim())])
    return _run(SUM, self, dim, keepdim, result, divisor=count)


def mean_all(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Σ x / n"""
    return mean_dim(self, dtype=dtype)


def prod_dim(self: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Π x over one dimension; integers multiply in int64"""
    return _run(PROD, self, [dim], keepdim, _sum_type(self, dtype))


def prod_all(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Π x"""
    return _run(PROD, self, None, False, _sum_type(self, dtype))


def amax(self: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    """max x over `dim`; NaN wins"""
    require_elements(self, dim, "amax")
    return _run(MAX, self, dim, keepdim, self.dtype)


def max_all(self: torch.Tensor) -> torch.Tensor:
    """max x"""
    return amax(self)


def min_all(self: torch.Tensor) -> torch.Tensor:
    """min x"""
    require_elements(self, None, "min")
    return _run(MIN, self, None, False, self.dtype)


def require_elements(x: torch.Tensor, dims: Sequence[int] | int | None, name: str) -> None:
    """Refuses to look for an extreme of nothing."""
    if x.numel() == 0 and any(x.shape[d] == 0 for d in normalise(dims, x.dim())):
        raise IndexError(f"{name}(): Expected reduction dim to be specified or have non-zero size; an empty set has no extreme")


def any_dims(self: torch.Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> torch.Tensor:
    """∨ (x ≠ 0)"""
    return _logical(ANY, self, dim, keepdim)


def all_dims(self: torch.Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> torch.Tensor:
    """∧ (x ≠ 0)"""
    return _logical(ALL, self, dim, keepdim)


def _logical(kind: int, x: torch.Tensor, dim: Sequence[int] | int | None, keepdim: bool) -> torch.Tensor:
    """uint8 stays uint8, as in torch; everything else gives bool. An empty list of dimensions reduces nothing."""
    result = torch.uint8 if x.dtype is torch.uint8 else torch.bool
    if isinstance(dim, (list, tuple)) and not dim:
        return (x != 0).to(result)
    return _run(kind, x, dim, keepdim, result)


def any_all(self: torch.Tensor) -> torch.Tensor:
    """∨ (x ≠ 0)"""
    return any_dims(self)


def all_all(self: torch.Tensor) -> torch.Tensor:
    """∧ (x ≠ 0)"""
    return all_dims(self)


def vector_norm(
    self: torch.Tensor,
    ord: Number = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """(Σ |x|^p)^(1/p); p = 0 counts, ±∞ take the extreme"""
    result = dtype or self.dtype
    if not self.is_floating_point() or not result.is_floating_point:
        raise Unsupported("vector norms of floats only")
    if self.numel() == 0 and (ord < 0 or ord == float("inf")):
        raise Unsupported("the norm of an empty vector")
    if ord in (float("inf"), float("-inf")):
        return _run(LARGEST if ord > 0 else SMALLEST, self, dim, keepdim, self.dtype).to(result)
    kind = {0.0: NORM0, 1.0: NORM1, 2.0: NORM2}.get(float(ord), NORM_P)
    if kind == NORM_P and result is torch.float64:
        raise Unsupported("a run-time order reaches the kernel as float32")
    return _run(kind, self, dim, keepdim, result, order=float(ord))


def var_mean(
    self: torch.Tensor, dim: Sequence[int] | None = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ (x − mean)² / (n − correction), and the mean"""
    if not self.is_floating_point():
        raise Unsupported("var_mean of floats only")
    x, f = fold(self, dim, keepdim)
    var, mean = (empty(f.shape, x.dtype, x.device) for _ in range(2))
    if f.rows == 0 or f.length == 0:
        return var.fill_(float("nan")), mean.fill_(float("nan"))
    double = x.dtype is torch.float64
    correction = float(1 if correction is None else correction)
    m, n = f.tile
    if f.length <= n and f.splits == 1:
        _row_moments((blocks(f.rows, m),), x, var, mean, f.rows, f.inner, f.length, *f.walk, correction,
                     DOUBLE=double, M=m, N=n, warps=8 if m * n >= 4096 else 4)  # fmt: skip
    else:
        _split_moments(x, f, var, mean, correction, double)
    return var, mean


def _split_moments(x: torch.Tensor, f: Fold, var: torch.Tensor, mean: torch.Tensor, correction: float, double: bool) -> None:
    m, n = f.tile
    n = max(1, min(n, 2048 // m))  # three accumulators
    part = blocks(blocks(f.length, f.splits), n) * n
    splits = blocks(f.length, part)
    work = torch.float64 if double else torch.float32
    counts, means, squares = empty((3, splits, f.rows), work, x.device)
    _moments((blocks(f.rows, m), splits), x, counts, means, squares, f.rows, f.inner, f.length, part, *f.walk,
             DOUBLE=double, M=m, N=n, warps=8)  # fmt: skip
    columns = next_power(splits)
    height = max(1, min(64, 2048 // columns))
    _finish_moments((blocks(f.rows, height),), counts, means, squares, var, mean, f.rows, splits, correction,
                    M=height, S=columns)  # fmt: skip
