"""Reductions to a value: sum, mean, prod, max, min, amax, any, all, vector norms, var_mean.
Knows rows; a few long ones are split over programs, of which the last to arrive joins the parts, in a fixed order."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten import relay
from trireme.kernels.aten.calls import tune
from trireme.kernels.aten.counters import meeting
from trireme.kernels.aten.elementwise.layout import normalise
from trireme.kernels.aten.elementwise.pointwise import Number
from trireme.kernels.aten.elementwise.unary import same
from trireme.kernels.aten.folds.cut import Cut
from trireme.kernels.aten.folds.fold import Fold, aligned, begins, ends, fold, line_width, lined_up, meeting_lanes, placed
from trireme.kernels.aten.scalar import highest, larger, lowest, smaller
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power

SUM, PROD, MAX, MIN, ANY, ALL, NORM0, NORM1, NORM2, NORM_P, LARGEST, SMALLEST, ALL_BYTES = range(13)
_SUPPORTED = {torch.float32, torch.float16, torch.bfloat16, torch.float64} | {
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
}
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
    if KIND == 1:
        result = a * b
    elif KIND == 2 or KIND == 10:
        result = larger(a, b)
    elif KIND == 3 or KIND == 11:
        result = smaller(a, b)
    elif KIND == 4:
        result = a | b
    elif KIND == 5:
        result = a & b
    elif KIND == 12:
        result = tl.minimum(a, b)
    else:
        result = a + b
    return result


@triton.jit
def _across(columns, KIND: tl.constexpr):
    """The fold of each row of a tile"""
    if KIND == 1:
        result = tl.reduce(columns, 1, _multiply)
    elif KIND == 2 or KIND == 10:
        result = tl.reduce(columns, 1, larger)
    elif KIND == 3 or KIND == 11:
        result = tl.reduce(columns, 1, smaller)
    elif KIND == 4:
        result = tl.reduce(columns, 1, _either)
    elif KIND == 5 or KIND == 12:
        result = tl.min(columns, 1)
    else:
        result = tl.sum(columns, 1)
    return result


@triton.jit
def _blank(x, KIND: tl.constexpr):
    """What to read where there is nothing, so that it folds without a mask"""
    if KIND == 2:
        blank = lowest(x.dtype.element_ty)
    elif KIND == 3 or KIND == 11:
        blank = highest(x.dtype.element_ty)
    elif KIND == 1 or KIND == 5 or KIND == 12:
        blank = 1
    else:
        blank = 0
    return blank


@triton.jit
def _whole_bytes(x, KIND: tl.constexpr):
    """Truths that are asked about are bytes, which the compiler need not compare with 0 one by one"""
    if (KIND == 4 or KIND == 12) and x.dtype.element_ty == tl.int1:
        x = x.to(tl.pointer_type(tl.uint8), bitcast=True)
    return x


@triton.jit
def _mapped(raw, mask, neutral, order, KIND: tl.constexpr):
    """What is folded: the elements themselves, their magnitudes or powers of these, or whether they are not 0"""
    return tl.where(mask, _bare(raw, neutral, order, KIND), neutral)


@triton.jit
def _bare(raw, neutral, order, KIND: tl.constexpr):
    """The same where there is an element"""
    # Bytes tell whether any is not 0 by all their bits, and whether all are by the least of them: none is compared with 0.
    if KIND == 12 or (KIND == 4 and raw.dtype.is_int() and raw.dtype.primitive_bitwidth == 8):
        value = raw.to(tl.uint8, bitcast=True).to(neutral.dtype)
    elif KIND < 4 or KIND > 6:
        value = raw.to(neutral.dtype)
    else:
        value = (raw != 0).to(neutral.dtype)
    if KIND == 7 or KIND == 10 or KIND == 11:
        value = tl.abs(value)
    elif KIND == 8:
        value = value * value
    elif KIND == 9:
        value = tl.where(value == 0, tl.where(order == 0, 1.0, 0.0), tl.exp2(order * tl.log2(tl.abs(value))))
    return value


@triton.jit
def _neutral(KIND: tl.constexpr, WORK: tl.constexpr):
    """A number that changes no fold, of the type to fold in"""
    if KIND == 2 or KIND == 10:
        neutral = float("-inf") if WORK < 2 else -(2**31) if WORK == 3 else -(2**63)
    elif KIND == 3 or KIND == 11:
        neutral = float("inf") if WORK < 2 else 2**31 - 1 if WORK == 3 else 2**63 - 1
    elif KIND == 1 or KIND == 5 or KIND == 12:
        neutral = 1
    else:
        neutral = 0
    if WORK == 1:
        work = tl.float64
    elif WORK == 2:
        work = tl.int64
    elif WORK == 3:
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
    if KIND == 0 and WORK < 2:
        result = result / divisor
    elif KIND == 4 or KIND == 12:
        result = (result != 0).to(result.dtype)
    elif KIND == 8:
        result = tl.sqrt(result)
    elif KIND == 9:
        result = tl.where(result == 0, 0.0, tl.exp2(tl.log2(result) / order))
    return result


@kernel
def _fold(
    x, parts, counters, out, rows, inner, length, even, split_length, x_outer, x_inner, x_step, out_outer, out_inner, divisor,
    order, KIND: tl.constexpr, WORK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SHORT: tl.constexpr,
    TAIL: tl.constexpr, SHIFTED: tl.constexpr, BARE: tl.constexpr, FLAT: tl.constexpr, TURNED: tl.constexpr,
    STAGES: tl.constexpr, UNROLL: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[row] = fold of x[row], SHORT if that fits a tile; of programs that share a row the last joins all parts[split, row], S at
    once. TAIL: beyond `even` elements there are a few, which would turn every access into single elements; SHIFTED: before, too;
    BARE: elements are found and folded in as few instructions as possible"""
    chips.begin(EARLY, OPEN=False)
    x = _whole_bytes(x, KIND)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    base = begins(row, inner, x_outer, x_inner, FLAT)
    start = split * split_length
    if BARE:  # of which the compiler is not always to know that it is a multiple of 16
        even = tl.minimum(even, length)
    stop = tl.minimum(start + split_length, length if SHIFTED else even)
    if SHIFTED:
        base, head, even = aligned(base, length)
        head, even = head[:, None], even[:, None]
    base = (x + base)[:, None]
    neutral = _neutral(KIND, WORK)
    if SHORT:
        column = tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        raw = tl.load(base + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=_blank(x, KIND))
        total = _bare(raw, neutral, order, KIND)
    else:
        total = tl.broadcast_to(neutral, (M, N))
        if N == 1:  # what is left over by unrolling would come one by one
            stop = tl.cdiv(stop, UNROLL) * UNROLL
        # Tiles come through shared memory, two ahead: 18.7 against 22.8 µs for the sum of 64 MiB on an H200.
        ahead = (tl.arange(0, N).to(tl.int64) * x_step)[None, :]
        for at in tl.range(start, stop, N, num_stages=STAGES, loop_unroll_factor=UNROLL):
            column = at + tl.arange(0, N)
            # Splits are whole tiles, so the row's own end is the only ragged one, and its divisibility is known.
            mask = (row < rows)[:, None] & (column[None, :] < even)
            if BARE:
                raw = tl.load(base + tl.cast(at, tl.int64) * x_step + ahead, mask=mask, other=_blank(x, KIND))
                value = _bare(raw, neutral, order, KIND)
            else:
                raw = tl.load(base + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=0)
                value = _mapped(raw, mask, neutral, order, KIND)
            total = _both(total, value, KIND)
    result = _across(total, KIND)
    if TAIL and split == tl.num_programs(1) - 1:
        if SHIFTED:
            column, mask = ends(head, even, length)
            mask = mask & (row < rows)[:, None]
            raw = tl.load(base + column, mask=mask, other=0)
        else:
            column = even + tl.arange(0, 16)
            mask = (row < rows)[:, None] & (column < length)[None, :]
            raw = tl.load(base + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=0)
        result = _both(result, _across(_mapped(raw, mask, neutral, order, KIND), KIND), KIND)
    last = True
    if counters is not None:
        tl.store(parts + split.to(tl.int64) * rows + row, result, mask=row < rows)
        last = relay.arrive(counters + tl.program_id(0)) == tl.num_programs(1) - 1
    if last:
        if counters is not None:
            result = _join(parts, rows, row, tl.num_programs(1), KIND, WORK, M, S)
            tl.store(counters + tl.program_id(0), 0)
        result = _finish(result, divisor, order, KIND, WORK)
        place = placed(row, inner, out_outer, out_inner, TURNED)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=row < rows)


@kernel
def _fold_narrow(
    x, parts, counters, out, rows, columns, count, share, width, stride, out_outer, out_inner, divisor, order,
    KIND: tl.constexpr, WORK: tl.constexpr, P: tl.constexpr, K: tl.constexpr, M: tl.constexpr, S: tl.constexpr,
    TURNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[matrix, column] = fold of x[matrix, :, column], where a matrix has few columns: its `count` elements are read in lines of
    `width`, whole rows of the matrix and a multiple of 16, so that a thread takes 16 bytes at once and meets one column in all"""
    chips.begin(EARLY, OPEN=False)
    x = _whole_bytes(x, KIND)
    matrix, split = tl.program_id(0), tl.program_id(1)
    begin = matrix.to(tl.int64) * stride
    base = x + begin // 16 * 16
    shift = (begin % 16).to(tl.int32)  # elements of its first line that lie before the matrix
    stop = shift + count
    lines = tl.cdiv(stop, width)
    neutral = _neutral(KIND, WORK)
    lane = tl.arange(0, M)
    total = tl.broadcast_to(neutral, (M,))
    start = 1 + split * share
    for line in tl.range(start, tl.minimum(start + share, lines - 1), loop_unroll_factor=4):
        raw = tl.load(base + tl.cast(line, tl.int64) * width + lane, mask=lane < width, other=0)
        total = _both(total, _mapped(raw, lane < width, neutral, order, KIND), KIND)
    if split == 0:  # the first line and the last have ends, for which each element would ask
        mask = (lane < width) & (lane >= shift) & (lane < stop)
        total = _both(total, _mapped(tl.load(base + lane, mask=mask, other=0), mask, neutral, order, KIND), KIND)
        at = tl.cast(lines - 1, tl.int64) * width + lane
        mask = (lane < width) & (at < stop) & (lines > 1)
        total = _both(total, _mapped(tl.load(base + at, mask=mask, other=0), mask, neutral, order, KIND), KIND)
    # Lanes that met the same column come together.
    place, there = meeting_lanes(columns, width, shift, P, K)
    met = tl.where(there, tl.gather(total, place, 0), neutral)
    result = _across(tl.reshape(met, (P, K)), KIND)
    row = matrix * columns + tl.arange(0, P)
    inside = tl.arange(0, P) < columns
    last = True
    if counters is not None:
        tl.store(parts + split.to(tl.int64) * rows + row, result, mask=inside)
        last = relay.arrive(counters + matrix) == tl.num_programs(1) - 1
    if last:
        if counters is not None:
            result = _join(parts, rows, row, tl.num_programs(1), KIND, WORK, P, S)
            tl.store(counters + matrix, 0)
        result = _finish(result, divisor, order, KIND, WORK)
        to = placed(row, columns, out_outer, out_inner, TURNED)
        tl.store(out + to, result.to(out.dtype.element_ty), mask=inside)


@kernel
def _row_moments(
    x, var_out, mean_out, rows, inner, length, x_outer, x_inner, x_step, out_outer, out_inner, correction,
    DOUBLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, FLAT: tl.constexpr, TURNED: tl.constexpr, OF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """mean = Σ x / n and var = Σ (x − mean)² / max(n − correction, 0) of rows that fit one tile"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    work = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.arange(0, N)
    mask = (row < rows)[:, None] & (column < length)[None, :]
    at = begins(row, inner, x_outer, x_inner, FLAT)[:, None] + (column.to(tl.int64) * x_step)[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(work)
    mean = tl.sum(value, 1) / length
    off = tl.where(mask, value - mean[:, None], 0.0)
    var = tl.sum(off * off, 1) / tl.maximum(length - correction, 0.0).to(work)
    place = placed(row, inner, out_outer, out_inner, TURNED)
    tl.store(var_out + place, var.to(var_out.dtype.element_ty), mask=row < rows)
    tl.store(mean_out + place, mean.to(mean_out.dtype.element_ty), mask=row < rows)


@triton.jit
def _across_moments(count, mean, square, total):
    """mean and Σ (x − mean)² of each row of a tile whose columns stand for so many of its `total` elements, by Chan's rule"""
    centre = tl.sum(count * mean, 1) / total
    off = tl.where(count > 0, mean - centre[:, None], 0.0)
    return centre, tl.sum(square + count * off * off, 1)


@kernel
def _moments(
    x, parts, counters, var_out, mean_out, rows, inner, length, split_length, x_outer, x_inner, x_step, out_outer, out_inner,
    correction, DOUBLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, BARE: tl.constexpr, FLAT: tl.constexpr,
    TURNED: tl.constexpr, STAGES: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`_row_moments` of long rows, each lane by Welford's update; parts[split] has the rows' means, then their Σ (x − mean)²"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    base = x + begins(row, inner, x_outer, x_inner, FLAT)
    start = split * split_length
    stop = tl.minimum(start + split_length, length)
    work = tl.float64 if DOUBLE else tl.float32
    means = tl.zeros((M, N), work)
    squares = tl.zeros((M, N), work)
    ahead = (tl.arange(0, N).to(tl.int64) * x_step)[None, :]
    for at in tl.range(start, stop, N, num_stages=STAGES, loop_unroll_factor=4 if N == 1 else 1):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        offset = tl.cast(at, tl.int64) * x_step + ahead if BARE else (column.to(tl.int64) * x_step)[None, :]
        value = tl.load(base[:, None] + offset, mask=mask, other=0).to(work)
        # Every lane that counts has seen the same number of elements, so one division serves all.
        share = 1.0 / ((at - start) // N + 1).to(work)
        delta = tl.where(mask, value - means, 0.0)
        means += delta * share
        squares += tl.where(mask, delta * (value - means), 0.0)
    count = (stop - start + N - 1 - tl.arange(0, N)) // N
    mean, square = _across_moments(count.to(work)[None, :], means, squares, (stop - start).to(work))
    last = True
    if counters is not None:
        own = parts + split.to(tl.int64) * 2 * rows + row
        tl.store(own, mean, mask=row < rows)
        tl.store(own + rows, square, mask=row < rows)
        last = relay.arrive(counters + tl.program_id(0)) == tl.num_programs(1) - 1
    if last:
        if counters is not None:
            seen = tl.zeros((1, S), work)
            centres = tl.zeros((M, S), work)
            spreads = tl.zeros((M, S), work)
            for first in range(0, tl.num_programs(1), S):
                part = (first + tl.arange(0, S))[None, :]
                inside = part < tl.num_programs(1)
                mask = (row < rows)[:, None] & inside
                place = parts + part.to(tl.int64) * 2 * rows + row[:, None]
                size = tl.where(inside, tl.minimum(length - part * split_length, split_length), 0).to(work)
                delta = tl.where(inside, tl.load(place, mask=mask, other=0.0, cache_modifier=".cg") - centres, 0.0)
                spreads += tl.load(place + rows, mask=mask, other=0.0, cache_modifier=".cg")
                share = size / tl.maximum(seen + size, 1.0)
                spreads += tl.where(seen > 0, delta * delta * seen * share, 0.0)  # else the square of a large mean may be infinite
                centres += delta * share
                seen += size
            mean, square = _across_moments(seen, centres, spreads, length.to(work))
            tl.store(counters + tl.program_id(0), 0)
        var = square / tl.maximum(length.to(work) - correction, 0.0)
        place = placed(row, inner, out_outer, out_inner, TURNED)
        tl.store(var_out + place, var.to(var_out.dtype.element_ty), mask=row < rows)
        tl.store(mean_out + place, mean.to(mean_out.dtype.element_ty), mask=row < rows)


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
    if dtype is torch.bool and kind in (SUM, PROD):  # of truths
        kind = ANY if kind == SUM else ALL
    x, f = fold(x, dims, keepdim, turn=True)
    if _is_torchs(kind, f):
        raise Unsupported("extremes that torch finds faster")
    out = empty(f.shape, dtype, x.device)
    if f.scattered:
        same(_run(kind, f.lying(x), [1], False, dtype, divisor, order), out=f.places(out))
        return out
    if f.rows == 0:
        return out
    if f.length == 0:
        return out.fill_(1 if kind in (PROD, ALL) else float("nan") if divisor == 0 else 0)
    if kind in (ANY, ALL):
        work = 3
        kind = ALL_BYTES if kind == ALL and x.element_size() == 1 else kind
    else:
        work = _work(dtype if kind in (SUM, PROD) or NORM0 <= kind <= NORM_P else x.dtype)
    if f.in_lines:
        _run_narrow(kind, work, x, f, f.in_lines, out, divisor, order)
        return out
    start = functools.partial(_start, kind, work, x, f, out, divisor, order)
    start(best_cut(f"fold{kind}", f, start, f.of_values))
    return out


def _is_torchs(kind: int, f: Fold) -> bool:
    """Whether torch's own kernel was faster than the best of 17 to 28 cuts: maxima of 315 rows of 20001 float64 took it 10.6 µs and
    so 12.2, down 38427 matrices of 40 x 7 floats, which a cache nearly holds, 10.0 and 12.1."""
    if kind not in (MAX, MIN) or f.even or not f.cut.large or chips.current().interpreted:
        return False
    if f.itemsize == 8:
        return f.anywhere and 1 << 14 < f.length < 1 << 15 and 192 <= f.rows <= 512
    short = f.across and f.columns <= 8 and 32 < f.length <= 48
    return short and f.itemsize == 4 and f.rows * f.length <= 11 << 20


def best_cut(name: str, f: Fold, start: Callable[[Cut], None], default: dict[str, int] | None = None) -> Cut:
    """How a fold is cut that `start` folds: as was measured for its class, if it was, or by `default`, or as the rules say."""
    lines = f"across{f.of}" if f.across else "anywhere" if f.anywhere else "along"
    kind, shape = f"{name}.{lines}.{int(f.even)}.{f.itemsize}", tune.shape_class(f.rows, f.length)
    return f.cut.by(tune.choose(kind, shape, default or {}, f.cut.choices(), lambda choice: start(f.cut.by(choice))))


def _tells_one_more(cut: Cut) -> bool:
    """Whether the compiler is not to know a multiple of 16, with which it has fewer elements on their way: norms down 1588 x 256 x
    18 floats took 9.0 µs, so 5.7; sums down 1248 x 480 x 35 31.1 and 25.7; 4 x 896 x 9977 bfloat16 came at 2 TB/s, 60 x 424 x 1213
    at 3. But of bytes 1210 x 160 x 130 9.2 and 9.9, of eight bytes 40 x 512 x 301 9.1 and 10.2."""
    m, n = cut.tile
    return cut.bare and n > 1 and (cut.itemsize in (2, 4) or (cut.itemsize == 1 and m == 64))


def _start(kind: int, work: int, x: torch.Tensor, f: Fold, out: torch.Tensor, divisor: int, order: float, cut: Cut) -> None:
    m, n = cut.tile
    programs, splits = blocks(f.rows, m), blocks(f.length, cut.part)
    kept = _WORK_TYPE[work]
    parts, counters = meeting(x.device, programs, splits, f.rows, kept)
    inner, *walk = f.numbered
    short = f.length <= n
    shifted = cut.shifted and not short  # a measured cut may hold whole what the rules would not
    tail = f.length % 16 if not short and f.step == 1 and f.walk[0] % 16 == 0 else 0
    even = f.length - tail + _tells_one_more(cut)
    _fold((programs, splits), x, parts, counters, out, f.rows, inner, f.length, even, cut.part, *walk, *f.apart, divisor, order,
          KIND=kind, WORK=work, M=m, N=n, S=max(1, min(next_power(splits), _JOINED // (m * kept.itemsize))), SHORT=short,
          TAIL=tail > 0 or shifted, SHIFTED=shifted, BARE=cut.bare, FLAT=inner == 1, TURNED=f.turned is not None,
          STAGES=cut.stages, UNROLL=cut.unroll, OF=f.of_value,
          warps=8 if m * n >= 4096 and kept.itemsize == 8 else cut.warps)  # fmt: skip


def _run_narrow(
    kind: int, work: int, x: torch.Tensor, f: Fold, line: tuple[int, int], out: torch.Tensor, divisor: int, order: float
) -> None:
    """Matrices of a few columns, folded down in lines of so many elements, by so many warps."""
    columns, count = f.columns, f.columns * f.length
    tile, warps = line
    width = line_width(tile, columns)
    matrices, lines = f.rows // columns, max(1, blocks(count + 15, width) - 2)
    # What is soon read is not shared: sums of 90 x 400 x 9 floats took 4.0 µs by two, so 2.2. Of many matrices more programs than
    # of few, so that none comes late: maxima of 175 x 6000 x 6 int64 took 23.9 µs by 175, so 12.2.
    processors = chips.current().multiprocessors
    most = 2 * processors // matrices if matrices <= 32 else round(4 * processors / matrices)
    shares = min(blocks(lines, 4), most) if lines > 16 else 1
    share = blocks(lines, max(1, shares))
    splits = blocks(lines, share)
    parts, counters = meeting(x.device, matrices, splits, f.rows, _WORK_TYPE[work])
    p = next_power(columns)
    _fold_narrow((matrices, splits), x, parts, counters, out, f.rows, columns, count, share, width, f.walk[0], *f.apart, divisor,
                 order, KIND=kind, WORK=work, P=p, K=next_power(width // columns), M=tile, S=min(next_power(splits), 1024 // p),
                 TURNED=f.turned is not None, warps=warps)  # fmt: skip


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


def var_mean(
    self: torch.Tensor, dim: Sequence[int] | None = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ (x − mean)² / (n − correction), and the mean"""
    if not self.is_floating_point():
        raise Unsupported("var_mean of floats only")
    x, f = fold(self, dim, keepdim, turn=True)
    var, mean = (empty(f.shape, x.dtype, x.device) for _ in range(2))
    if f.rows == 0 or f.length == 0:
        return var.fill_(float("nan")), mean.fill_(float("nan"))
    if f.scattered:
        for found, out in zip(var_mean(f.lying(x), [1], correction=correction), (var, mean), strict=True):
            same(found, out=f.places(out))
        return var, mean
    double = x.dtype is torch.float64
    correction = float(1 if correction is None else correction)
    m, n, warps, splits = _moments_cut(f)
    if f.length <= n and splits == 1:
        inner, *walk = f.numbered
        _row_moments((blocks(f.rows, m),), x, var, mean, f.rows, inner, f.length, *walk, *f.apart, correction, DOUBLE=double,
                     M=m, N=n, FLAT=inner == 1, TURNED=f.turned is not None, OF=f.of, warps=warps)  # fmt: skip
    else:
        _split_moments(x, f, var, mean, correction, m, n, warps, splits)
    return var, mean


def _moments_cut(f: Fold) -> tuple[int, int, int, int]:
    """Rows, columns and warps of a tile, and how many programs share a row."""
    if f.anywhere and f.length > 1 << 14:
        # Single elements, of which more must be on their way: 22 x 864455 floats took 37.4 µs in fewer parts, so 23.9.
        return 1, 1024, 8, max(1, 6 * chips.current().multiprocessors // f.rows)
    if f.cut.wide and f.length > 2:
        # Rows whole, each warp its own: where a thread had its rows alone, 245161 x 23 x 2 floats took 27.7 µs, so 15.2; 20 x 30 x
        # 5000 of bfloat16 6.8 and 2.7; 335 x 28 x 550 of float64 13.3 and 8.9.
        n = next_power(f.length)
        meet = not f.even and n <= 32 and f.itemsize < 8  # single elements, two warps for as many: 1000 x 30 x 129 3.9 and 3.1
        return min(256, (1024 if f.itemsize == 8 else 2048) // n), n, 2 if meet else 1, 1
    m, n, warps = f.cut.whole if f.anywhere or f.cut.apiece else (*f.cut.tile, f.cut.warps)
    if n == 1 and f.rows < 1 << 19:
        m = min(m, 256)  # two numbers for each: 335 x 28 x 550 bfloat16 took 11.5 µs with four rows to a thread
    elif f.cut.strips and f.length > 128 and f.itemsize == 2:
        n = max(n, 16)  # 240 x 79760 bfloat16 took 13.6 µs in tiles of 8, so 11.8
    splits = f.cut.shares(m, n, each=4)  # which take longer to compute
    if f.length > n or splits > 1:
        n = max(1, min(n, 2048 // m))  # two accumulators
        warps = 8 if m * n >= 2048 else min(4, f.cut.warps)
        if f.anywhere and n == 2048:  # of which the compiler asks for one element at a time (2448 x 13876 floats at 1.6 TB/s)
            n = 1024
    return m, n, warps, splits


def _split_moments(
    x: torch.Tensor, f: Fold, var: torch.Tensor, mean: torch.Tensor, correction: float, m: int, n: int, warps: int, splits: int
) -> None:
    part = blocks(blocks(f.length, splits), n) * n
    programs, splits = blocks(f.rows, m), blocks(f.length, part)
    kept = torch.float64 if x.dtype is torch.float64 else torch.float32
    parts, counters = meeting(x.device, programs, splits, 2 * f.rows, kept)
    inner, *walk = f.numbered
    # In strips, too: what comes takes longer to compute (240 x 79760 floats 35.1 µs with one, so 20.4).
    stages = 1 if f.anywhere else 3 if f.cut.strips else f.cut.stages
    _moments((programs, splits), x, parts, counters, var, mean, f.rows, inner, f.length, part, *walk, *f.apart, correction,
             DOUBLE=kept is torch.float64, M=m, N=n, S=max(1, min(next_power(splits), _JOINED // (2 * m * kept.itemsize))),
             BARE=f.cut.bare, FLAT=inner == 1, TURNED=f.turned is not None, STAGES=stages, OF=f.of,
             warps=warps)  # fmt: skip
