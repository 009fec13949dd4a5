"""out[row] = finish(⊕ map(x[row, i])): sum, mean, prod, max, min, amax, any, all, vector norms; and var_mean by Chan's rule.
Knows rows; a few long ones are split over programs, of which the last to arrive joins the parts, in a fixed order."""

# ruff: noqa: SIM109 (in a kernel `in` is not part of the language)
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.calls import tune
from trireme.kernels.aten.counters import arrive, meeting
from trireme.kernels.aten.elementwise.layout import normalise
from trireme.kernels.aten.elementwise.pointwise import Number
from trireme.kernels.aten.folds.cut import Cut
from trireme.kernels.aten.folds.fold import Fold, aligned, begins, ends, fold, lined_up, placed
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power
from trireme.kernels.scalar import highest, larger, lowest, smaller

_KINDS = range(13)
SUM, PROD, MAX, MIN, ANY, ALL, NORM0, NORM1, NORM2, NORM_P, LARGEST, SMALLEST, ALL_BYTES = (tl.constexpr(kind) for kind in _KINDS)
# The types that folds add up in.
FLOAT32, FLOAT64, INT64, INT32 = (tl.constexpr(work) for work in range(4))
_WORK_TYPE = [torch.float32, torch.float64, torch.int64, torch.int32]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_SUPPORTED = {*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool}
_JOINED = 1 << 14  # bytes of parts that one program joins at once: with more, registers for it leave room for fewer programs


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _both(a, b, KIND: tl.constexpr):
    """The fold of two folds"""
    if KIND == PROD:
        result = a * b
    elif KIND == MAX or KIND == LARGEST:
        result = larger(a, b)
    elif KIND == MIN or KIND == SMALLEST:
        result = smaller(a, b)
    elif KIND == ANY:
        result = a | b
    elif KIND == ALL or KIND == ALL_BYTES:
        result = tl.minimum(a, b)
    else:
        result = a + b
    return result


@triton.jit
def _across(columns, KIND: tl.constexpr):
    """The fold of each row of a tile"""
    if KIND == PROD:
        result = tl.reduce(columns, 1, _multiply)
    elif KIND == MAX or KIND == LARGEST:
        result = tl.reduce(columns, 1, larger)
    elif KIND == MIN or KIND == SMALLEST:
        result = tl.reduce(columns, 1, smaller)
    elif KIND == ANY:
        result = tl.reduce(columns, 1, _either)
    elif KIND == ALL or KIND == ALL_BYTES:
        result = tl.min(columns, 1)
    else:
        result = tl.sum(columns, 1)
    return result


@triton.jit
def _blank(x, KIND: tl.constexpr):
    """What to read where there is nothing, so that it changes no fold"""
    if KIND == MAX:
        blank = lowest(x.dtype.element_ty)
    elif KIND == MIN or KIND == SMALLEST:
        blank = highest(x.dtype.element_ty)
    elif KIND == PROD or KIND == ALL or KIND == ALL_BYTES:
        blank = 1
    else:
        blank = 0
    return blank


@triton.jit
def _whole_bytes(x, KIND: tl.constexpr):
    """Truths that are asked about are bytes, which the compiler need not compare with 0 one by one"""
    if (KIND == ANY or KIND == ALL_BYTES) and x.dtype.element_ty == tl.int1:
        x = x.to(tl.pointer_type(tl.uint8), bitcast=True)
    return x


@triton.jit
def _mapped(raw, neutral, order, KIND: tl.constexpr):
    """What is folded: the elements themselves, their magnitudes or powers of these, or whether they are not 0"""
    # Bytes tell whether any is not 0 by all their bits, and whether all are by the least of them: none is compared with 0.
    if KIND == ALL_BYTES or (KIND == ANY and raw.dtype.is_int() and raw.dtype.primitive_bitwidth == 8):
        value = raw.to(tl.uint8, bitcast=True).to(neutral.dtype)
    elif KIND == ANY or KIND == ALL or KIND == NORM0:
        value = (raw != 0).to(neutral.dtype)
    else:
        value = raw.to(neutral.dtype)
    if KIND == NORM1 or KIND == LARGEST or KIND == SMALLEST:
        value = tl.abs(value)
    elif KIND == NORM2:
        value = value * value
    elif KIND == NORM_P:
        value = tl.where(value == 0, 0.0, tl.exp2(order * tl.log2(tl.abs(value))))
    return value


@triton.jit
def _neutral(KIND: tl.constexpr, WORK: tl.constexpr):
    """A number that changes no fold, of the type to fold in"""
    if KIND == MAX or KIND == LARGEST:
        neutral = float("-inf") if WORK == FLOAT32 or WORK == FLOAT64 else -(2**31) if WORK == INT32 else -(2**63)
    elif KIND == MIN or KIND == SMALLEST:
        neutral = float("inf") if WORK == FLOAT32 or WORK == FLOAT64 else 2**31 - 1 if WORK == INT32 else 2**63 - 1
    elif KIND == PROD or KIND == ALL or KIND == ALL_BYTES:
        neutral = 1
    else:
        neutral = 0
    if WORK == FLOAT64:
        work = tl.float64
    elif WORK == INT64:
        work = tl.int64
    elif WORK == INT32:
        work = tl.int32
    else:
        work = tl.float32
    return tl.full((), neutral, work)


@triton.jit
def _join(parts, rows, row, splits, KIND: tl.constexpr, WORK: tl.constexpr, M: tl.constexpr, S: tl.constexpr):
    """The fold of all parts[split, row], S at once"""
    neutral = _neutral(KIND, WORK)
    joined = tl.broadcast_to(neutral, (M, S))
    for first in range(0, splits, S):
        part = (first + tl.arange(0, S))[None, :]
        mask = (row < rows)[:, None] & (part < splits)
        place = parts + part.to(tl.int64) * rows + row[:, None]
        joined = _both(joined, tl.load(place, mask=mask, other=neutral, cache_modifier=".cg"), KIND)
    return _across(joined, KIND)


@triton.jit
def _finish(result, divisor, order, KIND: tl.constexpr, WORK: tl.constexpr):
    """What is asked for, of a row's fold"""
    if KIND == SUM and (WORK == FLOAT32 or WORK == FLOAT64):
        result = result / divisor
    elif KIND == ANY or KIND == ALL_BYTES:
        result = (result != 0).to(result.dtype)
    elif KIND == NORM2:
        result = tl.sqrt(result)
    elif KIND == NORM_P:
        result = tl.where(result == 0, 0.0, tl.exp2(tl.log2(result) / order))
    return result


@kernel
def _fold(
    x, parts, counters, out, rows, inner, length, even, split_length, x_outer, x_inner, x_step, out_outer, out_inner, divisor,
    order, KIND: tl.constexpr, WORK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SHORT: tl.constexpr,
    TAIL: tl.constexpr, SHIFTED: tl.constexpr, FLAT: tl.constexpr, TURNED: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[row] = fold of x[row], SHORT if that fits a tile; of programs that share a row the last joins all parts[split, row], S at
    once. TAIL: beyond `even` elements there are a few, which would turn every access into single elements; SHIFTED: before, too"""
    chips.begin(EARLY, OPEN=False)
    x = _whole_bytes(x, KIND)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    base = begins(row, inner, x_outer, x_inner, FLAT)
    start = split * split_length
    stop = tl.minimum(start + split_length, length if SHIFTED else even)
    if SHIFTED:
        base, head, even = aligned(base, length)
        head, even = head[:, None], even[:, None]
    base = (x + base)[:, None]
    neutral, blank = _neutral(KIND, WORK), _blank(x, KIND)
    ahead = (tl.arange(0, N).to(tl.int64) * x_step)[None, :]
    if SHORT:
        mask = (row < rows)[:, None] & (tl.arange(0, N) < length)[None, :]
        total = _mapped(tl.load(base + ahead, mask=mask, other=blank), neutral, order, KIND)
    else:
        total = tl.broadcast_to(neutral, (M, N))
        if N == 1:  # what is left over by unrolling would come one by one
            stop = tl.cdiv(stop, UNROLL) * UNROLL
        for at in tl.range(start, stop, N, num_stages=STAGES, loop_unroll_factor=UNROLL):
            # Splits are whole tiles, so the row's own end is the only ragged one, and its divisibility is known.
            mask = (row < rows)[:, None] & (at + tl.arange(0, N)[None, :] < even)
            raw = tl.load(base + tl.cast(at, tl.int64) * x_step + ahead, mask=mask, other=blank)
            total = _both(total, _mapped(raw, neutral, order, KIND), KIND)
    result = _across(total, KIND)
    if TAIL and split == tl.num_programs(1) - 1:
        if SHIFTED:
            column, mask = ends(head, even, length)
        else:
            column = (even + tl.arange(0, 16))[None, :]
            mask = column < length
        raw = tl.load(base + column, mask=mask & (row < rows)[:, None], other=blank)
        result = _both(result, _across(_mapped(raw, neutral, order, KIND), KIND), KIND)
    last = True
    if counters is not None:
        tl.store(parts + split.to(tl.int64) * rows + row, result, mask=row < rows)
        last = arrive(counters + tl.program_id(0)) == tl.num_programs(1) - 1
    if last:
        if counters is not None:
            result = _join(parts, rows, row, tl.num_programs(1), KIND, WORK, M, S)
            tl.store(counters + tl.program_id(0), 0)
        result = _finish(result, divisor, order, KIND, WORK)
        place = placed(row, inner, out_outer, out_inner, TURNED)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=row < rows)


def _work(dtype: torch.dtype) -> tl.constexpr:
    """The accumulator of a type."""
    if dtype.is_floating_point:
        return FLOAT64 if dtype is torch.float64 else FLOAT32
    return INT64 if dtype is torch.int64 else INT32


def _run(
    kind: tl.constexpr, x: torch.Tensor, dims: Any, keepdim: bool, dtype: torch.dtype, divisor: int = 1, order: float = 1.0
) -> torch.Tensor:
    """One reduction of a supported type into a new tensor of type `dtype`."""
    if x.dtype not in _SUPPORTED or dtype not in _SUPPORTED:
        raise Unsupported(f"no reduction of {x.dtype} to {dtype}")
    if dtype is torch.bool and kind in (SUM, PROD):  # of truths
        kind = ANY if kind == SUM else ALL
    x, f = fold(x, dims, keepdim, turn=True)
    out = empty(f.shape, dtype, x.device)
    if f.rows == 0:
        return out
    if f.length == 0:
        return out.fill_(1 if kind in (PROD, ALL) else float("nan") if divisor == 0 else 0)
    if kind in (ANY, ALL):
        work = INT32
        kind = ALL_BYTES if kind == ALL and x.element_size() == 1 else kind
    else:
        work = _work(dtype if kind in (SUM, PROD, NORM0, NORM1, NORM2, NORM_P) else x.dtype)
    start = functools.partial(_start, kind.value, work.value, x, f, out, divisor, order)
    start(best_cut(f"fold{kind.value}", f, start))
    return out


def best_cut(name: str, f: Fold, start: Callable[[Cut], None]) -> Cut:
    """How a fold is cut that `start` folds: as was measured for its class, or as the rule says."""
    lines = "across" if f.across else "along"
    kind, shape = f"{name}.{lines}.{f.vector}.{f.itemsize}", tune.shape_class(f.rows, f.length)
    rule = f.lines.cut()
    return rule.by(tune.choose(kind, shape, {}, f.lines.choices(), lambda choice: start(rule.by(choice))))


def _start(kind: int, work: int, x: torch.Tensor, f: Fold, out: torch.Tensor, divisor: int, order: float, cut: Cut) -> None:
    m, n = cut.M, cut.N
    part = blocks(blocks(f.length, cut.splits), n) * n
    programs, splits = blocks(f.rows, m), blocks(f.length, part)
    kept = _WORK_TYPE[work]
    parts, counters = meeting(x.device, programs, splits, f.rows, kept)
    inner, *walk = f.numbered
    short = f.length <= n
    shifted = f.shifted and not short
    tail = f.length % 16 if not short and f.step == 1 and f.walk[0] % 16 == 0 else 0
    _fold((programs, splits), x, parts, counters, out, f.rows, inner, f.length, f.length - tail, part, *walk, *f.apart, divisor,
          order, KIND=kind, WORK=work, M=m, N=n, S=max(1, min(next_power(splits), _JOINED // (m * kept.itemsize))), SHORT=short,
          TAIL=tail > 0 or shifted, SHIFTED=shifted, FLAT=inner == 1, TURNED=f.turned is not None, STAGES=cut.stages,
          UNROLL=cut.unroll, OF=f.of, warps=8 if m * n >= 4096 and kept.itemsize == 8 else cut.warps)  # fmt: skip


def _sum_type(x: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None:
        return dtype
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64


def sum_dim(
    self: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Σ x over `dim`; integers add up in int64"""
    return _run(SUM, self, dim, keepdim, _sum_type(self, dtype))


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


def prod_dim(
    self: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Π x over one dimension or all; integers multiply in int64"""
    return _run(PROD, self, dim, keepdim, _sum_type(self, dtype))


def amax(self: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    """max x over `dim`; NaN wins"""
    require_elements(self, dim, "amax")
    return _run(MAX, self, dim, keepdim, self.dtype)


def min_all(self: torch.Tensor) -> torch.Tensor:
    """min x"""
    require_elements(self, None, "min")
    return _run(MIN, self, None, False, self.dtype)


def require_elements(x: torch.Tensor, dims: Sequence[int] | int | None, name: str) -> None:
    """Leaves an extreme of nothing to torch."""
    if x.numel() == 0 and any(x.shape[d] == 0 for d in normalise(dims, x.dim())):
        raise Unsupported(f"{name}() of nothing, which torch refuses in its own words")


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


def vector_norm(
    self: torch.Tensor, ord: Number = 2, dim: Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """(Σ |x|^p)^(1/p); p = 0 counts, ±∞ take the extreme"""
    result = dtype or self.dtype
    if not self.is_floating_point() or not result.is_floating_point:
        raise Unsupported("vector norms of floats only")
    if torch.promote_types(self.dtype, result) is not result:
        raise Unsupported("a narrower type, which torch refuses in its own words")
    if (self.numel() == 0 and ord == float("inf")) or (ord < 0 and (self.numel() == 0 or ord != float("-inf"))):
        raise Unsupported("the norm of an empty vector, or of an order below 0")
    if ord != 0 and (self.dim() == 0 or math.prod(self.shape[d] for d in normalise(dim, self.dim())) == 1):
        ord = float("inf")  # of one number that is its size, where a power of it might be too large
    if ord in (float("inf"), float("-inf")):
        return _run(LARGEST if ord > 0 else SMALLEST, self, dim, keepdim, self.dtype).to(result)
    kind = {0.0: NORM0, 1.0: NORM1, 2.0: NORM2}.get(float(ord), NORM_P)
    if kind == NORM_P and result is torch.float64:
        raise Unsupported("a run-time order reaches the kernel as float32")
    return _run(kind, self, dim, keepdim, result, order=float(ord))
