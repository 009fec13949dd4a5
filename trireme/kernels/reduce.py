"""Reductions: sum, mean, prod, max, min, amax, any, all, vector norms, argmax, max/min with indices, var_mean.
Knows how a tensor folds to kept × reduced; a long fold is split over programs and finished by a second pass, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.launch import Unsupported, blocks, kernel, next_power
from trireme.kernels.pointwise import Number

SUM, PROD, MAX, MIN, ANY, ALL, NORM0, NORM1, NORM2, NORM_P = range(10)
_SUPPORTED = {torch.float32, torch.float16, torch.bfloat16, torch.float64} | {
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
}
_TILE = 4096  # elements a program holds at once; eight 16-byte loads of bf16 a thread with 8 warps


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _larger(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _smaller(a, b):
    return tl.where((a < b) | (a != a), a, b)


@kernel
def _fold(
    x, out, rows, inner, length, split_length, x_outer, x_inner, x_step, factor, order,
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
    if KIND == 2:
        neutral = float("-inf") if work.is_floating() else -(2**31) if WORK == 3 else -(2**63)
    elif KIND == 3:
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
        elif FIRST and KIND == 7:
            value = tl.abs(value)
        elif FIRST and KIND == 8:
            value = value * value
        elif FIRST and KIND == 9:
            value = tl.where(value == 0, tl.where(order == 0, 1.0, 0.0), tl.exp2(order * tl.log2(tl.abs(value))))
        if FIRST and (KIND == 2 or KIND == 3) and factor == 0:
            value = tl.abs(value)
        value = tl.where(mask, value, tl.full((), neutral, work))
        if KIND == 1:
            total = total * value
        elif KIND == 2:
            total = _larger(value, total)
        elif KIND == 3:
            total = _smaller(value, total)
        elif KIND == 4:
            total = total | value
        elif KIND == 5:
            total = total & value
        else:
            total += value
    if KIND == 1:
        result = tl.reduce(total, 1, _multiply)
    elif KIND == 2:
        result = tl.reduce(total, 1, _larger)
    elif KIND == 3:
        result = tl.reduce(total, 1, _smaller)
    elif KIND == 4:
        result = tl.max(total, 1)
    elif KIND == 5:
        result = tl.min(total, 1)
    else:
        result = tl.sum(total, 1)
    if LAST and KIND == 0 and work.is_floating():
        result = result * factor
    elif LAST and KIND == 8:
        result = tl.sqrt(result)
    elif LAST and KIND == 9:
        result = tl.where(result == 0, 0.0, tl.exp2(tl.log2(result) / order))
    tl.store(out + split.to(tl.int64) * rows + row, result.to(out.dtype.element_ty), mask=row < rows)


@kernel
def _arg_fold(
    x, given, values, indices, rows, inner, length, split_length, x_outer, x_inner, x_step,
    LEAST: tl.constexpr, WORK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """values, indices = the first greatest (or least) element and its place; NaN outranks all; `given` renames places"""
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    row64 = row.to(tl.int64)
    at_row = (row64 // inner) * x_outer + (row64 % inner) * x_inner
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
    if LEAST:
        neutral = float("inf") if work.is_floating() else 2**31 - 1 if WORK == 3 else 2**63 - 1
    else:
        neutral = float("-inf") if work.is_floating() else -(2**31) if WORK == 3 else -(2**63)
    far = 2**63 - 1
    best = tl.full((M, N), neutral, work)
    place = tl.full((M, N), far, tl.int64)
    for at in range(start, stop, N):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        offset = at_row[:, None] + (column.to(tl.int64) * x_step)[None, :]
        value = tl.where(mask, tl.load(x + offset, mask=mask, other=0).to(work), tl.full((), neutral, work))
        if given is None:
            index = tl.broadcast_to(column.to(tl.int64)[None, :], (M, N))
        else:
            index = tl.load(given + offset, mask=mask, other=0)
        beats = (value < best) if LEAST else (value > best)
        better = mask & (beats | ((value != value) & (best == best)) | (place == far))
        best = tl.where(better, value, best)
        place = tl.where(better, index, place)
    blank = best != best
    some_blank = tl.max(blank.to(tl.int32), 1) > 0
    clean = tl.where(blank, tl.full((), neutral, work), best)
    extreme = tl.min(clean, 1) if LEAST else tl.max(clean, 1)
    wins = tl.where(some_blank[:, None], blank, best == extreme[:, None])
    first = tl.min(tl.where(wins, place, far), 1)
    extreme = tl.where(some_blank, float("nan"), extreme) if work.is_floating() else extreme
    where = split.to(tl.int64) * rows + row
    tl.store(indices + where, first, mask=row < rows)
    if values is not None:
        tl.store(values + where, extreme.to(values.dtype.element_ty), mask=row < rows)


@kernel
def _moments(
    x, count_out, mean_out, square_out, rows, inner, length, split_length, x_outer, x_inner, x_step, correction,
    DOUBLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """count, mean and Σ(x − mean)² of each split, each lane by Welford's update, lanes joined by Chan's;
    without a place for counts there is one split, and Σ(x − mean)² / (n − correction) is stored at once"""
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
        delta = value - mean
        mean = tl.where(mask, mean + delta / tl.maximum(count, 1.0), mean)
        square = tl.where(mask, square + delta * (value - mean), square)
    total = tl.sum(count, 1)
    centre = tl.sum(tl.where(count > 0, mean * count, 0.0), 1) / tl.maximum(total, 1.0)
    off = tl.where(count > 0, mean - centre[:, None], 0.0)
    spread = tl.sum(square + count * off * off, 1)
    where = split.to(tl.int64) * rows + row
    if count_out is None:
        spread = spread / tl.maximum(total - correction, 0.0)
    else:
        tl.store(count_out + where, total, mask=row < rows)
    tl.store(mean_out + where, centre.to(mean_out.dtype.element_ty), mask=row < rows)
    tl.store(square_out + where, spread.to(square_out.dtype.element_ty), mask=row < rows)


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


@dataclass(frozen=True)
class Fold:
    """A tensor seen as rows × length: row r starts at (r // inner) · outer_stride + (r % inner) · inner_stride."""

    x: torch.Tensor
    rows: int
    inner: int
    length: int
    outer_stride: int
    inner_stride: int
    step: int
    shape: tuple[int, ...]  # of the result

    @property
    def walk(self) -> tuple[int, int, int]:
        return self.outer_stride, self.inner_stride, self.step

    def tile(self) -> tuple[int, int]:
        """Rows and columns of one tile: long along whichever is contiguous."""
        size = _TILE if not chips.current().interpreted else 1 << 16
        if self.step == 1 or self.inner == 1:
            n = min(next_power(self.length), size)
            return max(1, min(size // n, next_power(self.rows), 64)), n
        m = min(next_power(self.inner), 128)
        return m, max(1, min(next_power(self.length), size // m))

    def splits(self, m: int, n: int) -> int:
        """How many programs share a row, so that the whole chip works on a few long ones."""
        chip = chips.current()
        programs = blocks(self.rows, m)
        wanted = 4 * chip.multiprocessors // programs
        if wanted < 2 or chip.interpreted:
            return 1
        return max(1, min(wanted, blocks(self.length, 4 * n), 1024))


_folds: dict[Any, Fold] = {}
_MOST_FOLDS = 4096
_NOTHING = torch.empty(0)


def fold(x: torch.Tensor, dims: Sequence[int] | int | None, keepdim: bool) -> Fold:
    """Folds `dims` of `x` (all if None or empty), copying only where kept and reduced dimensions interleave too much."""
    key = (x.shape, x.stride(), dims if dims is None or isinstance(dims, int) else tuple(dims), keepdim)
    known = _folds.get(key)
    if known is not None:
        return replace(known, x=x)
    made = _fold_anew(x, dims, keepdim)
    if made.x is x:
        if len(_folds) >= _MOST_FOLDS:
            _folds.clear()
        # Only the numbers are remembered: the tensor must not outlive its call.
        _folds[key] = replace(made, x=_NOTHING)
    return made


def _fold_anew(x: torch.Tensor, dims: Sequence[int] | int | None, keepdim: bool) -> Fold:
    rank = x.dim()
    chosen = normalise(dims, rank)
    kept = [d for d in range(rank) if d not in chosen]
    shape = tuple((1 if d in chosen else x.shape[d]) for d in range(rank) if keepdim or d not in chosen)
    if x.numel() == 0:
        rows, length = (_product([x.shape[d] for d in dims]) for dims in (kept, chosen))
        return Fold(x, rows, 1, length, length, 0, 1, shape)
    reduced = _merge(x, chosen)
    outer = _merge(x, [d for d in kept if not chosen or d < min(chosen)])
    inner = _merge(x, [d for d in kept if chosen and d > min(chosen)])
    if (reduced is None or outer is None or inner is None) and len(chosen) == 1:
        return fold(x.contiguous(), dims, keepdim)
    if reduced is None or outer is None or inner is None:
        x = x.permute([*kept, *chosen]).contiguous()
        length = _product(x.shape[len(kept) :])
        return Fold(x, _product(x.shape[: len(kept)]), 1, length, length, 0, 1, shape)
    if inner[0] == 1:
        return Fold(x, outer[0], 1, reduced[0], outer[1], 0, reduced[1], shape)
    return Fold(x, outer[0] * inner[0], inner[0], reduced[0], outer[1], inner[1], reduced[1], shape)


def normalise(dims: Sequence[int] | int | None, rank: int) -> list[int]:
    """Sorted non-negative dimensions; None and the empty list mean all."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return list(range(rank))
    result = []
    for dim in dims:
        if not -max(rank, 1) <= dim < max(rank, 1):
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-max(rank, 1)}, {max(rank, 1) - 1}], but got {dim})"
            )
        result.append(dim % max(rank, 1))
    if len(set(result)) != len(result):
        raise RuntimeError(f"dim {result} appears multiple times in the list of dims")
    return sorted(d for d in result if d < rank)


def _merge(x: torch.Tensor, dims: Sequence[int]) -> tuple[int, int] | None:
    """Size and stride of these dimensions as one, or None if no single stride walks them."""
    # Stride 0 for nothing: a stride of 1 would hide from the compiler that rows begin aligned.
    size, stride = 1, 0
    for d in reversed(dims):
        if x.shape[d] == 1:
            continue
        if size == 1:
            size, stride = x.shape[d], x.stride(d)
        elif x.stride(d) == size * stride:
            size *= x.shape[d]
        else:
            return None
    return size, stride


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _work(dtype: torch.dtype) -> int:
    """Which accumulator a type takes: 0 float32, 1 float64, 2 int64, 3 int32."""
    if dtype.is_floating_point:
        return 1 if dtype is torch.float64 else 0
    return 2 if dtype is torch.int64 else 3


_WORK_TYPE = [torch.float32, torch.float64, torch.int64, torch.int32]


def _run(
    kind: int, x: torch.Tensor, dims: Any, keepdim: bool, dtype: torch.dtype, factor: float = 1.0, order: float = 1.0
) -> torch.Tensor:
    """One reduction of a supported type into a new tensor of type `dtype`."""
    if x.dtype not in _SUPPORTED or dtype not in _SUPPORTED:
        raise Unsupported(f"no reduction of {x.dtype} to {dtype}")
    f = fold(x, dims, keepdim)
    out = torch.empty(f.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    work = _work(dtype if kind in (SUM, PROD) or kind >= NORM0 else x.dtype)
    if kind in (ANY, ALL):
        work = 3
    m, n = f.tile()
    splits = f.splits(m, n)
    warps = 8 if m * n >= 4096 else 4
    if f.length == 0:
        return out.fill_(1 if kind in (PROD, ALL) else float("nan") if factor != factor else 0)
    if splits == 1:
        _fold((blocks(f.rows, m), 1), f.x, out, f.rows, f.inner, f.length, f.length, *f.walk, factor, order,
              KIND=kind, FIRST=True, LAST=True, WORK=work, M=m, N=n, warps=warps)  # fmt: skip
        return out
    part = blocks(blocks(f.length, splits), n) * n
    splits = blocks(f.length, part)
    partial = torch.empty((splits, f.rows), dtype=_WORK_TYPE[work], device=x.device)
    _fold((blocks(f.rows, m), splits), f.x, partial, f.rows, f.inner, f.length, part, *f.walk, factor, order,
          KIND=kind, FIRST=True, LAST=False, WORK=work, M=m, N=n, warps=warps)  # fmt: skip
    columns = min(next_power(splits), 1024)
    height = max(1, min(2048 // columns, next_power(f.rows)))
    _fold((blocks(f.rows, height), 1), partial, out, f.rows, f.rows, splits, splits, 0, 1, f.rows, factor, order,
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
    count = _product([self.shape[d] for d in normalise(dim, self.dim())])
    return _run(SUM, self, dim, keepdim, result, factor=1.0 / count if count else float("nan"))


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
    _require_elements(self, normalise(dim, self.dim()), "amax")
    return _run(MAX, self, dim, keepdim, self.dtype)


def max_all(self: torch.Tensor) -> torch.Tensor:
    """max x"""
    return amax(self)


def min_all(self: torch.Tensor) -> torch.Tensor:
    """min x"""
    _require_elements(self, normalise(None, self.dim()), "min")
    return _run(MIN, self, None, False, self.dtype)


def _require_elements(x: torch.Tensor, dims: Sequence[int], name: str) -> None:
    if any(x.shape[d] == 0 for d in dims):
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
    dims = normalise(dim, self.dim())
    empty = _product([self.shape[d] for d in dims]) == 0
    if empty and (ord < 0 or ord == float("inf")):
        raise Unsupported("the norm of an empty vector")
    if ord in (float("inf"), float("-inf")):
        # factor 0 asks the fold for magnitudes
        wide = _run(MAX if ord > 0 else MIN, self, dim, keepdim, self.dtype, factor=0.0)
        return wide.to(result)
    kind = {0.0: NORM0, 1.0: NORM1, 2.0: NORM2}.get(float(ord), NORM_P)
    return _run(kind, self, dim, keepdim, result, order=float(ord))


def _arg(
    x: torch.Tensor, dim: int | None, keepdim: bool, least: bool, want_values: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    if x.dtype not in _SUPPORTED:
        raise Unsupported(f"no extreme of {x.dtype}")
    dims = normalise(dim if dim is None else [dim], x.dim())
    _require_elements(x, dims, "min" if least else "max")
    f = fold(x, dims, keepdim) if x.dim() else fold(x.reshape(1), None, False)
    indices = torch.empty(f.shape, dtype=torch.int64, device=x.device)
    values = torch.empty(f.shape, dtype=x.dtype, device=x.device) if want_values else None
    if indices.numel() == 0:
        return values, indices
    m, n = f.tile()
    splits, work = f.splits(m, n), _work(x.dtype)
    constants: dict[str, Any] = {"LEAST": least, "WORK": work, "M": m, "N": n}
    if splits == 1:
        _arg_fold(
            (blocks(f.rows, m), 1), f.x, None, values, indices, f.rows, f.inner, f.length, f.length, *f.walk, warps=8, **constants
        )
        return values, indices
    part = blocks(blocks(f.length, splits), n) * n
    splits = blocks(f.length, part)
    some = torch.empty((splits, f.rows), dtype=_WORK_TYPE[work], device=x.device)
    places = torch.empty((splits, f.rows), dtype=torch.int64, device=x.device)
    _arg_fold((blocks(f.rows, m), splits), f.x, None, some, places, f.rows, f.inner, f.length, part, *f.walk, warps=8, **constants)
    columns = next_power(splits)
    height = max_tile(64, columns)
    _arg_fold((blocks(f.rows, height), 1), some, places, values, indices, f.rows, f.rows, splits, splits, 0, 1, f.rows,
              LEAST=least, WORK=work, M=height, N=columns)  # fmt: skip
    return values, indices


def argmax(self: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """the place of the first maximum"""
    _, indices = _arg(self, dim, keepdim, False, False)
    return indices if dim is not None or not keepdim else indices.reshape([1] * self.dim())


def max_dim(self: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor | None, torch.Tensor]:
    """max x and its place"""
    return _arg(self, dim, keepdim, False, True)


def min_dim(self: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor | None, torch.Tensor]:
    """min x and its place"""
    return _arg(self, dim, keepdim, True, True)


def var_mean(
    self: torch.Tensor, dim: Sequence[int] | None = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ (x − mean)² / (n − correction), and the mean"""
    if not self.is_floating_point():
        raise Unsupported("var_mean of floats only")
    f = fold(self, dim, keepdim)
    var, mean_ = (torch.empty(f.shape, dtype=self.dtype, device=self.device) for _ in range(2))
    if var.numel() == 0 or f.length == 0:
        return var.fill_(float("nan")), mean_.fill_(float("nan"))
    m, n = f.tile()
    n = max_tile(n, m)
    splits = f.splits(m, n)
    part = blocks(blocks(f.length, splits), n) * n
    splits = blocks(f.length, part)
    double = self.dtype is torch.float64
    work = torch.float64 if double else torch.float32
    correction = float(1 if correction is None else correction)
    grid, sizes = (blocks(f.rows, m), splits), (f.rows, f.inner, f.length, part, *f.walk, correction)
    if splits == 1:
        _moments(grid, f.x, None, mean_, var, *sizes, DOUBLE=double, M=m, N=n, warps=8)
        return var, mean_
    counts, means, squares = torch.empty((3, splits, f.rows), dtype=work, device=self.device)
    _moments(grid, f.x, counts, means, squares, *sizes, DOUBLE=double, M=m, N=n, warps=8)
    height = max_tile(64, next_power(splits))
    _finish_moments((blocks(f.rows, height),), counts, means, squares, var, mean_, f.rows, splits, correction,
                    M=height, S=next_power(splits))  # fmt: skip
    return var, mean_


def max_tile(size: int, other: int) -> int:
    """`size` lowered until size · other fits the three accumulators of a moments tile."""
    limit = 2048 if not chips.current().interpreted else 1 << 16
    while size > 1 and size * other > limit:
        size //= 2
    return size
