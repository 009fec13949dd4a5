"""Attention of one new token per sequence over its paged KV, split so that long and short sequences fill the chip evenly.

    out[i, h] = sum_j softmax_j(cap(scale * q[i, h] . k[j, h // G]) + slope[h] * (j - p)) v[j, h // G],   p - window < j <= p

where the softmax may have one more term, the head's sink, which has no value.

Two kernels. `plan` cuts every sequence into spans of equal length and lists them, once a step, on the device, so that a captured
graph follows the lengths of the moment. `attend` takes a span and a KV head, packs the G query heads that share it into one tile,
and leaves its partial (maximum, sum, weighted values); the last span of a sequence to finish joins the partials.
Knows pages and lengths; nothing of layers or of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel, kernel_of_any, next_power
from trireme.kernels.steps import in_bits
from trireme.kernels.steps.attention import lanes
from trireme.kernels.steps.skinny import depend

LOG2E = tl.constexpr(1.4426950408889634)
JOINED = tl.constexpr(4096)  # values of partials that one program holds: 32 a thread with 4 warps
# Tokens of one tile by head size: two tiles of K and V in flight fit in shared memory three times over.
TILE = {64: 128, 128: 64, 256: 32}
MIN_SPAN = 64  # shorter spans cost more in joining than they win in width
SPANS_PER_MULTIPROCESSOR = 4  # programs a multiprocessor holds at these tile sizes


@dataclass
class DecodePlan:
    """The spans of one step. All on the device, all of fixed size: a graph may be captured around it."""

    target: int  # how many spans of one KV head each fill the chip
    num_spans: int  # how many there can be: the target, and one more for every sequence; the rest are empty
    sequence: Tensor  # [num_spans] int32: whose span it is, -1 for none
    begin: Tensor  # [num_spans] int32: its first position
    info: Tensor  # [1 + sequences] int32: the span length, then how many spans each sequence has
    counters: Tensor  # [sequences, kv_heads] int32: spans done; zero between launches
    partial: Tensor  # [num_spans, heads, head_dim + 2] float32: weighted values, maximum, sum


@kernel_of_any("num_sequences", "num_spans", "target")
def _plan(
    query_starts, contexts, sequence, begin, info, num_sequences, num_spans, target, window,
    LEAST: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Spans of ceil(total / target) tokens, a multiple of LEAST: sequence[s], begin[s] for every span s, in order."""
    i = tl.arange(0, SEQUENCES)
    live = i < num_sequences
    first = tl.load(query_starts + i, mask=live, other=0)
    after = tl.load(query_starts + i + 1, mask=live, other=0)
    length = tl.load(contexts + i, mask=live & (after - first == 1), other=0)
    hidden = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    total = tl.sum(length - hidden)
    span = tl.maximum(tl.cdiv(tl.cdiv(total, target), LEAST), 1) * LEAST
    count = tl.cdiv(length, span) - hidden // span  # spans that hold a visible token
    end = tl.cumsum(count)
    tl.store(info, span)
    tl.store(info + 1 + i, count, mask=live)
    for start in range(0, num_spans, SEQUENCES):  # spans that nobody has
        s = start + i
        tl.store(sequence + s, -1, mask=(s >= tl.sum(count)) & (s < num_spans))
    for j in range(tl.max(count)):
        tl.store(sequence + end - count + j, i, mask=j < count)
        tl.store(begin + end - count + j, (hidden // span + j) * span, mask=j < count)


@kernel
def _attend(
    q, k, v, out, page_table, rows, query_starts, contexts, sequence, begin, info, counters, partial, slopes, sinks,
    k_scales, v_scales, page_stride, q_stride, out_stride, slot_stride, scale, softcap, window,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
    KIND: tl.constexpr, HOW: tl.constexpr,
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
    g, n = tl.arange(0, ROWS), tl.arange(0, TILE)
    d, live = in_bits.columns(DIM, WIDTH, KIND)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    depend(PDL)
    head = kv_head * GROUP + g
    real = (g < GROUP)[:, None] & live[None, :]
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
    if KIND == "fp8":
        scale *= tl.load(k_scales + kv_head)
    if SLOPED:
        slope = tl.load(slopes + head, mask=g < GROUP, other=0.0) * LOG2E
    for start in range(visible // TILE * TILE, high, TILE):
        j = start + n
        seen = (j >= visible) & (j < high)
        slot = tl.load(pages + j // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + j % PAGE
        key = in_bits.load(k, k_scales, slot, seen, kv_head, slot_stride, query, KV_HEADS, DIM, WIDTH, KIND, HOW)
        value = in_bits.load(v, v_scales, slot, seen, kv_head, slot_stride, query, KV_HEADS, DIM, WIDTH, KIND, HOW)
        score = tl.dot(query, key.T, input_precision="ieee") * scale
        if KIND == "int8":
            score *= in_bits.scale_of(k_scales, slot, seen, kv_head, KV_HEADS)[None, :]
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
        if KIND == "int8":
            p *= in_bits.scale_of(v_scales, slot, seen, kv_head, KV_HEADS)[None, :]
        acc = tl.dot(p.to(query.dtype), value, acc * shrink[:, None], input_precision="ieee")
        best = peak
    if KIND == "fp8":
        acc *= tl.load(v_scales + kv_head)
    target = out + token.to(tl.int64) * out_stride + head[:, None] * DIM + d[None, :]
    if num_spans == 1:
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
        return
    mine = partial + (s * HEADS + head) * (DIM + 2)
    tl.store(mine[:, None] + d[None, :], acc, mask=real)
    tl.store(mine + DIM, best, mask=g < GROUP)
    tl.store(mine + DIM + 1, total, mask=g < GROUP)
    tl.debug_barrier()  # every thread's partial is written before the count says so
    done = tl.atomic_add(counters + seq * tl.num_programs(0) + kv_head, 1, sem="acq_rel")
    if done == num_spans - 1:
        tl.store(counters + seq * tl.num_programs(0) + kv_head, 0)
        first = s - (low // span - hidden // span)
        _join(partial, out + token.to(tl.int64) * out_stride, first, num_spans, kv_head * GROUP, HEADS, GROUP, DIM, WIDTH)


@triton.jit
def _join(
    partial, out, first, count, head, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """out[head + g] = the partials of spans [first, first + count) joined, a block of spans at a time."""
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    SPANS: tl.constexpr = max(JOINED // (ROWS * WIDTH), 1)
    g, d, i = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, SPANS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, SPANS):
        there = (start + i < count)[:, None] & (g < GROUP)[None, :]
        cell = partial + ((first + start + i)[:, None] * HEADS + head + g[None, :]) * (DIM + 2)
        # around the first-level cache, which may hold lines from before the other programs wrote
        peak = tl.load(cell + DIM, mask=there, other=float("-inf"), cache_modifier=".cg")
        weight = tl.load(cell + DIM + 1, mask=there, other=0.0, cache_modifier=".cg")
        real = there[:, :, None] & (d < DIM)[None, None, :]
        part = tl.load(cell[:, :, None] + d[None, None, :], mask=real, other=0.0, cache_modifier=".cg")
        top = tl.maximum(best, tl.max(peak, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)  # rows that pad the group
        old, new = tl.exp2(best - safe), tl.exp2(peak - safe[None, :])
        total = total * old + tl.sum(weight * new, 0)
        acc = acc * old[:, None] + tl.sum(part * new[:, :, None], 0)
        best = top
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    tl.store(out + (head + g)[:, None] * DIM + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


def make_plan(num_sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device, target: int = 0) -> DecodePlan:
    """Room for the spans of a step of `num_sequences`; `plan` fills it."""
    target = target or blocks(SPANS_PER_MULTIPROCESSOR * chips.current().multiprocessors, kv_heads)
    num_spans = num_sequences + target
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return DecodePlan(
        target,
        num_spans,
        torch.empty(num_spans, **integers),
        torch.empty(num_spans, **integers),
        torch.empty(1 + num_sequences, **integers),
        torch.zeros((num_sequences, kv_heads), **integers),
        torch.empty((num_spans, heads, head_dim + 2), dtype=torch.float32, device=device),
    )


def plan(into: DecodePlan, query_starts: Tensor, contexts: Tensor, window: int = 0, min_span: int = MIN_SPAN) -> None:
    """Lists the spans of every sequence that has exactly one new token."""
    n = contexts.shape[0]
    # fmt: off
    _plan(
        (1,), query_starts, contexts, into.sequence, into.begin, into.info, n, into.num_spans, into.target, window,
        LEAST=min_span, SEQUENCES=lanes(n), warps=4,
    )
    # fmt: on


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, page_table: Tensor, rows: Tensor, query_starts: Tensor, contexts: Tensor,
    into: DecodePlan, *, page_size: int, scale: float, window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None,
    sinks: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None, tile: int = 0, warps: int = 4, stages: int = 3,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """out[t] for the token t of every sequence in the plan.  q, out: [tokens, heads, dim]; k, v: [slots, kv_heads, dim]

    With `scales`, k and v are kept in fewer bits.
    """
    heads, dim, kv_heads, kind = q.shape[1], q.shape[2], k.shape[1], in_bits.kind_of(k, scales)
    group, width = heads // kv_heads, in_bits.width_of(dim, kind)
    tile = in_bits.tokens_of(tile or (TILE[max(width, 64)] if q.element_size() == 2 else 16), kind, q.dtype)
    # fmt: off
    _attend(
        (kv_heads, into.num_spans), q, k, v, out, page_table, rows, query_starts, contexts,
        into.sequence, into.begin, into.info, into.counters, into.partial,
        q if slopes is None else slopes, q if sinks is None else sinks, *in_bits.words(scales, q),
        page_table.stride(0), q.stride(0), out.stride(0), k.stride(0), scale, softcap or 1.0, window,
        PAGE=page_size, GROUP=group, DIM=dim, ROWS=max(next_power(group), 16), WIDTH=width, TILE=tile, HEADS=heads,
        CAPPED=softcap > 0, SLOPED=slopes is not None, SINKS=sinks is not None, PDL=pdl, dependent=pdl,
        KIND=kind, HOW=in_bits.how(kind, q.dtype), warps=warps, stages=stages,
    )
    # fmt: on
    return out
