"""Attention of one new token per sequence over its paged KV, a program for each of the spans that `spans` cuts and each KV head.

    out[i, h] = sum_j softmax_j(cap(scale * q[i, h] . k[j, h // G]) + slope[h] * (j - p)) v[j, h // G],   p - window < j <= p

where the softmax may have one more term, the head's sink, which has no value.

The G query heads that share a KV head are packed into one tile. Knows pages and lengths; nothing of layers or of prompts.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from trireme.kernels.launch import kernel, next_power
from trireme.kernels.steps import decode_in_bits, in_bits
from trireme.kernels.steps.attention import LOG2E
from trireme.kernels.steps.skinny import depend
from trireme.kernels.steps.spans import COLUMNS, MIN_SPAN, DecodePlan, held, join, make_plan, plan, together

__all__ = ["MIN_SPAN", "DecodePlan", "attend", "make_plan", "plan"]

# Tokens of one tile by head size: two tiles of K and V in flight fit in shared memory three times over.
TILE = {64: 128, 128: 64, 256: 32}


@kernel
def _attend(
    q, k, v, out, page_table, rows, query_starts, contexts, sequence, begin, info, counters, partial, slopes, sinks,
    page_stride, q_stride, out_stride, slot_stride, scale, softcap, window,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """One span of one sequence for the GROUP query heads of one KV head.

    What the step's layout says is read before waiting for the kernel before: an earlier one must have written it.
    """
    # q: [tokens, HEADS, DIM]; k, v: [slots, kv_heads, DIM]; partial: [spans, HEADS, DIM + 2]
    s, kv_head = tl.program_id(1), tl.program_id(0)  # spans that nobody has come last: a short step is over before them
    seq = tl.load(sequence + s)
    if seq < 0:
        depend(PDL)  # who comes after must not overtake who came before
        return
    span, num_spans = tl.load(info), tl.load(info + 1 + seq)
    low, length = tl.load(begin + s), tl.load(contexts + seq)
    token = tl.load(query_starts + seq)
    pages = page_table + tl.load(rows + seq).to(tl.int64) * page_stride
    g, d, n = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    depend(PDL)
    head = kv_head * GROUP + g
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    hidden = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    visible = tl.maximum(low, hidden)
    high = tl.minimum(low + span, length)
    query = tl.load(q + token.to(tl.int64) * q_stride + head[:, None] * DIM + d[None, :], mask=real, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # the sequence's first span takes it in, as a key with this score and no value
        owner = low // span == hidden // span
        best = tl.where(owner, tl.load(sinks + head, mask=g < GROUP, other=0.0) * LOG2E, float("-inf"))
        total = tl.where(owner, 1.0, total)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if SLOPED:
        slope = tl.load(slopes + head, mask=g < GROUP, other=0.0) * LOG2E
    for start in range(visible // TILE * TILE, high, TILE):
        j = start + n
        seen = (j >= visible) & (j < high)
        slot = tl.load(pages + j // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + j % PAGE
        where = slot[:, None] * slot_stride + kv_head * DIM + d[None, :]
        key = tl.load(k + where, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        value = tl.load(v + where, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        score = tl.dot(query, key.T, input_precision="ieee") * scale
        if CAPPED:  # cap * tanh(score / cap), from exponentials
            score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 / softcap) * LOG2E) + 1.0))
        score = score * LOG2E
        if SLOPED:
            score += slope[:, None] * (j - length + 1).to(tl.float32)[None, :]
        score = tl.where(seen[None, :], score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp2(best - peak)
        p = tl.exp2(score - peak[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(query.dtype), value, acc * shrink[:, None], input_precision="ieee")
        best = peak
    target = out + token.to(tl.int64) * out_stride + head[:, None] * DIM + d[None, :]
    if num_spans == 1:
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
        return
    mine = partial + (s * HEADS + head) * (DIM + 2)
    tl.store(mine[:, None] + d[None, :], acc, mask=real)
    tl.store(mine + DIM, best, mask=g < GROUP)
    tl.store(mine + DIM + 1, total, mask=g < GROUP)
    first = s - (low // span - hidden // span)
    into = out + token.to(tl.int64) * out_stride
    join(partial, into, counters, s, first, num_spans, kv_head * GROUP, HEADS, GROUP, DIM, WIDTH, HELD)


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, page_table: Tensor, rows: Tensor, query_starts: Tensor, contexts: Tensor,
    into: DecodePlan, *, page_size: int, scale: float, window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None,
    sinks: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None, tile: int = 0, warps: int = 0, stages: int = 3,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """out[t] for the token t of every sequence in the plan.  q, out: [tokens, heads, dim]; k, v: [slots, kv_heads, dim]

    With `scales`, k and v are kept in fewer bits.
    """
    heads, dim, kv_heads, kind = q.shape[1], q.shape[2], k.shape[1], in_bits.kind_of(k, scales)
    group, fewer, half = heads // kv_heads, k.element_size() == 1, q.element_size() == 2
    width = max(in_bits.width_of(dim, kind), 32) if fewer else max(next_power(dim), 16)
    tile = tile or (16 if not half else decode_in_bits.TILE if fewer else TILE[max(width, 64)])
    warps = warps or (max(width // 128, 1) if fewer and half else 4)
    side, unpacked = 1, {}
    if fewer:
        side, texts = together(heads, kv_heads), in_bits.quick(kind) if half else None
        keys, values = texts or (None, None)
        across = min(warps, width // (32 if kind == "int4" else 16))  # warps that have numbers of a head of their own
        unpacked = {"KIND": kind, "KEYS": keys, "VALUES": values, "WARPS": across, "TOGETHER": side}
    # fmt: off
    (decode_in_bits.attend if fewer else _attend)(
        (kv_heads // side, into.num_spans), q, k, v, out, page_table, rows, query_starts, contexts,
        into.sequence, into.begin, into.info, into.counters, into.partial,
        q if slopes is None else slopes, q if sinks is None else sinks, *(in_bits.words(scales, q) if fewer else ()),
        page_table.stride(0), q.stride(0), out.stride(0), k.stride(0), scale, softcap or 1.0, window,
        PAGE=page_size, GROUP=group, DIM=dim, ROWS=max(next_power(group * side), COLUMNS if fewer else 16), WIDTH=width,
        TILE=tile, HEADS=heads, CAPPED=softcap > 0, SLOPED=slopes is not None, SINKS=sinks is not None, PDL=pdl, dependent=pdl,
        HELD=held(warps), **unpacked, warps=warps, stages=stages,
    )
    # fmt: on
    return out
