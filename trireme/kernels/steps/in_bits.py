"""Keys and values in fewer bits, inside kernels: how a tile of them is read as numbers, and how new ones are kept.

    int8   x = q * scale         a scale in float32 for each slot and head; its own, or the one given for all slots of a head
    int4   x = q * scale + low   two a byte, number i and i + DIM / 2; a word of two float16, scale and low, for each 32 numbers
    fp8    x = q * factor        a factor for each head, or 1

In a tile of int4 column c stands for number c % H + c // H * DIM / 2 of a head, where H is half of the tile's width: so the two
numbers of a byte stay in one thread. `columns` says so to whoever reads queries and writes results. Knows slots; nothing of layers.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel, next_power

GROUP = tl.constexpr(32)  # numbers with one scale of int4
# The least columns and tokens of a tile of int4: up to 3.6 Triton sums wrongly over fewer than 64 numbers of 16 bits that come
# from bytes by tl.join (its pull request 11691)
LEAST_INT4 = 64
HALFWAY = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number, ties to even
# A byte that is put behind one of these is added to 128 or 1024, or with the second taken from it, as a number of 16 bits
_OVER = {torch.bfloat16: ("0x43434343", "0xC3C3C3C3"), torch.float16: ("0x64646464", "0xE4E4E4E4")}
_ONE = {torch.bfloat16: "0x3F803F80", torch.float16: "0x3C003C00"}
_PLACES = ("0x4140", "0x4342")  # the first two and the last two of four bytes, each before a byte of the other number
_MIDDLE = {torch.bfloat16: "0xC308C308", torch.float16: "0xE408E408"}  # -(128 + 8), -(1024 + 8)


def kind_of(kept: Tensor, scales: tuple[Tensor, Tensor] | None) -> str:
    """How a kernel reads a cache, told by the type of its numbers; "plain" also where fp8 has no factors."""
    kinds = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}
    return "plain" if scales is None else kinds[kept.dtype]


def width_of(dim: int, kind: str) -> int:
    """The columns of a tile."""
    return max(2 * next_power(dim // 2), LEAST_INT4) if kind == "int4" else max(next_power(dim), 16)


def tokens_of(tokens: int, kind: str, dtype: torch.dtype) -> int:
    """The tokens of a tile, of `tokens` wanted."""
    return max(tokens, LEAST_INT4) if kind == "int4" and dtype in _OVER else tokens


def words(scales: tuple[Tensor, Tensor] | None, instead: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of keys and values as kernels read them: those of int4 as words of two; `instead` where there are none."""
    if scales is None:
        return instead, instead
    k, v = (x.view(torch.int32) if x.dtype == torch.float16 else x for x in scales)
    return k, v


@functools.cache
def how(kind: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """The instructions that make four bytes numbers of 16 bits, of int4 for the low and for the high numbers; None if the compiler
    shall find its own.

    $0, $1: two numbers each; $2: four bytes; of int4 $3, $4: the scales, $5, $6: what a code of 8 stands for
    """
    if dtype not in _OVER or not chips.current().ptx:
        return None
    if kind in ("fp8", "plain"):
        text = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
        return (text, "") if dtype == torch.float16 else None
    name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    over, under = _OVER[dtype]
    if kind == "int8" and dtype == torch.float16:  # 1024 + 128 more, less that
        text = "{ .reg .b32 a, b, c; xor.b32 a, $2, 0x80808080; mov.b32 c, 0xE480E480;"
        for i, places in enumerate(_PLACES):
            text += f" prmt.b32 b, a, {over}, {places}; add.rn.f16x2 ${i}, b, c;"
        return text + " }", ""
    if kind == "int8":  # the seven low bits, less the highest
        text = "{ .reg .b32 a, b, c, d, e; and.b32 a, $2, 0x7F7F7F7F; and.b32 b, $2, 0x80808080;"
        text += f" mov.b32 e, {_ONE[dtype]};"
        for i, places in enumerate(_PLACES):
            text += f" prmt.b32 c, a, {over}, {places}; prmt.b32 d, b, {under}, {places}; fma.rn.{name} ${i}, c, e, d;"
        return text + " }", ""
    texts = []
    for shift in ("mov.b32 a, $2;", "shr.u32 a, $2, 4;"):
        text = f"{{ .reg .b32 a, b, c, d; {shift} and.b32 a, a, 0x0F0F0F0F; mov.b32 c, {_ONE[dtype]}; mov.b32 d, {_MIDDLE[dtype]};"
        for i, places in enumerate(_PLACES):
            text += f" prmt.b32 b, a, {over}, {places}; fma.rn.{name} b, b, c, d; fma.rn.{name} ${i}, b, ${3 + i}, ${5 + i};"
        texts.append(text + " }")
    return texts[0], texts[1]


ABOVE = tl.constexpr(1152.0)  # by how much keys of int8 come out too large
SHRUNK = tl.constexpr(16.0)  # how much too small numbers of int4 come out


@functools.cache
def quick(kind: str) -> tuple[tuple[str, str], tuple[str, str]] | None:
    """As `how` for float16, for keys and for values that are multiplied at once: what is left undone is done to the products.

    int8   keys come out larger by ABOVE
    int4   numbers come out SHRUNK times too small: (1 + code / 64) * 4 scale + (low / 16 - 4 scale)
    """
    texts = how(kind, torch.float16)
    if texts is None or kind in ("fp8", "plain"):
        return texts and (texts, texts)
    if kind == "int8":
        text = "{ .reg .b32 a; xor.b32 a, $2, 0x80808080;"
        return (text + "".join(f" prmt.b32 ${i}, a, 0x64646464, {places};" for i, places in enumerate(_PLACES)) + " }", ""), texts
    made = []
    for shift in ("shl.b32 a, $2, 4;", "mov.b32 a, $2;"):
        text = f"{{ .reg .b32 a, b; {shift} and.b32 a, a, 0xF0F0F0F0;"
        for i, places in enumerate(_PLACES):
            text += f" prmt.b32 b, a, 0x3C3C3C3C, {places}; fma.rn.f16x2 ${i}, b, ${3 + i}, ${5 + i};"
        made.append(text + " }")
    both = made[0], made[1]
    return both, both


@triton.jit
def columns(DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """Which number of a head each column of a tile stands for, and whether it is one."""
    c = tl.arange(0, WIDTH)
    if KIND == "int4":
        i = c % (WIDTH // 2)
        return i + c // (WIDTH // 2) * (DIM // 2), i < DIM // 2
    else:
        return c, c < DIM


@triton.constexpr_function
def _run(dim):
    """How many numbers that follow each other surely have one scale, in both halves of a head."""
    return math.gcd(dim // 2, 32)


@triton.jit
def _int4(codes, word, like, HIGH: tl.constexpr, HOW: tl.constexpr, QUICK: tl.constexpr):
    """The low or high numbers of a tile of bytes [tokens, runs, numbers], whose words are `word` [tokens, runs]."""
    scale = word.to(tl.int16).to(tl.float16, bitcast=True)
    low = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    if QUICK and HOW is not None:
        scale = scale * 4.0
        middle = low * (1.0 / SHRUNK) - scale
    else:
        scale, low = scale.to(tl.float32), low.to(tl.float32)
        middle = low + 8.0 * scale
    if HOW is None:
        number = ((codes >> 4) if HIGH else (codes & 15)).to(tl.float32) - 8.0
        return (number * scale[:, :, None] + middle[:, :, None]).to(like.dtype)
    else:
        scale = tl.broadcast_to(scale.to(like.dtype)[:, :, None], codes.shape)
        middle = tl.broadcast_to(middle.to(like.dtype)[:, :, None], codes.shape)
        return tl.inline_asm_elementwise(
            HOW[1 if HIGH else 0], "=r,=r,r,r,r,r,r", [codes, scale, middle], dtype=like.dtype, is_pure=True, pack=4
        )


@triton.jit
def load_parts(
    kept, scales, slot, seen, head, slot_stride, like,
    HEADS: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
    QUICK: tl.constexpr = False,
):  # fmt: skip
    """A head's numbers of these slots, or of each slot those of its own head, in tiles [tokens, PART], zeros where nothing is seen:
    of int4 a head's first half and its second, else all of it, twice. Those of int8 are still to be scaled. Their type is that of
    `like`.

    QUICK: whether HOW is of `quick`
    """
    if KIND != "int4":
        d = tl.arange(0, PART)
        cell = kept + (slot * slot_stride + head * DIM)[:, None] + d[None, :]
        found = tl.load(cell, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        if HOW is None:
            found = found.to(like.dtype)
        else:
            found = tl.inline_asm_elementwise(HOW[0], "=r,=r,r", [found], dtype=like.dtype, is_pure=True, pack=4)
        return found, found
    else:
        RUN: tl.constexpr = _run(DIM)
        GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
        r, i = tl.arange(0, PART // RUN), tl.arange(0, RUN)
        inside = r[:, None] * RUN + i[None, :]
        cell = kept + (slot * slot_stride + head * (DIM // 2))[:, None, None] + inside[None, :, :]
        codes = tl.load(cell, mask=seen[:, None, None] & (inside < DIM // 2)[None, :, :], other=0)
        row = scales + (slot * HEADS + head)[:, None] * GROUPS
        if RUN == GROUP and PART * 2 == DIM:  # a slot's words in one piece: those of the first half, then the others
            both = tl.load(row + tl.arange(0, GROUPS)[None, :], mask=seen[:, None], other=0)
            both = tl.permute(tl.reshape(both, (slot.shape[0], 2, GROUPS // 2)), (0, 2, 1))
            first, second = tl.split(both)
        else:
            there = seen[:, None] & (r * RUN < DIM // 2)[None, :]
            first = tl.load(row + (r * RUN // GROUP)[None, :], mask=there, other=0)
            second = tl.load(row + ((r * RUN + DIM // 2) // GROUP)[None, :], mask=there, other=0)
        low, high = _int4(codes, first, like, False, HOW, QUICK), _int4(codes, second, like, True, HOW, QUICK)
        return tl.reshape(low, (slot.shape[0], PART)), tl.reshape(high, (slot.shape[0], PART))


@triton.jit
def mixed(PART: tl.constexpr):
    """Which number each column of a mixed tile stands for: a thread of a product takes four columns of every sixteen, and all that
    it takes are numbers that follow each other in memory."""
    c = tl.arange(0, PART)
    return c // 4 % 4 * (PART // 4) + c // 16 * 4 + c % 4


@triton.jit
def mix(x):
    """x: [tokens, numbers], with its columns as `mixed` says."""
    PART: tl.constexpr = x.shape[1]
    apart = tl.permute(tl.reshape(x, (x.shape[0], 4, PART // 16, 4)), (0, 2, 1, 3))
    return tl.reshape(apart, (x.shape[0], PART))


@triton.jit
def turned(PART: tl.constexpr, WARPS: tl.constexpr):
    """Which number each row of a turned tile stands for: a thread of a product takes rows that are 8 and 16 * WARPS apart, and all
    that it takes are numbers that follow each other in memory."""
    r = tl.arange(0, PART)
    FAR: tl.constexpr = PART // (16 * WARPS)
    return ((r // 16 % WARPS * 8 + r % 8) * FAR + r // (16 * WARPS)) * 2 + r // 8 % 2


@triton.jit
def turn(x, WARPS: tl.constexpr):
    """x: [tokens, numbers], as [numbers, tokens], its rows as `turned` says."""
    PART: tl.constexpr = x.shape[1]
    apart = tl.permute(tl.reshape(x, (x.shape[0], WARPS, 8, PART // (16 * WARPS), 2)), (3, 1, 4, 2, 0))
    return tl.reshape(apart, (PART, x.shape[0]))


@triton.jit
def load(
    kept, scales, slot, seen, head, slot_stride, like,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """As `load_parts`, in one tile [tokens, WIDTH], the columns as `columns` says."""
    PART: tl.constexpr = WIDTH // 2 if KIND == "int4" else WIDTH
    first, second = load_parts(kept, scales, slot, seen, head, slot_stride, like, HEADS, DIM, PART, KIND, HOW)
    if KIND == "int4":
        first = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (slot.shape[0], WIDTH))
    return first


@triton.jit
def scale_of(scales, slot, seen, head, HEADS: tl.constexpr):
    """The scale of int8 of these slots; 0 where nothing is seen."""
    return tl.load(scales + slot * HEADS + head, mask=seen, other=0.0)


@triton.jit
def _nan_where(broken, x):
    return tl.where(broken, float("nan"), x)


@triton.jit
def store(
    x, kept, scales, given, slot, head, slot_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Keeps the heads x [heads, WIDTH] of a slot, the columns as `columns` says.  given, if GIVEN: [HEADS] scales of int8"""
    d, live = columns(DIM, WIDTH, KIND)
    mask = (head < HEADS)[:, None] & live[None, :]
    x = x.to(tl.float32)
    if KIND == "int8":
        broken = tl.sum(tl.where(mask & (x != x), 1, 0), 1) > 0
        if GIVEN:
            scale = tl.load(given + head, mask=head < HEADS, other=1.0)
        else:
            scale = tl.maximum(tl.max(tl.where(mask, tl.abs(x), 0.0), 1) / 127.0, 1e-30)
        codes = tl.clamp((x / scale[:, None] + HALFWAY) - HALFWAY, -128.0 if GIVEN else -127.0, 127.0)
        tl.store(kept + slot * slot_stride + head[:, None] * DIM + d[None, :], codes.to(tl.int8), mask=mask)
        tl.store(scales + slot * HEADS + head, _nan_where(broken, scale), mask=head < HEADS)
    elif KIND == "int4":
        _store_int4(x, kept, scales, slot, head, d, mask, slot_stride, HEADS, DIM, WIDTH)
    else:
        factor = tl.load(scales + head, mask=head < HEADS, other=1.0)
        x = tl.clamp(x / factor[:, None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(kept + slot * slot_stride + head[:, None] * DIM + d[None, :], x.to(kept.dtype.element_ty), mask=mask)


@triton.jit
def _store_int4(
    x, kept, scales, slot, head, d, mask, slot_stride, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    GROUPS: tl.constexpr = (DIM + GROUP - 1) // GROUP
    scale, low = tl.zeros(x.shape, tl.float32), tl.zeros(x.shape, tl.float32)
    for g in tl.static_range(GROUPS):
        inside = mask & (d // GROUP == g)[None, :]
        broken = tl.sum(tl.where(inside & (x != x), 1, 0), 1) > 0
        least = tl.min(tl.where(inside, x, float("inf")), 1)
        step = ((tl.max(tl.where(inside, x, float("-inf")), 1) - least) / 15.0).to(tl.float16)
        # codes are chosen for the scale and low as they are kept
        step, least = _nan_where(broken, step.to(tl.float32)).to(tl.float16), _nan_where(broken, least).to(tl.float16)
        first = step.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = first | (least.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        tl.store(scales + (slot * HEADS + head) * GROUPS + g, word, mask=head < HEADS)
        scale = tl.where(inside, step.to(tl.float32)[:, None], scale)
        low = tl.where(inside, least.to(tl.float32)[:, None], low)
    good = (scale > 0.0) & (scale < 65520.0)
    codes = (tl.where(good, (x - low) / tl.where(good, scale, 1.0), 0.0) + HALFWAY) - HALFWAY
    codes = tl.clamp(codes, 0.0, 15.0).to(tl.uint8)
    first, second = tl.split(tl.permute(tl.reshape(codes, (x.shape[0], 2, WIDTH // 2)), (0, 2, 1)))
    i = tl.arange(0, WIDTH // 2)
    target = kept + slot * slot_stride + head[:, None] * (DIM // 2) + i[None, :]
    tl.store(target, first | (second << 4), mask=(head < HEADS)[:, None] & (i < DIM // 2)[None, :])


@kernel
def _unpack(
    k, v, k_scales, v_scales, dense_k, dense_v, page_table, rows, kv_starts, page_stride, slot_stride,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    HOW: tl.constexpr,
):  # fmt: skip
    """dense[kv_starts[i] + j] = the numbers in the slot of position j of sequence i, of one head"""
    block, seq, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(kv_starts + seq)
    length = tl.load(kv_starts + seq + 1) - base
    if block * TOKENS >= length:
        return
    j = block * TOKENS + tl.arange(0, TOKENS)
    seen = j < length
    pages = page_table + tl.load(rows + seq).to(tl.int64) * page_stride
    slot = tl.load(pages + j // PAGE, mask=seen, other=0).to(tl.int64) * PAGE + j % PAGE
    d, live = columns(DIM, WIDTH, KIND)
    target = ((base + j).to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
    like = tl.zeros([1], dense_k.dtype.element_ty)
    mask = seen[:, None] & live[None, :]
    key = load(k, k_scales, slot, seen, head, slot_stride, like, HEADS, DIM, WIDTH, KIND, HOW)
    value = load(v, v_scales, slot, seen, head, slot_stride, like, HEADS, DIM, WIDTH, KIND, HOW)
    if KIND == "int8":
        key = (key.to(tl.float32) * scale_of(k_scales, slot, seen, head, HEADS)[:, None]).to(like.dtype)
        value = (value.to(tl.float32) * scale_of(v_scales, slot, seen, head, HEADS)[:, None]).to(like.dtype)
    tl.store(dense_k + target, key, mask=mask)
    tl.store(dense_v + target, value, mask=mask)


def unpack(
    k: Tensor, v: Tensor, page_table: Tensor, rows: Tensor, scales: tuple[Tensor, Tensor], kv_starts: Tensor, longest: int,
    page_size: int, q: Tensor, total: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The keys and values of a step's sequences as numbers of the queries' type, one after the other: [total, kv_heads, dim]"""
    kind, kv_heads, dim = kind_of(k, scales), k.shape[1], q.shape[2]
    dense = torch.empty((2, total, kv_heads, dim), dtype=q.dtype, device=k.device)
    _unpack(
        (blocks(longest, 32), rows.shape[0], kv_heads), k, v, *words(scales, k), dense[0], dense[1],
        page_table, rows, kv_starts, page_table.stride(0), k.stride(0), PAGE=page_size, TOKENS=32, HEADS=kv_heads, DIM=dim,
        WIDTH=width_of(dim, kind), KIND=kind, HOW=how(kind, q.dtype),
    )  # fmt: skip
    return dense[0], dense[1]
