"""What happens to queries, keys and values between their projection and attention, in one pass.

    q' = turn(q / rms(q) * q_norm),  k' = turn(k / rms(k) * k_norm)          (the norms only where the model has them)
    turn(x)[i], turn(x)[i + r] = x[i] cos - x[i + r] sin,  x[i + r] cos + x[i] sin      for i < r; the rest of a head stays
    cache[slots[t]] = k'[t], v[t]                                            a slot below 0 is skipped

Knows slots as numbers; nothing of pages, positions or models.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels.launch import blocks, kernel, kernel_of_any, next_power
from trireme.kernels.steps import in_bits
from trireme.kernels.steps.skinny import depend

Scales = tuple[Tensor, Tensor] | None  # of keys and values in fewer bits, as `in_bits` reads them
HEADS_PER_PROGRAM = 16  # 16 heads of 128 are 32 bytes a thread and access pair with 4 warps


@triton.jit
def _turned(source, table, token_index, norm, eps, present, d, live, DIM: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr):
    """The values d of heads, normed and turned; each value meets its partner by a second, cached load."""
    mask = present[:, None] & live[None, :]
    first = d < HALF
    turns = d < 2 * HALF
    partner = tl.where(first, d + HALF, tl.where(turns, d - HALF, d))
    x = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        # rounded as the plain norm rounds its result, so that both give the same cache
        x = (x * factor * tl.load(norm + d, mask=live, other=0.0).to(tl.float32)[None, :]).to(source.dtype.element_ty)
        y = (y * factor * tl.load(norm + partner, mask=live, other=0.0).to(tl.float32)[None, :]).to(source.dtype.element_ty)
        x, y = x.to(tl.float32), y.to(tl.float32)
    angle = tl.where(first, d, d - HALF)
    cos = tl.load(table + token_index * 2 * HALF + angle, mask=turns, other=1.0)
    sin = tl.load(table + token_index * 2 * HALF + HALF + angle, mask=turns, other=0.0)
    return x * cos[None, :] + tl.where(first, -1.0, 1.0)[None, :] * y * sin[None, :]


@triton.jit
def kept(x, cache):
    """x as the cache keeps it; floats of eight bits end at 448, as in the plain body."""
    if cache.dtype.element_ty.primitive_bitwidth == 8:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.dtype.element_ty)


@kernel
def _prepare(
    q, k, v, out, cache_k, cache_v, k_scales, v_scales, k_given, v_given, table, index, slots, q_norm, k_norm,
    q_stride, k_stride, v_stride, out_stride, slot_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr, KIND: tl.constexpr, KEPT_WIDTH: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """One token's block of heads: query blocks first, then key and value blocks.

    Positions and slots are read before waiting for the kernel before: an earlier one must have written them.
    """
    # q: [tokens, HEADS, DIM]; k, v: [tokens, KV_HEADS, DIM]; cache: [slots, KV_HEADS, DIM]; table: [positions, 2 HALF]
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(index + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    depend(PDL)
    query_blocks: tl.constexpr = (HEADS + BLOCK - 1) // BLOCK
    if block < query_blocks:
        head, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        source = q + token * q_stride + head * DIM
        turned = _turned(source, table, position, q_norm, eps, head < HEADS, d, d < DIM, DIM, HALF, NORMED)
        target = out + token * out_stride + head[:, None] * DIM + d[None, :]
        tl.store(target, turned.to(out.dtype.element_ty), mask=(head < HEADS)[:, None] & (d < DIM)[None, :])
    else:
        if slot < 0:
            return
        head = (block - query_blocks) * BLOCK + tl.arange(0, BLOCK)
        kept_d, live = in_bits.columns(DIM, KEPT_WIDTH, KIND)
        mask = (head < KV_HEADS)[:, None] & live[None, :]
        cell = head[:, None] * DIM + kept_d[None, :]
        source = k + token * k_stride + head * DIM
        key = _turned(source, table, position, k_norm, eps, head < KV_HEADS, kept_d, live, DIM, HALF, NORMED)
        value = tl.load(v + token * v_stride + cell, mask=mask)
        if KIND == "plain":
            tl.store(cache_k + slot * slot_stride + cell, kept(key, cache_k), mask=mask)
            tl.store(cache_v + slot * slot_stride + cell, kept(value, cache_v), mask=mask)
        else:  # rounded as the plain body rounds it, so that both give the same cache
            key = key.to(k.dtype.element_ty)
            in_bits.store(key, cache_k, k_scales, k_given, slot, head, slot_stride, KV_HEADS, DIM, KEPT_WIDTH, KIND, GIVEN)
            in_bits.store(value, cache_v, v_scales, v_given, slot, head, slot_stride, KV_HEADS, DIM, KEPT_WIDTH, KIND, GIVEN)


@kernel
def _store(k, v, cache_k, cache_v, slots, k_stride, v_stride, slot_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """cache[slots[t]] = k[t], v[t]"""  # k, v: [tokens, SIZE]; cache: [slots, SIZE]
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    mask = d < SIZE
    tl.store(cache_k + slot * slot_stride + d, kept(tl.load(k + token * k_stride + d, mask=mask), cache_k), mask=mask)
    tl.store(cache_v + slot * slot_stride + d, kept(tl.load(v + token * v_stride + d, mask=mask), cache_v), mask=mask)


@kernel
def _keep(
    k, v, cache_k, cache_v, k_scales, v_scales, k_given, v_given, slots, k_stride, v_stride, slot_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """As _store, in fewer bits."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    d, live = in_bits.columns(DIM, WIDTH, KIND)
    cell, mask = head[:, None] * DIM + d[None, :], (head < HEADS)[:, None] & live[None, :]
    key = tl.load(k + token * k_stride + cell, mask=mask)
    in_bits.store(key, cache_k, k_scales, k_given, slot, head, slot_stride, HEADS, DIM, WIDTH, KIND, GIVEN)
    value = tl.load(v + token * v_stride + cell, mask=mask)
    in_bits.store(value, cache_v, v_scales, v_given, slot, head, slot_stride, HEADS, DIM, WIDTH, KIND, GIVEN)


@kernel_of_any("count")
def _inputs(
    tokens, pages, rows, positions, ids, slots, width, pages_per_row, count,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ids[t], slots[t] = what stands at token t's position of its row, and the slot of that position"""
    depend(PDL)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = t < count
    row, position = tl.load(rows + t, mask=live, other=0).to(tl.int64), tl.load(positions + t, mask=live, other=0)
    tl.store(ids + t, tl.load(tokens + row * width + position, mask=live), mask=live)
    page = tl.load(pages + row * pages_per_row + position // PAGE, mask=live, other=0)
    tl.store(slots + t, page * PAGE + position % PAGE, mask=live)


@kernel_of_any("count")
def _append(tokens, rows, positions, ids, width, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """tokens[rows[i], positions[i]] = max(ids[i], 0)"""
    depend(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < count
    row, position = tl.load(rows + i, mask=live, other=0).to(tl.int64), tl.load(positions + i, mask=live, other=0)
    token = tl.load(ids + i, mask=live, other=0)
    tl.store(tokens + row * width + position, tl.maximum(token, 0).to(tl.int32), mask=live)


def inputs(
    tokens: Tensor, pages: Tensor, rows: Tensor, positions: Tensor, page_size: int, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """(ids, slots) of a step's tokens.  tokens: [all rows, width]; pages: [all rows, pages]; rows, positions: [count]; all int32"""
    count = rows.shape[0]
    ids, slots = torch.empty_like(rows), torch.empty_like(rows)
    _inputs(
        (blocks(count, 256),), tokens, pages, rows, positions, ids, slots, tokens.stride(0), pages.stride(0), count,
        PAGE=page_size, BLOCK=256, PDL=pdl, dependent=pdl,
    )  # fmt: skip
    return ids, slots


def append(tokens: Tensor, rows: Tensor, positions: Tensor, ids: Tensor, pdl: bool = False) -> None:
    """Writes sampled ids into the table, 0 for those below 0."""
    count = rows.shape[0]
    _append((blocks(count, 256),), tokens, rows, positions, ids, tokens.stride(0), count, BLOCK=256, PDL=pdl, dependent=pdl)


def store(
    k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, slots: Tensor, scales: Scales = None, given: Scales = None
) -> None:
    """Puts new keys and values into their slots.  k, v: [tokens, kv_heads, dim], heads side by side; given: [kv_heads] scales that
    int8 takes instead of its own
    """
    (count, heads, dim), kind = k.shape, in_bits.kind_of(cache_k, scales)
    strides = k.stride(0), v.stride(0), cache_k.stride(0)
    if kind == "plain":
        _store((count,), k, v, cache_k, cache_v, slots, *strides, SIZE=heads * dim, BLOCK=next_power(heads * dim))
        return
    block = min(HEADS_PER_PROGRAM, next_power(heads))
    _keep(
        (count, blocks(heads, block)), k, v, cache_k, cache_v, *in_bits.words(scales, k), *(given or (k, k)), slots, *strides,
        HEADS=heads, DIM=dim, WIDTH=in_bits.width_of(dim, kind), BLOCK=block, KIND=kind, GIVEN=given is not None,
    )  # fmt: skip


def rope_store(
    q: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, cache_v: Tensor, table: Tensor, index: Tensor, slots: Tensor,
    *, scales: Scales = None, given: Scales = None, norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Norms and turns q and k, stores k and v, returns the new q.  q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim]

    Rows may be slices of one projection; a row's heads lie side by side. Scales are as in `store`.
    """
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    block, kind = min(HEADS_PER_PROGRAM, next_power(heads)), in_bits.kind_of(cache_k, scales)
    kept_width = next_power(dim) if kind == "plain" else in_bits.width_of(dim, kind)
    _prepare(
        (tokens, blocks(heads, block) + blocks(k.shape[1], block)), q, k, v, out, cache_k, cache_v,
        *in_bits.words(scales, k), *(given or (k, k)), table, index, slots, *(norms or (q, q)),
        q.stride(0), k.stride(0), v.stride(0), out.stride(0), cache_k.stride(0), eps,
        HEADS=heads, KV_HEADS=k.shape[1], DIM=dim, HALF=table.shape[1] // 2, WIDTH=next_power(dim), BLOCK=block,
        NORMED=norms is not None, PDL=pdl, KIND=kind, KEPT_WIDTH=kept_width, GIVEN=given is not None, dependent=pdl,
    )  # fmt: skip
    return out
