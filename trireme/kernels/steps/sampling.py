"""Choosing a token from logits without sorting the vocabulary.

    greedy   argmax_i x[i], the lowest id of equals
    sample   p = softmax(x / temperature), cut to the top_k likeliest, of those to the likeliest whose sum passes top_p, of those to
             p >= min_p max(p); then the first id at which the running sum of what is left passes uniform * total

The k-th likeliest value and the value where the sum passes top_p are found by narrowing an interval of values, read as whole
numbers in their order: every pass over the row counts (or sums) what lies above three marks and keeps a quarter of the interval.
Of equals at the last kept value the lowest ids stay, as a stable sort would keep them. Knows rows of logits; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.launch import blocks, kernel, next_power
from trireme.kernels.steps.skinny import depend

CHUNK = 4096  # logits of one program when a row is spread over several
STAGES = tl.constexpr(3)  # blocks of a row in flight while one is counted


@triton.jit
def _order(x):
    """float32 as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@kernel
def _peaks(logits, peaks, places, stride, size, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The largest value of one chunk of a row, and where it is."""
    depend(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    i = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # a row that holds a NaN chooses it, so that the caller can see it
    best = tl.max(x, 0)
    cell = row * tl.num_programs(1) + part
    tl.store(peaks + cell, best)
    # a row without any number above -inf still names a real token
    tl.store(places + cell, tl.min(tl.where((x == best) & (i < size), i, 2147483647), 0))


@kernel
def _masses(
    logits, temperature, peaks, places, sums, stride, size, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """As `_peaks`, and the chunk's sum of exp((x - its largest) / temperature)."""
    depend(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    i = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, 0)
    warm = 1.0 / tl.maximum(tl.load(temperature + row), 1e-6)
    cell = row * tl.num_programs(1) + part
    tl.store(peaks + cell, best)
    tl.store(places + cell, tl.min(tl.where((x == best) & (i < size), i, 2147483647), 0))
    tl.store(sums + cell, tl.sum(tl.where(x > float("-inf"), tl.exp((x - best) * warm), 0.0), 0))


@kernel
def _join(peaks, places, out, parts, PARTS: tl.constexpr, CHECKED: tl.constexpr, PDL: tl.constexpr):
    """The place of the largest of a row's chunks; CHECKED, -1 where it is not finite."""
    depend(PDL)
    row, i = tl.program_id(0), tl.arange(0, PARTS)
    x = tl.load(peaks + row * parts + i, mask=i < parts, other=float("-inf"))
    place = tl.load(places + row * parts + i, mask=i < parts, other=2147483647)
    best = tl.max(x, 0)
    chosen = tl.min(tl.where(x == best, place, 2147483647), 0)
    if CHECKED:
        chosen = tl.where(tl.abs(best) < float("inf"), chosen, -1)
    tl.store(out + row, chosen.to(tl.int64))


@triton.jit
def _above(row, size, warm, peak, mark, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """How many values (or how much of exp(x / temperature - peak)) have an order of at least `mark`, for three marks."""
    a, b, c = mark
    first, second, third = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < size, other=float("-inf")).to(tl.float32) * warm
        order = _order(x)
        if COUNTED:
            weight = tl.where(i < size, 1.0, 0.0)
        else:
            weight = tl.exp(x - peak)
        first += tl.where(order >= a, weight, 0.0)
        second += tl.where(order >= b, weight, 0.0)
        third += tl.where(order >= c, weight, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _search(row, size, warm, peak, low, high, goal, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest order t in [low, high] such that what lies at t or above reaches `goal`; at `low` it always does."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        gap = high - low
        a, b, c = low + (gap + 3) // 4, low + (gap + 1) // 2, low + (3 * gap + 3) // 4
        mark = (a.to(tl.int32), b.to(tl.int32), c.to(tl.int32))
        first, second, third = _above(row, size, warm, peak, mark, COUNTED, BLOCK)
        new_low = tl.where(third >= goal, c, tl.where(second >= goal, b, tl.where(first >= goal, a, low)))
        high = tl.where(third >= goal, high, tl.where(second >= goal, c - 1, tl.where(first >= goal, b - 1, a - 1)))
        low = new_low
    return low.to(tl.int32)


@triton.jit
def _mass(row, size, warm, peak, last, BLOCK: tl.constexpr):
    """(how many values lie above `last`, their sum of exp(x / temperature - peak))"""
    count, mass = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < size, other=float("-inf")).to(tl.float32) * warm
        over = (_order(x) > last) & (i < size)
        count += tl.where(over, 1.0, 0.0)
        mass += tl.where(over, tl.exp(x - peak), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _kept(row, start, size, warm, peak, last, quota, ties, min_p, BLOCK: tl.constexpr):
    """The weights of one block after all cuts, and the running number of values equal to `last`."""
    i = start + tl.arange(0, BLOCK)
    x = tl.load(row + i, mask=i < size, other=float("-inf")).to(tl.float32) * warm
    weight, order = tl.exp(x - peak), _order(x)
    equal = ((order == last) & (i < size)).to(tl.int32)
    rank = ties + tl.cumsum(equal, 0) - equal
    keep = (order > last) | ((equal > 0) & (rank < quota))
    weight = tl.where(keep & (weight >= min_p) & (i < size), weight, 0.0)
    return weight, ties + tl.sum(equal, 0)


@triton.jit
def _uncut(row, size, warm, peak, uniform, peaks, sums, parts, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """The choice among all tokens: first the chunk where the running sum passes, then the token in it."""
    c = tl.arange(0, PARTS)
    tops = tl.load(peaks + c, mask=c < parts, other=float("-inf"))
    mass = tl.load(sums + c, mask=c < parts, other=0.0) * tl.exp(tl.where(tops > float("-inf"), tops * warm - peak, float("-inf")))
    running = tl.cumsum(mass.to(tl.float64), 0)
    goal = uniform.to(tl.float64) * tl.sum(mass.to(tl.float64), 0)
    last = tl.max(tl.where(mass > 0, c, 0), 0)
    chunk = tl.minimum(tl.min(tl.where((running > goal) & (mass > 0), c, PARTS), 0), last)
    before = tl.sum(tl.where(c < chunk, mass.to(tl.float64), 0.0), 0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(row + i, mask=i < size, other=float("-inf")).to(tl.float32) * warm
    weight = tl.exp(x - peak)
    inner = before + tl.cumsum(weight.to(tl.float64), 0)
    chosen = tl.min(tl.where((inner > goal) & (weight > 0), i, size), 0)
    return tl.where(chosen < size, chosen, tl.max(tl.where(weight > 0, i, 0), 0))


@kernel
def _sample(
    logits, temperature, top_k, top_p, min_p, uniform, peaks, places, sums, out, stride, size, parts,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row; CHECKED, -1 where its largest logit is not finite."""
    depend(PDL)
    r = tl.program_id(0)
    heat = tl.load(temperature + r)
    peaks, places, sums = peaks + r * parts, places + r * parts, sums + r * parts
    c = tl.arange(0, PARTS)
    tops = tl.load(peaks + c, mask=c < parts, other=float("-inf"))
    place = tl.load(places + c, mask=c < parts, other=2147483647)
    likeliest = tl.min(tl.where(tops == tl.max(tops, 0), place, 2147483647), 0)
    if CHECKED:  # noqa: SIM102 - the outer one is decided while compiling
        if tl.abs(tl.max(tops, 0)) == float("inf"):
            tl.store(out + r, -1)
            return
    if heat == 0.0:
        tl.store(out + r, likeliest.to(tl.int64))
        return
    row, warm = logits + r.to(tl.int64) * stride, 1.0 / tl.maximum(heat, 1e-6)
    peak = tl.load(row + likeliest).to(tl.float32) * warm
    top = _order(peak)
    limit, share, least = tl.load(top_k + r), tl.load(top_p + r), tl.load(min_p + r)
    if (limit <= 0 or limit >= size) and share >= 1.0 and least <= 0.0:
        chosen = _uncut(row, size, warm, peak, tl.load(uniform + r), peaks, sums, parts, PARTS, CHUNK)
        tl.store(out + r, chosen.to(tl.int64))
        return
    last = _order(peak * 0.0 + float("-inf"))  # below every finite value: nothing is cut
    quota = size
    if limit > 0 and limit < size:
        last = _search(row, size, warm, peak, last, top, limit.to(tl.float32), True, BLOCK)
        count, _ = _mass(row, size, warm, peak, last, BLOCK)
        quota = limit - count.to(tl.int32)
    if share < 1.0:
        # what is left after top-k: all above `last`, and `quota` of those equal to it
        count, mass = _mass(row, size, warm, peak, last, BLOCK)
        edge = tl.exp(tl.where(last < 0, last ^ 0x7FFFFFFF, last).to(tl.float32, bitcast=True) - peak)
        whole = mass + tl.where(limit > 0, edge * quota, 0.0)
        goal = tl.maximum(share * whole, 1e-30)
        if mass >= goal:  # the sum passes above `last`: a higher value is the last one kept
            last = _search(row, size, warm, peak, last + 1, top, goal, False, BLOCK)
            count, mass = _mass(row, size, warm, peak, last, BLOCK)
            edge = tl.exp(tl.where(last < 0, last ^ 0x7FFFFFFF, last).to(tl.float32, bitcast=True) - peak)
            quota = tl.maximum(tl.ceil((goal - mass) / edge).to(tl.int32), 1)
        else:
            quota = tl.minimum(quota, tl.maximum(tl.ceil((goal - mass) / tl.maximum(edge, 1e-38)).to(tl.int32), 1))
    sums = tl.zeros([BLOCK], tl.float32)
    ties = 0
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        weight, ties = _kept(row, start, size, warm, peak, last, quota, ties, least, BLOCK)
        sums += weight
    goal = tl.load(uniform + r).to(tl.float64) * tl.sum(sums.to(tl.float64), 0)
    before, ties, found, final = goal * 0.0, 0, size, 0
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        weight, ties = _kept(row, start, size, warm, peak, last, quota, ties, least, BLOCK)
        i = start + tl.arange(0, BLOCK)
        running = before + tl.cumsum(weight.to(tl.float64), 0)
        found = tl.minimum(found, tl.min(tl.where((running > goal) & (weight > 0), i, size), 0))
        final = tl.maximum(final, tl.max(tl.where(weight > 0, i, 0), 0))
        before += tl.sum(weight.to(tl.float64), 0)
    # rounding may carry the goal past the end: then it is the last token kept
    tl.store(out + r, tl.where(found < size, found, final).to(tl.int64))


@kernel
def _logprobs(logits, ids, values, ranks, stride, size, BLOCK: tl.constexpr):
    """values[r] = x[ids[r]] - log(sum(exp(x))), ranks[r] = 1 + how many are larger"""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * stride
    mine = tl.load(row + tl.load(ids + r)).to(tl.float32)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total, larger = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, size, BLOCK, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < size, other=float("-inf")).to(tl.float32)
        new = tl.maximum(peak, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(peak - safe) + tl.exp(x - safe)
        peak = new
        larger += (x > mine).to(tl.int32)
    top = tl.max(peak, 0)
    whole = tl.sum(total * tl.exp(tl.where(peak == float("-inf"), 0.0, peak) - top), 0)
    tl.store(values + r, mine - top - tl.log(whole))
    tl.store(ranks + r, tl.sum(larger, 0).to(tl.int64) + 1)


def greedy(logits: Tensor, checked: bool = False, pdl: bool = False) -> Tensor:
    """The likeliest token of each row; the lowest id of equals.  logits: [rows, vocabulary]

    Checked, a row whose largest logit is not finite gives -1.
    """
    rows, size = logits.shape
    parts = blocks(size, CHUNK)
    peaks = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _peaks((rows, parts), logits, peaks, places, logits.stride(0), size, CHUNK=CHUNK, PDL=pdl, dependent=pdl, warps=8)
    _join((rows,), peaks, places, out, parts, PARTS=next_power(parts), CHECKED=checked, PDL=pdl, dependent=pdl)
    return out


COLUMNS = ("temperature", "top_k", "top_p", "min_p")  # what `sample` goes by, in this order


def sample(logits: Tensor, columns: Sequence[Tensor], uniform: Tensor, checked: bool = False, pdl: bool = False) -> Tensor:
    """One token per row; each of COLUMNS is [rows]: top_k 0 is all, temperature 0 is greedy, uniform lies in [0, 1).

    Checked, a row whose largest logit is not finite gives -1.
    """
    rows, size = logits.shape
    parts = blocks(size, CHUNK)
    peaks, sums = (torch.empty((rows, parts), dtype=torch.float32, device=logits.device) for _ in range(2))
    places = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    stride = logits.stride(0)
    options: dict[str, Any] = {"PDL": pdl, "dependent": pdl}
    _masses((rows, parts), logits, columns[0], peaks, places, sums, stride, size, CHUNK=CHUNK, **options, warps=8)
    _sample(
        (rows,), logits, *columns, uniform, peaks, places, sums, out, stride, size, parts,
        PARTS=next_power(parts), CHUNK=CHUNK, BLOCK=min(next_power(size), 4096), CHECKED=checked, **options, warps=16,
    )  # fmt: skip
    return out


def logprobs(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability, rank from 1) of ids[i] in row i."""
    rows, size = logits.shape
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _logprobs((rows,), logits, ids, values, ranks, logits.stride(0), size, BLOCK=min(next_power(size), 4096), warps=16)
    return values, ranks
