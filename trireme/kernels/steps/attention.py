"""Attention of many new tokens per sequence: prompts, chunks of prompts behind a cached prefix, drafts to be checked; all ragged.

    out[i, h] = sum_j softmax_j(cap(scale * q[i, h] . k[j, h // G]) + slope[h] * (j - p)) v[j, h // G],   p - window < j <= p

where the softmax may have one more term, the head's sink, which has no value.

A tile is a run of rows (token, query head) of one sequence and one KV head, tokens outer, the G heads that share the KV head inner:
heads of a group use the same keys, and few tokens still fill a tile. Tiles are listed on the host, the longest first.
Keys and values are read through the page table, or from a dense copy by bulk tensor copies. Knows nothing of layers or decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel, kernel_of_any, next_power
from trireme.kernels.steps import in_bits

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Shape:
    """How a tile is computed: rows of queries, tokens of keys, warps, stages in flight."""

    rows: int
    tokens: int
    warps: int
    stages: int


# Measured on an H200 (bench llm_kernels): two small programs a multiprocessor overlap one's softmax with the other's products; long
# contexts and heads of 128 would rather have large tiles.
LARGE = {64: Shape(64, 64, 4, 3), 128: Shape(64, 64, 4, 3), 256: Shape(128, 64, 8, 2)}
LONG = {64: Shape(64, 64, 4, 3), 128: Shape(128, 128, 8, 3), 256: Shape(128, 64, 8, 2)}
SMALL = {64: Shape(16, 64, 4, 3), 128: Shape(16, 64, 4, 3), 256: Shape(16, 32, 4, 2)}  # drafts: a few tokens a sequence
# Chips on which a program has less shared memory than this: NVIDIA's for desks, AMD's.
ROOMY, SLENDER = 1 << 17, {64: Shape(64, 64, 4, 2), 128: Shape(64, 32, 4, 2), 256: Shape(32, 32, 4, 1)}
WIDE = Shape(16, 32, 4, 1)  # float32, for checks: no tensor cores, and twice the memory
LONG_CONTEXT = 4096
LEAST_DENSE = 2048  # keys in all from which copying them together pays


@dataclass
class PromptPlan:
    """The tiles of one step and, where keys are copied together first, where each sequence's begin."""

    shape: Shape
    tiles: Tensor  # [tiles, 2] int32: sequence, tile of it
    kv_starts: Tensor  # [seqs + 1] int32: running sum of the context lengths, 0 for sequences that are not ours
    kv_total: int
    longest: int  # keys of the longest sequence
    dense: bool  # whether to copy the keys together first


@triton.jit
def _steps(
    query, best, total, acc, k, v, k_scales, v_scales, pages, base, kv_head, begin, end, position, length, slope, scale, softcap,
    window, slot_stride, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, DENSE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
    KV_HEADS: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Takes the keys of [begin, end) into the running softmax."""
    d, n = tl.arange(0, WIDTH), tl.arange(0, TOKENS)
    lowest = tl.min(position, 0) - window  # what lies there or before is seen by no row, and may be another sequence's by now
    for start in range(begin, end, TOKENS):
        j = start + n
        if DENSE:
            key = k.load([base + start, kv_head * DIM])
            value = v.load([base + start, kv_head * DIM])
        elif KIND == "int8" or KIND == "int4":
            held = (j < length) & (j > lowest) if WINDOWED else j < length
            slot = tl.load(pages + j // PAGE, mask=j < length, other=0).to(tl.int64) * PAGE + j % PAGE
            key = in_bits.load(k, k_scales, slot, held, kv_head, slot_stride, query, KV_HEADS, DIM, WIDTH, KIND, HOW)
            value = in_bits.load(v, v_scales, slot, held, kv_head, slot_stride, query, KV_HEADS, DIM, WIDTH, KIND, HOW)
        else:
            if MASKED:
                slot = tl.load(pages + j // PAGE, mask=j < length, other=0).to(tl.int64) * PAGE + j % PAGE
            else:
                slot = tl.load(pages + j // PAGE).to(tl.int64) * PAGE + j % PAGE
            where = slot[:, None] * slot_stride + kv_head * DIM + d[None, :]
            if DIM != WIDTH:
                key = tl.load(k + where, mask=(d < DIM)[None, :], other=0.0)
                value = tl.load(v + where, mask=(d < DIM)[None, :], other=0.0)
            else:
                key = tl.load(k + where)
                value = tl.load(v + where)
        if MASKED and (DENSE or KIND == "plain" or KIND == "fp8"):  # a weight of 0 would let through what is not finite
            held = (j < length) & (j > lowest) if WINDOWED else j < length
            value = tl.where(held[:, None], value, 0.0)
        score = tl.dot(query, key.to(query.dtype).T, input_precision="ieee")
        if KIND == "int8":
            score *= in_bits.scale_of(k_scales, slot, held, kv_head, KV_HEADS)[None, :]
        if CAPPED:  # cap * tanh(score / cap), from exponentials
            score = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(score * (scale * 2.0 * LOG2E / softcap)) + 1.0))
        else:
            score = score * (scale * LOG2E)
        if SLOPED:
            score += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
        if MASKED:
            seen = j[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (j[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        if WINDOWED:  # a row may see nothing of this tile, and nothing of any before it
            safe = tl.where(peak == float("-inf"), 0.0, peak)
        else:
            safe = peak
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if KIND == "int8":
            p *= in_bits.scale_of(v_scales, slot, held, kv_head, KV_HEADS)[None, :]
        acc = tl.dot(p.to(query.dtype), value.to(query.dtype), acc, input_precision="ieee")
        best = peak
    return best, total, acc


@kernel
def _attend(
    q, k, v, out, tiles, page_table, rows, query_starts, contexts, kv_starts, slopes, sinks, k_scales, v_scales,
    page_stride, q_stride, out_stride, slot_stride, scale, softcap, window,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    DENSE: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """One tile: ROWS rows of (token, head of the group) over every key they may see."""
    # q: [tokens, heads, DIM]; k, v: [slots, kv_heads, DIM], or descriptors of [tokens, kv_heads * DIM] where DENSE
    kv_head, t = tl.program_id(0), tl.program_id(1)
    seq, tile = tl.load(tiles + 2 * t), tl.load(tiles + 2 * t + 1)
    if seq < 0:
        return
    first = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - first
    length, base = tl.load(contexts + seq), tl.load(kv_starts + seq)
    pages = page_table + tl.load(rows + seq).to(tl.int64) * page_stride
    r = tile * ROWS + tl.arange(0, ROWS)
    d, live = in_bits.columns(DIM, WIDTH, KIND)
    inside = r < count * GROUP
    token, head = r // GROUP, kv_head * GROUP + r % GROUP
    position = length - count + token
    cell = (first + token).to(tl.int64)
    mask = inside[:, None] & live[None, :]
    if KIND == "fp8":
        scale *= tl.load(k_scales + kv_head)
    query = tl.load(q + cell[:, None] * q_stride + head[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if SLOPED:
        slope = tl.load(slopes + head, mask=inside, other=0.0) * LOG2E
    lowest = length - count + tile * ROWS // GROUP
    end = tl.minimum(length, length - count + ((tile + 1) * ROWS - 1) // GROUP + 1)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # as if a key with this score and no value had been taken in
        best = tl.load(sinks + head, mask=inside, other=0.0) * LOG2E
        total += 1.0
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    whole = 0
    if WINDOWED:
        whole = tl.maximum(lowest - window + 1, 0) // TOKENS * TOKENS
    else:  # keys that every row of the tile sees need no mask
        whole = (lowest + 1) // TOKENS * TOKENS
        best, total, acc = _steps(
            query, best, total, acc, k, v, k_scales, v_scales, pages, base, kv_head, 0, whole, position, length, slope, scale,
            softcap, window, slot_stride, PAGE, DIM, WIDTH, TOKENS, DENSE, False, WINDOWED, CAPPED, SLOPED, KV_HEADS, KIND, HOW,
        )  # fmt: skip
    best, total, acc = _steps(
        query, best, total, acc, k, v, k_scales, v_scales, pages, base, kv_head, whole, end, position, length, slope, scale,
        softcap, window, slot_stride, PAGE, DIM, WIDTH, TOKENS, DENSE, True, WINDOWED, CAPPED, SLOPED, KV_HEADS, KIND, HOW,
    )  # fmt: skip
    if KIND == "fp8":
        acc *= tl.load(v_scales + kv_head)
    target = out + cell[:, None] * out_stride + head[:, None] * DIM + d[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@kernel_of_any("num_sequences", "num_tiles")
def _plan(
    query_starts, tiles, num_sequences, num_tiles,
    LEAST: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """tiles[t] = (sequence, tile of it) of every sequence with at least LEAST new tokens, in order; -1 for tiles nobody has"""
    i = tl.arange(0, SEQUENCES)
    first = tl.load(query_starts + i, mask=i < num_sequences, other=0)
    after = tl.load(query_starts + i + 1, mask=i < num_sequences, other=0)
    count = tl.where(after - first >= LEAST, tl.cdiv((after - first) * GROUP, ROWS), 0)
    begin = tl.cumsum(count) - count
    for start in range(0, num_tiles, SEQUENCES):
        t = start + i
        tl.store(tiles + 2 * t, -1, mask=(t >= tl.sum(count)) & (t < num_tiles))
    for j in range(tl.max(count)):
        tl.store(tiles + 2 * (begin + j), i, mask=j < count)
        tl.store(tiles + 2 * (begin + j) + 1, j, mask=j < count)


@kernel
def _collect(
    k, v, dense_k, dense_v, page_table, rows, kv_starts, page_stride, slot_stride, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dense[kv_starts[i] + j] = cache[slot of position j of sequence i]"""  # cache: [slots, WIDTH]
    seq, block, part = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    base = tl.load(kv_starts + seq)
    length = tl.load(kv_starts + seq + 1) - base
    if block * TOKENS >= length:
        return
    j, d = block * TOKENS + tl.arange(0, TOKENS), part * BLOCK + tl.arange(0, BLOCK)
    pages = page_table + tl.load(rows + seq).to(tl.int64) * page_stride
    slot = tl.load(pages + j // PAGE, mask=j < length, other=0).to(tl.int64) * PAGE + j % PAGE
    mask = (j < length)[:, None] & (d < WIDTH)[None, :]
    source = slot[:, None] * slot_stride + d[None, :]
    target = (base + j).to(tl.int64)[:, None] * WIDTH + d[None, :]
    tl.store(dense_k + target, tl.load(k + source, mask=mask), mask=mask)
    tl.store(dense_v + target, tl.load(v + source, mask=mask), mask=mask)


def make_plan(
    starts: np.ndarray,
    counts: np.ndarray,
    group: int,
    head_dim: int,
    device: torch.device,
    least: int = 2,
    shape: Shape | None = None,
) -> PromptPlan:
    """The tiles of every sequence with at least `least` new tokens, those with the most keys first."""
    ours = counts >= least
    lengths = np.where(ours, starts + counts, 0)
    longest, total = int(lengths.max(initial=0)), int(lengths.sum())
    few = int(counts[ours].max(initial=0)) * group <= 64
    shape = shape or _shape(head_dim, few, longest)
    each = np.where(ours, -(-counts * group // shape.rows), 0)
    sequence = np.repeat(np.arange(len(counts)), each)
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(each) - each, each)
    keys = starts[sequence] + np.minimum((tile + 1) * shape.rows // group, counts[sequence])
    order = np.argsort(-keys, kind="stable")
    kv_starts = np.concatenate([[0], np.cumsum(lengths)])
    tiles = np.stack([sequence, tile], 1)[order].ravel()
    even = blocks(len(tiles), 4) * 4  # memory that is aligned now and then is another compiled form of a kernel
    listed = np.zeros(even + len(kv_starts), np.int32)
    listed[: len(tiles)], listed[even:] = tiles, kv_starts
    moved = torch.from_numpy(listed).to(device, non_blocking=True)
    dense = not few and total >= LEAST_DENSE and head_dim in (64, 128, 256) and chips.current().descriptors
    return PromptPlan(shape, moved[: len(tiles)].view(-1, 2), moved[even:], total, longest, dense)


def _shape(head_dim: int, few: bool = False, longest: int = 0) -> Shape:
    """The best tile of those measured that the chip has room for."""
    roomy = chips.current().shared_memory >= ROOMY
    table = SMALL if few else SLENDER if not roomy else LONG if longest >= LONG_CONTEXT else LARGE
    return table[max(next_power(head_dim), 64)]


def lanes(sequences: int) -> int:
    """How many sequences a plan is worked out for at a time. Two widths serve all: another would be compiled when first met,
    in the midst of a step."""
    return 32 if sequences <= 32 else max(512, next_power(sequences))


def plan_on_device(
    query_starts: Tensor, num_tokens: int, group: int, head_dim: int, least: int = 2, shape: Shape | None = None
) -> PromptPlan:
    """As make_plan, worked out on the device for any division of `num_tokens` among the sequences: fit for capture."""
    shape = shape or _shape(head_dim)
    sequences = query_starts.shape[0] - 1
    most = blocks(num_tokens * group, shape.rows) + min(sequences, num_tokens // least)
    tiles = torch.empty((most, 2), dtype=torch.int32, device=query_starts.device)
    _plan(
        (1,), query_starts, tiles, sequences, most, LEAST=least, GROUP=group, ROWS=shape.rows,
        SEQUENCES=lanes(sequences),
    )  # fmt: skip
    return PromptPlan(shape, tiles, query_starts, 0, 0, False)


def collect(k: Tensor, v: Tensor, page_table: Tensor, rows: Tensor, plan: PromptPlan, page_size: int) -> tuple[Tensor, Tensor]:
    """The plan's keys and values, one sequence after the other.  k, v: [slots, kv_heads, dim] -> [kv_total, kv_heads, dim]

    `in_bits.unpack` is for those of int8 and int4.
    """
    kv_heads, dim = k.shape[1:]
    dense = torch.empty((2, plan.kv_total, kv_heads, dim), dtype=k.dtype, device=k.device)
    width = kv_heads * dim
    block = min(next_power(width), 1024)
    _collect(
        (blocks(plan.longest, 8), rows.shape[0], blocks(width, block)), k, v, dense[0], dense[1], page_table, rows, plan.kv_starts,
        page_table.stride(0), k.stride(0), PAGE=page_size, TOKENS=8, WIDTH=width, BLOCK=block,
    )  # fmt: skip
    return dense[0], dense[1]


def attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, page_table: Tensor, rows: Tensor, query_starts: Tensor, contexts: Tensor,
    plan: PromptPlan, *, page_size: int, scale: float, window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None,
    sinks: Tensor | None = None, scales: tuple[Tensor, Tensor] | None = None, dense: bool = False,
) -> Tensor:  # fmt: skip
    """out[t] for every token t of the plan's sequences.  q, out: [tokens, heads, dim]; k, v: [slots, kv_heads, dim]

    With `dense`, k and v are what `collect` returned. With `scales`, they are in fewer bits.
    """
    heads, dim, kv_heads, kind = q.shape[1], q.shape[2], k.shape[1], in_bits.kind_of(k, scales)
    shape, slot_stride = plan.shape, k.stride(0)
    keys, values = (_descriptor(x, shape.tokens) if dense else x for x in (k, v))
    # fmt: off
    _attend(
        (kv_heads, plan.tiles.shape[0]), q, keys, values, out, plan.tiles, page_table, rows, query_starts, contexts, plan.kv_starts,
        q if slopes is None else slopes, q if sinks is None else sinks, *in_bits.words(scales, q),
        page_table.stride(0), q.stride(0), out.stride(0), slot_stride, scale, softcap or 1.0, window,
        PAGE=page_size, GROUP=heads // kv_heads, DIM=dim, WIDTH=in_bits.width_of(dim, kind), ROWS=shape.rows,
        TOKENS=in_bits.tokens_of(shape.tokens, kind, q.dtype), DENSE=dense, WINDOWED=window > 0,
        CAPPED=softcap > 0, SLOPED=slopes is not None, SINKS=sinks is not None,
        KV_HEADS=kv_heads, KIND=kind, HOW=in_bits.how(kind, q.dtype), warps=shape.warps, stages=shape.stages,
    )
    # fmt: on
    return out


def _descriptor(x: Tensor, tokens: int) -> TensorDescriptor:
    flat = x.flatten(1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [tokens, x.shape[2]])
