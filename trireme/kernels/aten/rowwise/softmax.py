"""softmax and log_softmax along any dimension, with their gradients.
Knows rows: short ones stay in registers, long ones are read twice."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten import relay
from trireme.kernels.aten.counters import workspace
from trireme.kernels.aten.elementwise.unary import same
from trireme.kernels.aten.folds.fold import Fold, aligned, begins, ends, fold, line_width, lined_up, meeting_lanes
from trireme.kernels.aten.scalar import log_of_sum, multiple, singly
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power, shared_by

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Of long rows that lie beside each other: rows and their elements in one tile, and tiles of one program.
_BESIDE, _RELAYED, _TILES = 64, 64, 8
_TURNED = 2048  # elements from which on a few rows side by side are turned first
_COPIED = 1 << 17  # elements from which on rows that lie in another order than their results are copied first
_PART = 4096  # elements that a program takes at once of a row that several share
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _share(power, whole):
    """power / whole; a division of float64 for each element would take as long as its exponential"""
    return power * (1.0 / whole) if power.dtype == tl.float64 else power / whole


@triton.jit
def _risen(top, total, value):
    """running maxima, and sums of powers below them, after another value of each: one of the two powers is 1, the other computed"""
    rises = (value > top) | (value != value)
    higher, lower = tl.where(rises, value, top), tl.where(rises, top, value)
    power = tl.where(lower == float("-inf"), 0.0, tl.exp(lower - higher))
    return higher, tl.where(rises, total * power + 1.0, total + power)


@kernel
def _softmax(
    x, y, rows, inner, length, x_outer, x_inner, x_step, y_outer, y_inner, y_step,
    LOG: tl.constexpr, DOUBLE: tl.constexpr, FLAT: tl.constexpr, BESIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    OF: tl.constexpr, SINGLY: tl.constexpr, OPEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = exp(x − max) / Σ exp(x − max), or its logarithm; the whole row in one tile. OF divides where rows begin and end, or the
    lines of rows BESIDE each other"""
    chips.begin(EARLY, OPEN)
    if SINGLY:
        x, y = singly(x), singly(y)
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
def _softmax_pieces(
    x, y, rows, length, x_outer, y_outer,
    LOG: tl.constexpr, DOUBLE: tl.constexpr, SHIFTED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PIECES: tl.constexpr,
    OF: tl.constexpr, OPEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """the same for rows that fill much less than a tile of powers of two: in pieces of N elements, each thread with a maximum and a
    sum of its own until the end. SHIFTED: rows of x and y begin anywhere, but alike, and the ends of each go apart"""
    chips.begin(EARLY, OPEN)
    length, x_outer, y_outer = multiple(length, OF), multiple(x_outer, OF), multiple(y_outer, OF)
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = (row < rows)[:, None]
    column = tl.arange(0, N)
    # Pieces that every row fills are read without asking, those beyond the last row as its own: a few masks are all that a thread
    # has, and with one for each piece it would wait for the first three before it asks for more.
    full: tl.constexpr = PIECES - (2 if SHIFTED else 1)
    begin = tl.minimum(row, rows - 1).to(tl.int64) * x_outer
    even = length
    if SHIFTED:
        begin, head, even = aligned(begin, length)
        head, even = head[:, None], even[:, None]
    base = (x + begin)[:, None]
    out = (y + (begin if SHIFTED else row.to(tl.int64) * y_outer))[:, None]
    values = ()
    top = tl.full((M, N), float("-inf"), tl.float64 if DOUBLE else tl.float32)
    for piece in tl.static_range(PIECES):
        here = (column + piece * N)[None, :]
        if piece < full:
            value = tl.load(base + here).to(top.dtype)
        else:
            value = tl.load(base + here, mask=here < even, other=float("-inf")).to(top.dtype)
        values += (value,)  # type: ignore[assignment]
        top = tl.maximum(top, value)
    peak = tl.max(top, 1)[:, None]
    if SHIFTED:
        place, beyond = ends(head, even, length)
        beyond = beyond & inside
        edge = tl.load(base + place, mask=beyond, other=float("-inf")).to(top.dtype)
        peak = tl.maximum(peak, tl.max(edge, 1)[:, None])
    total = tl.zeros_like(top)
    kept = ()
    for piece in tl.static_range(PIECES):
        value = values[piece] - peak
        power = tl.exp(value)
        kept += (value if LOG else power,)  # type: ignore[assignment]
        total += power
    whole = tl.sum(total, 1)[:, None]
    if SHIFTED:
        edge = edge - peak
        power = tl.exp(edge)
        whole += tl.sum(power, 1)[:, None]
    log = log_of_sum(whole)  # apart from the maximum, beside which it might vanish
    for piece in tl.static_range(PIECES):
        here = (column + piece * N)[None, :]
        result = kept[piece] - log if LOG else _share(kept[piece], whole)
        mask = inside if piece < full else inside & (here < even)
        tl.store(out + here, result.to(y.dtype.element_ty), mask=mask)
    if SHIFTED:
        ending = edge - log if LOG else _share(power, whole)
        tl.store(out + place, ending.to(y.dtype.element_ty), mask=beyond)


@kernel
def _softmax_long(
    x, y, rows, inner, length, x_outer, x_inner, x_step, y_outer, y_inner, y_step,
    LOG: tl.constexpr, DOUBLE: tl.constexpr, FLAT: tl.constexpr, SHIFTED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """the same for rows longer than a tile: each lane keeps a running maximum and sum. SHIFTED: rows of x and y begin anywhere"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    rows, inner, y_outer, y_step = lined_up(rows, inner, y_outer, y_step, OF, FLAT)
    work = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * M + tl.arange(0, M)
    if SHIFTED:
        origin, head, even = aligned(tl.program_id(0).to(tl.int64) * x_outer, length)
        base, out = x + origin, y + origin
    else:
        even = length
        base = (x + begins(row, inner, x_outer, x_inner, FLAT))[:, None]
        out = (y + begins(row, inner, y_outer, y_inner, FLAT))[:, None]
    top = tl.full((M, N), float("-inf"), work)
    total = tl.zeros((M, N), work)
    for at in range(0, even, N):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < even)[None, :]
        value = tl.load(base + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=float("-inf")).to(work)
        top, total = _risen(top, total, value)
    peak = tl.max(top, 1)[:, None]
    if SHIFTED:
        place, inside = ends(head, even, length)
        edge = tl.load(base + place, mask=inside, other=float("-inf")).to(work)
        peak = tl.maximum(peak, tl.max(edge, 1)[:, None])
    lanes = tl.where(top == float("-inf"), 0.0, total * tl.exp(top - peak))
    whole = tl.sum(lanes, 1)[:, None] + (peak - peak)
    if SHIFTED:
        whole += tl.sum(tl.exp(edge - peak), 1)[:, None]
    log = log_of_sum(whole)
    if SHIFTED:
        ending = edge - peak - log if LOG else _share(tl.exp(edge - peak), whole)
        tl.store(out + place, ending.to(y.dtype.element_ty), mask=inside)
    for at in range(0, even, N):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < even)[None, :]
        value = tl.load(base + (column.to(tl.int64) * x_step)[None, :], mask=mask, other=0.0).to(work) - peak
        result = value - log if LOG else _share(tl.exp(value), whole)
        tl.store(out + (column.to(tl.int64) * y_step)[None, :], result.to(y.dtype.element_ty), mask=mask)


@kernel
def _softmax_narrow(
    x, y, columns, count, width, stride,
    LOG: tl.constexpr, DOUBLE: tl.constexpr, P: tl.constexpr, K: tl.constexpr, M: tl.constexpr, UNROLL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """the same down matrices of few columns: the `count` elements of one are read in lines of `width`, whole rows of the matrix and
    a multiple of 16, so that a thread takes 16 bytes at once and meets one column in each place"""
    chips.begin(EARLY, OPEN=False)
    work = tl.float64 if DOUBLE else tl.float32
    begin = tl.program_id(0).to(tl.int64) * stride
    base, out = x + begin // 16 * 16, y + begin // 16 * 16
    shift = (begin % 16).to(tl.int32)  # elements of its first line that lie before the matrix
    stop = shift + count
    lines = tl.cdiv(stop, width)
    lane = tl.arange(0, M)
    # The first line and the last have ends, for which each element would ask.
    at_end = tl.cast(lines - 1, tl.int64) * width + lane
    in_first, in_last = (lane < width) & (lane >= shift) & (lane < stop), (lane < width) & (at_end < stop) & (lines > 1)
    first = tl.load(base + lane, mask=in_first, other=float("-inf")).to(work)
    last = tl.load(base + at_end, mask=in_last, other=float("-inf")).to(work)
    top, total = _risen(first, tl.where(first == float("-inf"), 0.0, 1.0).to(work), last)
    for line in tl.range(1, lines - 1, loop_unroll_factor=UNROLL):
        value = tl.load(base + tl.cast(line, tl.int64) * width + lane, mask=lane < width, other=float("-inf")).to(work)
        top, total = _risen(top, total, value)
    # Lanes that met the same column come together.
    place, there = meeting_lanes(columns, width, shift, P, K)
    tops = tl.reshape(tl.where(there, tl.gather(top, place, 0), float("-inf")), (P, K))
    totals = tl.reshape(tl.where(there, tl.gather(total, place, 0), 0.0), (P, K))
    peaks = tl.max(tops, 1)
    wholes = tl.sum(tl.where(tops == float("-inf"), 0.0, totals * tl.exp(tops - peaks[:, None])), 1) + (peaks - peaks)
    met = (lane + columns * 16 - shift) % columns
    peak, whole = tl.gather(peaks, met, 0), tl.gather(wholes, met, 0)
    log = log_of_sum(whole)
    result = first - peak - log if LOG else _share(tl.exp(first - peak), whole)
    tl.store(out + lane, result.to(y.dtype.element_ty), mask=in_first)
    result = last - peak - log if LOG else _share(tl.exp(last - peak), whole)
    tl.store(out + at_end, result.to(y.dtype.element_ty), mask=in_last)
    for line in tl.range(1, lines - 1, loop_unroll_factor=UNROLL):
        here = tl.cast(line, tl.int64) * width + lane
        value = tl.load(base + here, mask=lane < width, other=0.0).to(work) - peak
        result = value - log if LOG else _share(tl.exp(value), whole)
        tl.store(out + here, result.to(y.dtype.element_ty), mask=lane < width)


@kernel
def _partial(
    x, tops, totals, rows, length, part, x_outer,
    DOUBLE: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, SHIFTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """maximum and Σ exp(x − maximum) of one part of one contiguous row; a thread keeps one of each for LANES neighbours"""
    chips.begin(EARLY, OPEN=True)
    work = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * part
    if SHIFTED:
        origin, head, even = aligned(row * x_outer, length)
        base = x + origin
    else:
        even = length
        base = x + row * x_outer
    place = tl.arange(0, N // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    top = tl.full((N // LANES,), float("-inf"), work)
    total = tl.zeros((N // LANES,), work)
    for at in range(start, tl.minimum(start + part, even), N):
        column = at + place
        value = tl.load(base + column, mask=column < even, other=float("-inf")).to(work)
        higher = tl.maximum(top, tl.max(value, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - finite) + tl.sum(tl.exp(value - finite[:, None]), 1)
        top = higher
    peak = tl.max(top, 0)
    if SHIFTED and tl.program_id(1) == tl.num_programs(1) - 1:
        beside, inside = ends(head, even, length)
        edge = tl.load(base + beside, mask=inside, other=float("-inf")).to(work)
        peak = tl.maximum(peak, tl.max(edge))
        beyond = tl.sum(tl.where(edge == float("-inf"), 0.0, tl.exp(edge - peak)))
    else:
        beyond = tl.zeros((), work)
    lanes = tl.where(top == float("-inf"), 0.0, total * tl.exp(top - peak))
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + at, peak)
    tl.store(totals + at, tl.sum(lanes, 0) + beyond)


@kernel
def _whole(
    x, y, tops, totals, rows, length, part, x_outer, y_outer,
    LOG: tl.constexpr, DOUBLE: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SHIFTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """one part of one row, once the maxima and sums of all its parts are known"""
    chips.begin(EARLY, OPEN=True)
    work = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    parts = tl.num_programs(1)
    split = tl.arange(0, S)
    top = tl.load(tops + row * parts + split, mask=split < parts, other=float("-inf"))
    total = tl.load(totals + row * parts + split, mask=split < parts, other=0.0)
    peak = tl.max(top, 0)
    whole = tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - peak)), 0) + (peak - peak)
    log = log_of_sum(whole)
    start = tl.program_id(1) * part
    if SHIFTED:
        origin, head, even = aligned(row * x_outer, length)
        base, out = x + origin, y + origin
    else:
        even = length
        base, out = x + row * x_outer, y + row * y_outer
    for at in range(start, tl.minimum(start + part, even), N):
        column = at + tl.arange(0, N)
        value = tl.load(base + column, mask=column < even, other=0.0).to(work) - peak
        result = value - log if LOG else _share(tl.exp(value), whole)
        tl.store(out + column, result.to(y.dtype.element_ty), mask=column < even)
    if SHIFTED and tl.program_id(1) == parts - 1:
        place, inside = ends(head, even, length)
        edge = tl.load(base + place, mask=inside, other=0.0).to(work) - peak
        ending = edge - log if LOG else _share(tl.exp(edge), whole)
        tl.store(out + place, ending.to(y.dtype.element_ty), mask=inside)


@kernel
def _relayed_softmax(
    x, y, sums, counters, items, ahead, parts, inner, inner_blocks, length, x_outer, x_inner, x_step, y_outer, y_inner, y_step,
    LOG: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """long rows side by side, M at a time: a first pass stores maximum and sum of a part of each, a second applies them"""
    chips.begin(EARLY, OPEN=False)
    item, second = relay.take(counters, items, ahead)
    block, part = item // parts, item % parts
    outer, row = (block // inner_blocks).to(tl.int64), (block % inner_blocks) * M + tl.arange(0, M)[None, :]
    column = (part * (N * TILES) + tl.arange(0, N)).to(tl.int64)[:, None]
    base = x + outer * x_outer + column * x_step + row * x_inner
    counter = counters + 1 + block
    joined = sums + 2 * M * (items + block) + tl.arange(0, M)
    if second:
        following = tl.load(base, mask=(column < length) & (row < inner), other=0.0)
        relay.wait(counter, parts + 1)
        highest = tl.load(joined, cache_modifier=".cg")[None, :]
        whole = tl.load(joined + M, cache_modifier=".cg")[None, :]
        out = y + outer * y_outer + column * y_step + row * y_inner
        for tile in tl.static_range(TILES):
            value = following.to(tl.float32) - highest
            if tile + 1 < TILES:
                inside = (column + (tile + 1) * N < length) & (row < inner)
                following = tl.load(base + (tile + 1) * N * x_step, mask=inside, other=0.0)
            result = value - tl.log(whole) if LOG else tl.exp2(value * _LOG2E) * (1.0 / whole)
            mask = (column + tile * N < length) & (row < inner)
            tl.store(out + tile * N * y_step, result.to(y.dtype.element_ty), mask=mask)
        relay.leave(counter, 2 * parts + 1)
    else:
        top = tl.full((N, M), float("-inf"), tl.float32)
        total = tl.zeros((N, M), tl.float32)
        for tile in tl.static_range(0, TILES, 2):
            here, next = column + tile * N, column + (tile + 1) * N
            a = tl.load(base + tile * N * x_step, mask=(here < length) & (row < inner), other=float("-inf")).to(tl.float32)
            b = tl.load(base + (tile + 1) * N * x_step, mask=(next < length) & (row < inner), other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.maximum(a, b))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2((top - finite) * _LOG2E) + tl.exp2((a - finite) * _LOG2E) + tl.exp2((b - finite) * _LOG2E)
            top = higher
        peak = tl.max(top, 0)
        finite = tl.where(peak == float("-inf"), 0.0, peak)[None, :]
        mine = sums + 2 * M * item + tl.arange(0, M)
        tl.store(mine, peak)
        tl.store(mine + M, tl.sum(total * tl.exp2((top - finite) * _LOG2E), 0))
        if relay.arrive(counter) == parts - 1:
            # Joined here, once, and not by each second pass: tiles of two layouts in one branch would change hands.
            split = tl.arange(0, S)[:, None]
            found = sums + 2 * M * (block * parts + split) + tl.arange(0, M)[None, :]
            tops = tl.load(found, mask=split < parts, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(found + M, mask=split < parts, other=0.0, cache_modifier=".cg")
            peak = tl.max(tops, 0)
            lanes = tl.where(tops == float("-inf"), 0.0, totals * tl.exp(tops - peak[None, :]))
            tl.store(joined, peak)
            tl.store(joined + M, tl.sum(lanes, 0) + (peak - peak))
            relay.arrive(counter)


@kernel
def _gradient(
    grad, y, dx, rows, inner, length, outer_stride, inner_stride, step,
    LOG: tl.constexpr, DOUBLE: tl.constexpr, FLAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dx = y (g − Σ g y), or for the logarithm g − exp(y) Σ g; all three tensors share one layout"""
    chips.begin(EARLY, OPEN=False)
    work = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0) * M + tl.arange(0, M)
    base = begins(row, inner, outer_stride, inner_stride, FLAT)[:, None]
    total = tl.zeros((M, N), work)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        offset = base + (column.to(tl.int64) * step)[None, :]
        g = tl.load(grad + offset, mask=mask, other=0.0).to(work)
        total += g if LOG else g * tl.load(y + offset, mask=mask, other=0.0).to(work)
    whole = tl.sum(total, 1)[:, None]
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        offset = base + (column.to(tl.int64) * step)[None, :]
        g = tl.load(grad + offset, mask=mask, other=0.0).to(work)
        v = tl.load(y + offset, mask=mask, other=0.0).to(work)
        result = g - tl.exp(v) * whole if LOG else v * (g - whole)
        tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=mask)


def tile(f: Fold, limit: int) -> tuple[int, int, int]:
    """Rows, columns and warps of one program for rows of this length."""
    n = min(next_power(f.length), limit)
    if f.cut.wide and n <= 16:  # 10 x 321247 floats took 15.7 µs with 1024, so 6.7
        if f.itemsize == 8:  # 12 x 500000 took 40.2 µs with four times as many, so 27.0
            return (32, n, 2) if n == 16 else (1024 // n, n, 4)
        return 2048 // n if not f.even else 1024 if f.itemsize <= 2 else 512, n, 4
    if not f.across:
        if f.itemsize == 8:  # which fill registers: 5000 rows of 1000 took 41.6 µs with two and four warps, so 24.5
            return max(1, 512 // n), n, 1 if n == 128 else 4 if n < 1024 else 8 if n < 4096 else 16 if n < 8192 else 32
        if n <= 8 and f.rows < 1 << 18:  # 100000 rows of eight floats took 3.5 µs as below, so 2.9
            return 512 // n, n, 8
        m = 1 if n >= 2048 else max(1, min(2048 // n, next_power(f.rows)))
        if n <= 32 and not f.even:  # 1100000 rows of three floats took 14.4 µs with four, so 11.6
            return m if n > 16 else min(m, 1024 // n), n, 8
        if n > 16384:
            return 1, n, 32
    else:
        if f.itemsize == 8 and 128 < n <= 1024:
            # Held whole, for an exponential of float64 costs more than reading: 249 x 368 x 35 took 51 µs with 32 rows, which
            # are read twice, so 31.6; 9830 x 220 x 2 72 and 28; 20 x 220 x 1000 56 and 29; 39 x 1000 x 200 86 and 63.
            return (8, n, 8) if n <= 512 else (4, n, 16)
        # Neighbours lie across rows: 32 of them fill whole sectors, and what does not fit is read twice.
        m = min(next_power(f.rows), max(32, 2048 // n))
        n = min(n, max(1, (limit if f.itemsize < 8 else limit // 4) // m))
    size = m * n
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
    if _walks_apart(f):
        x, f = fold(same(x, out=empty(x.shape, x.dtype, x.device)), dim, True)
    _run(x, y, f, g, dim, log)
    return y


def _walks_apart(f: Fold) -> bool:
    """Whether neighbours in memory are rows far apart in the result, so that a copy that lies as that does pays: for short rows and
    for few columns, which are fast then. 108 x 862 x 9 bfloat16, whose first dimension is contiguous, took 22.0 µs as they lay, so
    14.2; 32 x 16 x 1000 12.7 and 6.7; but 999 x 77 x 64 35 and 44."""
    apart = f.step != 1 and f.inner > 1 and 0 < f.walk[0] < f.walk[1]
    count = f.rows * f.length
    few = f.inner < 32 and 256 < f.length <= _TURNED and count <= 1 << 23
    return apart and count >= _COPIED and (f.length <= 16 or few)


def _run(x: torch.Tensor, y: torch.Tensor, f: Fold, g: Fold, dim: int, log: bool) -> None:
    """Rows by how they lie and how long they are: shared by several programs, side by side, turned first, or each with one program,
    in pieces, in one tile or read twice."""
    double = torch.float64 in (x.dtype, y.dtype)
    limit = chips.current().row_elements
    if limit < f.length <= 2 * limit and _holds(f) and not double:
        limit *= 2
    if f.inner == 1 and f.step == 1 and _shared(f, limit, double):
        _split_rows(x, y, f, g, log, double)
        return
    if f.inner >= 32 and f.length > limit // 32 and not double and _near(f) and _near(g):
        _beside(x, y, f, g, log)
        return
    if _narrow(f, g):
        _run_narrow(x, y, f, log, double)
        return
    if _few_across(f):
        _turn(x, y, dim, log)
        return
    cut = _pieces(f, g, double) if f.length <= (limit // 2 if double else limit) else None
    if cut is not None:
        m, n, warps, shifted = cut
        programs = blocks(f.rows, m)
        _softmax_pieces((programs,), x, y, f.rows, f.length, f.numbered[1], g.numbered[1],
                        LOG=log, DOUBLE=double, SHIFTED=shifted, M=m, N=n, PIECES=blocks(f.length, n),
                        OF=_known(f, g), OPEN=chips.crowded(programs, warps), warps=warps)  # fmt: skip
        return
    m, n, warps = tile(f, limit if f.length <= limit else limit // 2)
    programs, (inner, *walks) = blocks(f.rows, m), (*f.numbered, *g.numbered[1:])
    walk = (f.rows, inner, f.length, *walks)
    if f.length <= n:
        _softmax((programs,), x, y, *walk, LOG=log, DOUBLE=double, FLAT=inner == 1, BESIDE=f.across, M=m, N=n,
                 OF=_known(f, g), SINGLY=f.across and n > 16 and f.itemsize < 8, OPEN=chips.crowded(programs, warps),
                 warps=warps)  # fmt: skip
        return
    _softmax_long((programs,), x, y, *walk, LOG=log, DOUBLE=double, FLAT=inner == 1,
                  SHIFTED=m == 1 and _alike(f, g), M=m, N=n, OF=min(f.of, g.of), warps=warps)  # fmt: skip


def _shared(f: Fold, limit: int, double: bool) -> bool:
    """Whether several programs are to share a row: few long ones; of float64 many, too, which then take fewer exponentials than in
    tiles read twice (331 rows of 54345 took 339 µs, so 139), or would leave a tile half empty (2000 of 9000 150 and 137)."""
    if f.rows < 2 * chips.current().multiprocessors:
        return f.length > limit
    return double and (f.length > limit or limit // 2 < f.length <= 5 * limit // 8)


def _holds(f: Fold) -> bool:
    """Whether there are rows enough for programs that hold twice as much of one as others."""
    return 2 * f.rows >= chips.current().multiprocessors and not f.across


def _pieces(f: Fold, g: Fold, double: bool) -> tuple[int, int, int, bool] | None:
    """Rows and elements of each in a piece, warps, and whether the ends of rows go apart; None where one tile of powers of two does
    as well. 2156 rows of 560 bfloat16 took 4.1 µs in tiles, so 2.2; 1500 of 9001 41.8 and 18.0; 2048 of 5120 float64 82 and 54."""
    odd = f.cut.anywhere and _known(f, g) * f.itemsize < 16
    cut: tuple[int, int, int] | None
    if f.length <= 128:  # with one warp, since several would meet in shared memory for each maximum and sum
        cut = (4, 32, 4) if double and f.length > 64 else (16, 32, 4 if f.length <= 64 else 8) if f.length > 32 else None
    else:
        cut = _doubles(f.length) if double else _singles(f.length, odd, f.itemsize <= 2)
    if cut is None or not _alone(f, g):
        return None
    m, n, warps = cut
    nearly = 10 * blocks(f.length, n) * n > 9 * next_power(f.length)  # as much as a tile, which is simpler
    short = f.length <= 256 if double else f.length <= 128 and f.cut.anywhere
    if (m > 1 and f.rows < 2048) or (nearly and not odd and not short):
        return None
    apart = f.length > 1024 if f.itemsize <= 2 else double and f.length > 4096
    return m, n, warps, m == 1 and odd and apart and _alike(f, g)


def _singles(length: int, odd: bool, half: bool) -> tuple[int, int, int] | None:
    """Rows and elements of each in a piece, and warps, beyond 128 elements; `odd`: they come one by one, or a few at once."""
    if odd and 192 < length <= (1024 if half else 640):
        return 4, 32, 4  # each warp its own row: 22824 of 701 bfloat16 took 25.2 µs in one tile, so 19.1
    if length <= 384:
        return 8, 32 if odd else 64, 4
    if length <= 1024:
        return None if odd else (4, 64 if length <= 640 else 128, 4)
    if length <= 11264:
        return (1, 512, 4) if length <= 4096 else (1, 1024, 8)
    return (1, 2048, 8) if length <= (20480 if odd and half else 16384) else (1, 4096, 16)


def _doubles(length: int) -> tuple[int, int, int]:
    """The same for float64: as few warps for a row as hold it, since each of them takes its logarithm."""
    if length <= 320:
        return (4, 32, 4) if length <= 256 else (2, 32, 2)
    if length < 1024:  # 48780 rows of 451 took 106 µs with two of 128 at once, so 85
        return (1, 64, 2) if length <= 480 else (1, 128, 4)
    return (1, 512, 8) if length <= 2048 else (1, 1024, 16)


def _known(f: Fold, g: Fold) -> int:
    """What divides where rows or their lines begin and end, if that is to tell how many elements a thread takes at once."""
    return shared_by(f.length, f.numbered[1], g.numbered[1]) if _alone(f, g) else min(f.of, g.of)


def _alone(f: Fold, g: Fold) -> bool:
    """Whether rows are contiguous, and one stride leads from each to the next."""
    return all(walk[0] == 1 and walk[3] == 1 for walk in (f.numbered, g.numbered))


def _few_across(f: Fold) -> bool:
    """Whether there are so few long rows side by side that most of the chip would wait for them."""
    return f.across and f.length > _TURNED and blocks(f.rows, 32) < chips.current().multiprocessors


def _narrow(f: Fold, g: Fold) -> bool:
    """Whether these are the columns of matrices, few of each, not short, and long only if there are many: 2555 x 1458 x 5 floats
    took 205 µs in tiles of 32 columns, so 69; 70 x 2000 x 5 45.4 and 7.0."""
    enough = f.length <= _TURNED or f.rows >= chips.current().multiprocessors * f.columns
    return f.cut.matrix and f.numbered == g.numbered and 1 < f.columns < 32 and f.length > 256 and enough


def _run_narrow(x: torch.Tensor, y: torch.Tensor, f: Fold, log: bool, double: bool) -> None:
    columns, count = f.columns, f.columns * f.length
    matrices = f.rows // columns
    small = count <= 4096 and matrices >= 2 * chips.current().multiprocessors
    tile, warps = (512, 4) if small else (1024, 8) if count <= 24000 else (2048, 8)
    width = line_width(tile, columns)
    _softmax_narrow((matrices,), x, y, columns, count, width, f.walk[0], LOG=log, DOUBLE=double, P=next_power(columns),
                    K=next_power(width // columns), M=tile, UNROLL=1 if double else 4, warps=warps)  # fmt: skip


def _turn(x: torch.Tensor, y: torch.Tensor, dim: int, log: bool) -> None:
    """The same of a copy whose rows are contiguous, so that several programs share each."""
    rows = x.movedim(dim, -1)
    done = _apply(same(rows, out=empty(rows.shape, x.dtype, x.device)), -1, y.dtype, log)
    same(done.movedim(-1, dim), out=y)


def _alike(f: Fold, g: Fold) -> bool:
    """Whether long rows begin anywhere, but alike in both tensors."""
    return f.cut.shifted and f.numbered == g.numbered


def _near(f: Fold) -> bool:
    """Whether 32 bits tell how far rows side by side lie apart, and the elements that one program takes of them, and whether one
    program can join the parts of each."""
    part = _RELAYED * _TILES
    return max(f.inner * f.walk[1], part * f.step) < 2**31 and blocks(f.length, part) <= 8192


def _beside(x: torch.Tensor, y: torch.Tensor, f: Fold, g: Fold, log: bool) -> None:
    """Long rows whose neighbours lie beside each other: read twice, but the second time from the cache."""
    inner_blocks, parts = blocks(f.inner, _BESIDE), blocks(f.length, _RELAYED * _TILES)
    tracks = f.rows // f.inner * inner_blocks
    items = tracks * parts
    sums, counters = workspace(x.device, 2 * _BESIDE * (items + tracks), tracks + 1)
    sizes = (items, relay.lag(items, parts), parts, f.inner, inner_blocks, f.length)
    _relayed_softmax((2 * items,), x, y, sums, counters, *sizes, *f.walk, *g.walk,
                     LOG=log, M=_BESIDE, N=_RELAYED, TILES=_TILES, S=next_power(parts), warps=8)  # fmt: skip


def _part(rows: int, double: bool) -> tuple[int, int, int]:
    """Elements that a program takes at once of a row that several share, neighbours of which a thread keeps one maximum, and warps:
    of float64 fewer, which leave less of the last tile empty (5000 rows of 16500 took 760 µs with 4096, so 602; but 2 of 2²⁰ 36
    and 77)."""
    return (1024, 4, 4) if double and rows >= 8 else (_PART, 8, 8)


def partial_sums(x: torch.Tensor, rows: int, length: int, stride: int, double: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Maxima and Σ exp(x − maximum) of parts of a few long rows, and the elements of a part: every row is shared by several
    programs."""
    each = 4 if x.element_size() <= 2 else 12  # programs of a processor: 100 rows of 50257 floats took 18.9 µs with four, so 14.2
    n, lanes, warps = _part(rows, double)
    parts = max(2, min(32, each * chips.current().multiprocessors // rows, blocks(length, n)))
    part = blocks(blocks(length, parts), n) * n
    parts = blocks(length, part)
    tops, totals = empty((2, rows, parts), torch.float64 if double else torch.float32, x.device)
    _partial((rows, parts), x, tops, totals, rows, length, part, stride,
             DOUBLE=double, N=n, LANES=lanes, SHIFTED=stride % 16 != 0 or length % 16 != 0, warps=warps)  # fmt: skip
    return tops, totals, part


def _split_rows(x: torch.Tensor, y: torch.Tensor, f: Fold, g: Fold, log: bool, double: bool) -> None:
    """Few long rows, such as the logits of a decoding step."""
    tops, totals, part = partial_sums(x, f.rows, f.length, f.walk[0], double)
    n, _, warps = _part(f.rows, double)
    parts = tops.shape[1]
    _whole((f.rows, parts), x, y, tops, totals, f.rows, f.length, part, f.walk[0], g.walk[0],
           LOG=log, DOUBLE=double, N=n, S=next_power(parts), SHIFTED=_alike(f, g), warps=warps)  # fmt: skip


def _backward(grad: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype, log: bool) -> torch.Tensor:
    if y.dim() == 0:
        return _backward(grad.reshape(1), y.reshape(1), dim, dtype, log).reshape(())
    grad = grad.contiguous()
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if dx.numel() == 0:
        return dx
    y, f = fold(y, dim, True)
    m, n, warps = tile(f, chips.current().row_elements // 2)
    grid = (blocks(f.rows, m),)
    inner, *walk = f.numbered
    _gradient(grid, grad, y, dx, f.rows, inner, f.length, *walk,
              LOG=log, DOUBLE=y.dtype is torch.float64, FLAT=inner == 1, M=m, N=n, warps=warps)  # fmt: skip
    return dx


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
        if torch.is_grad_enabled():  # to be derived once more
            dx = grad - y.exp() * grad.sum(ctx.dim, True) if ctx.log else y * (grad - (grad * y).sum(ctx.dim, True))
            return dx.to(ctx.dtype), None, None, None
        return _backward(grad, y, ctx.dim, ctx.dtype, ctx.log), None, None, None


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
