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

TILE = {64: 128, 128: 64, 256: 64}  # tokens of one tile by head size


@triton.jit
def _query(q, head, d, live, kv_head, GROUP: tl.constexpr, DIM: tl.constexpr, TYPE: tl.constexpr):
    """The query heads of one KV head, [numbers, heads], as `TYPE` holds them."""
    mask = live[:, None] & (head < kv_head * GROUP + GROUP)[None, :]
    found = tl.load(q + head[None, :] * DIM + d[:, None], mask=mask, other=0.0).to(tl.float32)
    if tl.float16 == TYPE:
        found = tl.clamp(found, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return found.to(TYPE)


@kernel
def attend(
    q, k, v, out, page_table, rows, query_starts, contexts, sequence, begin, info, counters, partial, slopes, sinks,
    k_scales, v_scales, page_stride, q_stride, out_stride, slot_stride, scale, softcap, window,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
    KIND: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """As in `decode`: one span of one sequence for the GROUP query heads of one KV head."""
    # q: [tokens, HEADS, DIM]; k, v: [slots, kv_heads, DIM or DIM / 2]; partial: [spans, HEADS, DIM + 2]
    s, kv_head = tl.program_id(1), tl.program_id(0)
    seq = tl.load(sequence + s)
    if seq < 0:
        depend(PDL)
        return
    span, num_spans = tl.load(info), tl.load(info + 1 + seq)
    low, length = tl.load(begin + s), tl.load(contexts + seq)
    token = tl.load(query_starts + seq)
    pages = page_table + tl.load(rows + seq).to(tl.int64) * page_stride
    n, head = tl.arange(0, TILE), kv_head * GROUP + tl.arange(0, ROWS)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    TYPE: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.float16
    HALVES: tl.constexpr = 2 if KIND == "int4" else 1  # tiles of a head's numbers
    PART: tl.constexpr = WIDTH // HALVES
    d = tl.arange(0, PART)
    live = d < DIM // HALVES
    depend(PDL)
    real = head < kv_head * GROUP + GROUP
    hidden = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    visible = tl.maximum(low, hidden)
    high = tl.minimum(low + span, length)
    source = q + token.to(tl.int64) * q_stride
    mixed = in_bits.mixed(PART)
    query = _query(source, head, mixed, mixed < DIM // HALVES, kv_head, GROUP, DIM, TYPE)
    later = query
    if HALVES == 2:
        later = _query(source, head, mixed + DIM // 2, mixed < DIM // HALVES, kv_head, GROUP, DIM, TYPE)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # the sequence's first span takes it in, as a key with this score and no value
        owner = low // span == hidden // span
        best = tl.where(owner, tl.load(sinks + head, mask=real, other=0.0) * LOG2E, float("-inf"))
        total = tl.where(owner, 1.0, total)
    acc = tl.zeros([PART, ROWS], tl.float32)
    acc_later = acc
    if KIND == "fp8":
        scale *= tl.load(k_scales + kv_head)
    if SLOPED:
        slope = tl.load(slopes + head, mask=real, other=0.0) * LOG2E
    for start in range(visible // TILE * TILE, high, TILE):
        j = start + n
        seen = (j >= visible) & (j < high)
        slot = tl.load(pages + j // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + j % PAGE
        key, key_later = in_bits.load_parts(
            k, k_scales, slot, seen, kv_head, slot_stride, query, KV_HEADS, DIM, PART, KIND, HOW
        )  # fmt: skip
        score = tl.dot(in_bits.mix(key), query, input_precision="ieee")
        if HALVES == 2:
            score = tl.dot(in_bits.mix(key_later), later, score, input_precision="ieee")
        score *= scale
        if KIND == "int8":
            score *= in_bits.scale_of(k_scales, slot, seen, kv_head, KV_HEADS)[:, None]
        if CAPPED:  # cap * tanh(score / cap), from exponentials
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 / softcap) * LOG2E) + 1.0))
        score = score * LOG2E
        if SLOPED:
            score += slope[None, :] * (j - length + 1).to(tl.float32)[:, None]
        score = tl.where(seen[:, None], score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 0))
        shrink = tl.exp2(best - peak)
        p = tl.exp2(score - peak[None, :])
        total = total * shrink + tl.sum(p, 0)
        acc = acc * shrink[None, :]
        value, value_later = in_bits.load_parts(
            v, v_scales, slot, seen, kv_head, slot_stride, query, KV_HEADS, DIM, PART, KIND, HOW, False
        )  # fmt: skip
        if KIND == "int8":  # scales by the largest of the tile, so that float16 holds every product
            sizes = in_bits.scale_of(v_scales, slot, seen, kv_head, KV_HEADS)
            largest = tl.max(sizes, 0)
            p = p * (sizes / tl.maximum(largest, 1e-30))[:, None]
            acc += tl.dot(tl.trans(value), p.to(TYPE), input_precision="ieee") * largest
        else:
            acc = tl.dot(tl.trans(value), p.to(TYPE), acc, input_precision="ieee")
        if HALVES == 2:
            acc_later = tl.dot(tl.trans(value_later), p.to(TYPE), acc_later * shrink[None, :], input_precision="ieee")
        best = peak
    if KIND == "fp8":
        acc *= tl.load(v_scales + kv_head)
    mask = live[:, None] & real[None, :]
    target = out + token.to(tl.int64) * out_stride + head[None, :] * DIM + d[:, None]
    if num_spans == 1:
        tl.store(target, (acc / total[None, :]).to(out.dtype.element_ty), mask=mask)
        if HALVES == 2:
            tl.store(target + DIM // 2, (acc_later / total[None, :]).to(out.dtype.element_ty), mask=mask)
        return
    mine = partial + (s * HEADS + head) * (DIM + 2)
    tl.store(mine[None, :] + d[:, None], acc, mask=mask)
    if HALVES == 2:
        tl.store(mine[None, :] + d[:, None] + DIM // 2, acc_later, mask=mask)
    tl.store(mine + DIM, best, mask=real)
    tl.store(mine + DIM + 1, total, mask=real)
    first = s - (low // span - hidden // span)
    done = counters + seq * tl.num_programs(0) + kv_head
    join(partial, out + token.to(tl.int64) * out_stride, done, first, num_spans, kv_head * GROUP, HEADS, GROUP, DIM, WIDTH)
