"""Attention of one new token per sequence over keys and values in fewer bits, cut into the spans of `decode`.

    out[i, h] = sum_j softmax_j(cap(scale * q[i, h] . k[j, h // G]) + slope[h] * (j - p)) v[j, h // G],   p - window < j <= p

Tokens and the numbers of a head are the first axis of both products, and the query heads the second: so each warp unpacks tokens of
its own. With the axes the other way round, as in `decode`, all warps would unpack the same ones. Numbers are multiplied as float16,
which holds what all kinds keep. Knows pages and lengths; nothing of layers or of prompts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trireme.kernels.launch import kernel
from trireme.kernels.steps import in_bits
from trireme.kernels.steps.attention import LOG2E
from trireme.kernels.steps.skinny import depend
from trireme.kernels.steps.spans import join

TILE = 64  # keys of one tile, of which a warp has 128 numbers


@triton.jit
def _query(q, head, d, live, real, DIM: tl.constexpr, TYPE: tl.constexpr):
    """The query heads of a program, [numbers, heads], as `TYPE` holds them."""
    mask = live[:, None] & real[None, :]
    found = tl.load(q + head[None, :] * DIM + d[:, None], mask=mask, other=0.0).to(tl.float32)
    if tl.float16 == TYPE:
        found = tl.clamp(found, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return found.to(TYPE)


@triton.jit
def _queries(q, head, real, PART: tl.constexpr, DIM: tl.constexpr, HALVES: tl.constexpr, TYPE: tl.constexpr):
    """Both halves of them, of which all kinds but int4 have the first alone."""
    d = in_bits.mixed(PART)
    first = _query(q, head, d, d < DIM // HALVES, real, DIM, TYPE)
    second = first
    if HALVES == 2:
        second = _query(q, head, d + DIM // 2, d < DIM // HALVES, real, DIM, TYPE)
    return first, second


@triton.jit
def _size(scales, head, real, GROUP: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr):
    """By how much the numbers of each query head's keys or values come out too small, but for scales of int8."""
    if KIND == "fp8":
        return tl.load(scales + head // GROUP, mask=real, other=0.0)[None, :]
    elif KIND == "int4" and HOW is not None:
        return in_bits.SHRUNK + 0.0
    else:
        return 1.0


@triton.jit
def _begun(sinks, head, real, owner, SINKS: tl.constexpr, ROWS: tl.constexpr):
    """The largest score and the sum of weights before the first key. A sink counts in its sequence's first span, the owner, as a
    key with this score and no value."""
    best, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if SINKS:
        best = tl.where(owner, tl.load(sinks + head, mask=real, other=0.0) * LOG2E, float("-inf"))
        total = tl.where(owner, 1.0, total)
    return best, total


@triton.jit
def _scores(
    k, scales, slot, seen, kv_head, slot_stride, query, later, factor, above, softcap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, KIND: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The scores of a tile's keys, [keys, heads], for powers of two.  above: what keys of int8 that are too large add to them"""
    key, key_later = in_bits.load_parts(k, scales, slot, seen, kv_head, slot_stride, query, KV_HEADS, DIM, PART, KIND, KEYS, True)
    score = tl.dot(in_bits.mix(key), query, input_precision="ieee")
    if KIND == "int4":
        score = tl.dot(in_bits.mix(key_later), later, score, input_precision="ieee")
    if KIND == "int8" and KEYS is not None:
        score -= above[None, :]
    score *= factor
    if KIND == "int8":
        score *= in_bits.scale_of(scales, slot, seen, kv_head, KV_HEADS)[:, None]
    if CAPPED:  # cap * tanh(score / cap), from exponentials
        score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 / softcap) * LOG2E) + 1.0))
    return score * LOG2E


@triton.jit
def _with_values(
    acc, acc_later, shrink, p, v, scales, slot, seen, kv_head, slot_stride, query,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, KIND: tl.constexpr, VALUES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The sums so far, which shrink, and a tile's values by their weights p [keys, heads]."""
    acc = acc * shrink[None, :]
    value, later = in_bits.load_parts(v, scales, slot, seen, kv_head, slot_stride, query, KV_HEADS, DIM, PART, KIND, VALUES, True)
    if KIND == "int8":  # scales by the largest of the tile, so that float16 holds every product
        sizes = in_bits.scale_of(scales, slot, seen, kv_head, KV_HEADS)
        largest = tl.max(sizes, 0)
        p = p * (sizes / tl.maximum(largest, 1e-30))[:, None]
        acc += tl.dot(in_bits.turn(value, WARPS), p.to(query.dtype), input_precision="ieee") * largest
    else:
        acc = tl.dot(in_bits.turn(value, WARPS), p.to(query.dtype), acc, input_precision="ieee")
    if KIND == "int4":
        acc_later = tl.dot(in_bits.turn(later, WARPS), p.to(query.dtype), acc_later * shrink[None, :], input_precision="ieee")
    return acc, acc_later


@triton.jit
def _store(at, first, second, mask, DIM: tl.constexpr, HALVES: tl.constexpr):
    """Both halves of the heads' numbers, of which all kinds but int4 have the first alone."""
    tl.store(at, first.to(at.dtype.element_ty), mask=mask)
    if HALVES == 2:
        tl.store(at + DIM // 2, second.to(at.dtype.element_ty), mask=mask)


@kernel
def attend(
    q, k, v, out, page_table, rows, query_starts, contexts, sequence, begin, info, counters, partial, slopes, sinks,
    k_scales, v_scales, page_stride, q_stride, out_stride, slot_stride, scale, softcap, window,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
    HELD: tl.constexpr, KIND: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WARPS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """As in `decode`: one span of one sequence for the query heads of TOGETHER neighbouring KV heads.

    A tile's keys are those of all these heads, token by token, as they lie in memory; a query head sees those of its own.
    """
    # q: [tokens, HEADS, DIM]; k, v: [slots, kv_heads, DIM or DIM / 2]; partial: [spans, HEADS, DIM + 2]
    ALL: tl.constexpr = GROUP * TOGETHER
    s, first_head = tl.program_id(1), tl.program_id(0) * ALL
    seq = tl.load(sequence + s)
    if seq < 0:
        depend(PDL)
        return
    span, num_spans = tl.load(info), tl.load(info + 1 + seq)
    low, length = tl.load(begin + s), tl.load(contexts + seq)
    token = tl.load(query_starts + seq)
    pages = page_table + tl.load(rows + seq).to(tl.int64) * page_stride
    n, head = tl.arange(0, TILE), first_head + tl.arange(0, ROWS)
    kv_head = tl.program_id(0) * TOGETHER + n % TOGETHER
    TYPE: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    HALVES: tl.constexpr = 2 if KIND == "int4" else 1  # tiles of a head's numbers
    PART: tl.constexpr = WIDTH // HALVES
    d = in_bits.turned(PART, WARPS)
    live = d < DIM // HALVES
    depend(PDL)
    real = head < first_head + ALL
    own = (kv_head[:, None] == (head // GROUP)[None, :]) | (head >= first_head + ALL)[None, :]
    hidden = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    visible = tl.maximum(low, hidden)
    high = tl.minimum(low + span, length)
    source = q + token.to(tl.int64) * q_stride
    query, later = _queries(source, head, real, PART, DIM, HALVES, TYPE)
    best, total = _begun(sinks, head, real, low // span == hidden // span, SINKS, ROWS)
    acc = tl.zeros([PART, ROWS], tl.float32)
    acc_later = acc
    factor = scale * _size(k_scales, head, real, GROUP, KIND, KEYS)
    above = in_bits.ABOVE * tl.sum(query.to(tl.float32), 0)
    if SLOPED:
        slope = tl.load(slopes + head, mask=real, other=0.0) * LOG2E
    STEP: tl.constexpr = TILE // TOGETHER
    for start in range(visible // STEP * STEP, high, STEP):
        j = start + n // TOGETHER
        seen = (j >= visible) & (j < high)
        slot = tl.load(pages + j // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + j % PAGE
        score = _scores(
            k, k_scales, slot, seen, kv_head, slot_stride, query, later, factor, above, softcap,
            HEADS // GROUP, DIM, PART, KIND, KEYS, CAPPED,
        )  # fmt: skip
        if SLOPED:
            score += slope[None, :] * (j - length + 1).to(tl.float32)[:, None]
        score = tl.where(seen[:, None] & own, score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 0))
        shrink = tl.exp2(best - peak)
        p = tl.exp2(score - peak[None, :])
        total = total * shrink + tl.sum(p, 0)
        acc, acc_later = _with_values(
            acc, acc_later, shrink, p, v, v_scales, slot, seen, kv_head, slot_stride, query,
            HEADS // GROUP, DIM, PART, KIND, VALUES, WARPS,
        )  # fmt: skip
        best = peak
    size = _size(v_scales, head, real, GROUP, KIND, VALUES)
    acc, acc_later = acc * size, acc_later * size
    mask = live[:, None] & real[None, :]
    target = out + token.to(tl.int64) * out_stride + head[None, :] * DIM + d[:, None]
    if num_spans == 1:
        _store(target, acc / total[None, :], acc_later / total[None, :], mask, DIM, HALVES)
        return
    mine = partial + (s * HEADS + head) * (DIM + 2)
    _store(mine[None, :] + d[:, None], acc, acc_later, mask, DIM, HALVES)
    tl.store(mine + DIM, best, mask=real)
    tl.store(mine + DIM + 1, total, mask=real)
    first = s - (low // span - hidden // span)
    into = out + token.to(tl.int64) * out_stride
    join(partial, into, counters, s, first, num_spans, first_head, HEADS, ALL, DIM, WIDTH, HELD)
