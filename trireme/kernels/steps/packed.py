"""Products with weights of four or eight bits: two are unpacked by an instruction, and scaled where their group ends.

    y[m, n] = bias[n] + sum_k x[m, k] (number(q[n, k]) - zero[g, n]) scale[g, n]          g = k // group

Numbers are whole ("int4", "int8") or floats ("e2m1"). Four or two lie in a word of 16 bits: number t of word j of a block of
4 * width columns is column t * width + j, so that a word gives each of four planes a number, and a plane is columns side by side.
The words of a block of STRIP rows follow each other: who reads many rows of few columns has whole pages of the memory.
Knows nothing of layers or files.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel, kernel_of_any, next_power

MAX_ROWS = 256  # for which cuts were measured
_TILE = 64  # rows of most tiles: each weight is unpacked once for them
SUMS = 64 * 32  # of a tile that a warp can hold twice, for a group and for all


@dataclass
class Words:
    """A matrix [rows, columns] as the kernels read it."""

    words: Tensor  # [rows / STRIP, columns / (planes * width), STRIP, width] int16; what the last strip lacks is zero
    scales: Tensor  # [groups, rows]
    zeros: Tensor | None  # [groups, rows] whole numbers; None: 8 for int4, 0 else
    group: int
    width: int  # of a plane
    kind: str  # int4, e2m1 or int8

    @property
    def planes(self) -> int:
        return PLANES[self.kind]

    @property
    def rows(self) -> int:
        return self.scales.shape[1]

    @property
    def columns(self) -> int:
        return self.words.shape[1] * self.width * self.planes

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.words, self.scales, self.zeros) if t is not None)


PLANES = {"int4": 4, "e2m1": 4, "int8": 2}
STRIP = tl.constexpr(16)  # rows


def pack(codes: Tensor, width: int, kind: str) -> Tensor:
    """Words of numbers in their places.  codes: [rows, columns] uint8 of four bits, or int8"""
    (rows, columns), count, strip = codes.shape, PLANES[kind], STRIP.value
    codes = F.pad(codes.view(torch.uint8), (0, 0, 0, -rows % strip))
    planes = codes.view(-1, strip, columns // (count * width), count, width).transpose(1, 2)
    low, high = planes[:, :, :, 0], planes[:, :, :, 1]
    if count == 4:
        low, high = low | high << 4, planes[:, :, :, 2] | planes[:, :, :, 3] << 4
    return torch.stack([low, high], -1).view(torch.int16).squeeze(-1)


def unpack(words: Tensor, kind: str) -> Tensor:
    """The numbers of some rows, in the order of their columns.  words: [rows, blocks, width]"""
    bits = 16 // PLANES[kind]
    places = torch.arange(0, 16, bits, dtype=torch.int16, device=words.device)
    planes = words.unsqueeze(2) >> places.view(-1, 1) & ((1 << bits) - 1)
    return planes.flatten(1).to(torch.uint8).view(torch.int8 if kind == "int8" else torch.uint8)


def of_rows(weight: Words, ids: Tensor) -> Tensor:
    """The numbers of the rows `ids`."""
    return unpack(weight.words[ids // STRIP.value, :, ids % STRIP.value], weight.kind)


def width_for(columns: int, group: int, kind: str) -> int:
    """How wide the planes are: 0 where there is no width for it."""
    for width in WIDTHS[PLANES[kind]]:
        if columns % (PLANES[kind] * width) == 0 and group % width == 0:
            return width
    return 0


WIDTHS = {4: (32, 16), 2: (64, 32, 16)}
_ONE = {torch.bfloat16: "0x3F803F80", torch.float16: "0x3C003C00"}
_OVER = {torch.bfloat16: "0x43004300", torch.float16: "0x64006400"}  # a number or-ed to this, which is 128 or 1024, is added to it
_UNDER = {torch.bfloat16: "0xC300C300", torch.float16: "0xE400E400"}  # a number or-ed to this is taken from what is less by as much
# e2m1: where its exponent and fraction go, what is left of the rest, and what brings the exponent to that of the wide type
_SMALL = {torch.bfloat16: (6, "0x01C001C0", "0x7E807E80"), torch.float16: (9, "0x0E000E00", "0x74007400")}


@functools.cache
def unpacking(kind: str, dtype: torch.dtype) -> tuple[str, ...]:
    """For each of the numbers of a word, what makes it a number of the wide type, for two words at a time.

    $0: two numbers; $1: two words; $2: two times what is to be added to a whole number
    """
    name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    texts = []
    for t in range(PLANES[kind]):
        text = "{ .reg .b32 a, b, c;"
        if kind == "int4":
            text += f" shr.u32 a, $1, {4 * t};" if t else " mov.b32 a, $1;"
            text += f" lop3.b32 a, a, 0x000F000F, {_OVER[dtype]}, 0xEA;"
            text += f" mov.b32 b, {_ONE[dtype]}; fma.rn.{name} $0, a, b, $2;"
        elif kind == "int8":  # its seven low bits, less its highest
            text += " shr.u32 a, $1, 8;" if t else " mov.b32 a, $1;"
            text += f" lop3.b32 b, a, 0x00800080, {_UNDER[dtype]}, 0xEA; lop3.b32 a, a, 0x007F007F, {_OVER[dtype]}, 0xEA;"
            text += f" mov.b32 c, {_ONE[dtype]}; fma.rn.{name} a, a, c, b; fma.rn.{name} $0, a, c, $2;"
        else:
            up, mask, power = _SMALL[dtype]
            text += f" {_shift('b', '$1', 12 - 4 * t)} {_shift('a', '$1', up - 4 * t)}"
            text += f" and.b32 b, b, 0x80008000; lop3.b32 a, a, {mask}, b, 0xEA;"
            text += f" mov.b32 b, {power}; mov.b32 c, 0x80008000; fma.rn.{name} $0, a, b, c;"
        texts.append(text + " }")
    return tuple(texts)


def _shift(to: str, source: str, left: int) -> str:
    return f"shl.b32 {to}, {source}, {left};" if left >= 0 else f"shr.u32 {to}, {source}, {-left};"


@triton.jit
def _number(words, away, T: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr):
    """Number T of each word; to whole ones `away` is added."""
    wide = words.to(tl.int32)
    if KIND == "int8":
        code = (((wide >> (8 * T)) & 255) ^ 128) - 128
        return (code.to(tl.float32) + away.to(tl.float32)).to(TYPE)
    code = (wide >> (4 * T)) & 15
    if KIND == "int4":
        return (code.to(tl.float32) + away.to(tl.float32) + _over(KIND, TYPE)).to(TYPE)
    exponent, fraction = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, fraction, (1.0 + fraction) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where(code >= 8, -size, size).to(TYPE)


@triton.jit
def _rows_of(words, there, K: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr):
    """Where the words of the first block of some rows lie; those of the next one are STRIP * WIDTH on."""
    strip = (there // STRIP).to(tl.int64)[:, None] * (STRIP * K // PLANES)
    return words + strip + (there % STRIP)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _plane(
    words, away, T: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr
):  # fmt: skip
    """Number T of each word, by the quickest instructions."""
    moved = tl.broadcast_to(away[:, None], [OUTPUTS, WIDTH])
    if HOW is None:
        return _number(words, moved, T, KIND, away.dtype)
    else:
        return tl.inline_asm_elementwise(HOW[T], "=r,r,r", [words, moved], dtype=away.dtype, is_pure=True, pack=2)


@triton.jit
def _sized(q, size, HOW: tl.constexpr):
    """q * size; the interpreter has no products of bfloat16."""
    if HOW is None:
        return (q.to(tl.float32) * size.to(tl.float32)).to(q.dtype)
    else:
        return q * size


@triton.jit
def _over(KIND: tl.constexpr, TYPE: tl.constexpr):
    """By how much whole numbers of four bits come out too large."""
    return (0.0 if KIND != "int4" else 128.0 if tl.bfloat16 == TYPE else 1024.0) + 0.0


@triton.jit
def _away(zeros, ZEROS: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """What is to be added to each row's numbers."""
    if ZEROS:
        return (-_over(KIND, TYPE) - tl.load(zeros).to(tl.float32)).to(TYPE)
    else:
        return tl.full([SIZE], -_over(KIND, TYPE) - (8.0 if KIND == "int4" else 0.0), tl.float32).to(TYPE)


@triton.jit
def _of_group(scales, zeros, there, g, N, ZEROS: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr, SIZE: tl.constexpr):
    """The scales of a group, and what is to be added to its numbers."""
    return tl.load(scales + g * N + there), _away(zeros + g * N + there, ZEROS, KIND, TYPE, SIZE)


@kernel_of_any("M")
def _few_rows(
    x, words, scales, zeros, bias, out, partial, counters, M, N, x_stride, share,
    K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, PLANES: tl.constexpr, ZEROS: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
    PDL: tl.constexpr, SCALED: tl.constexpr, EVICT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """OUTPUTS columns of the product of ROWS rows, over one share of the inner axis, STEP blocks at a time. Programs that follow
    each other read the same weights for other rows.

    Sums of a group are scaled where it ends; if SCALED, the weights are, so that there are no such sums to be held.
    """
    # x: [M, K]; words: as `Words` says; scales, zeros: [K / GROUP, N]; out: [M, N]; partial: [SPLITS, M, N] float32
    program, split = tl.program_id(1), tl.program_id(2)
    n, m = program * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    half: tl.constexpr = x.dtype.element_ty
    BLOCK: tl.constexpr = PLANES * WIDTH
    AHEAD: tl.constexpr = GROUP >= BLOCK  # a block's scales are read while the block before it is multiplied
    there = tl.minimum(n, N - 1)
    row = _rows_of(words, there, K, PLANES, WIDTH)
    source = x + m[:, None] * x_stride + tl.arange(0, TOGETHER * WIDTH)[None, :]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    joined = acc
    begin, end = split * share, tl.minimum(split * share + share, K // BLOCK)
    if PDL:
        chips.wait()
        chips.let_next()
    size, away = _of_group(scales, zeros, there, begin * BLOCK // GROUP, N, ZEROS, KIND, half, OUTPUTS)
    for first in range(begin, end, STEP):
        for block in tl.static_range(STEP):
            at = first + block
            w = tl.load(row + at * (STRIP * WIDTH), eviction_policy=EVICT)
            if AHEAD:
                g = tl.minimum(at + 1, end - 1) * BLOCK // GROUP
                next_size, next_away = _of_group(scales, zeros, there, g, N, ZEROS, KIND, half, OUTPUTS)
            for t in tl.static_range(0, PLANES, TOGETHER):
                if not AHEAD:
                    g = (at * BLOCK + t * WIDTH) // GROUP
                    size, away = _of_group(scales, zeros, there, g, N, ZEROS, KIND, half, OUTPUTS)
                q = _plane(w, away, t, OUTPUTS, WIDTH, KIND, HOW)
                if TOGETHER == 2:
                    next_plane = _plane(w, away, t + 1, OUTPUTS, WIDTH, KIND, HOW)
                    q = tl.reshape(tl.permute(tl.join(q, next_plane), (0, 2, 1)), (OUTPUTS, 2 * WIDTH))
                v = tl.load(source + at * BLOCK + t * WIDTH, mask=(m < M)[:, None], other=0.0)
                if SCALED:
                    acc = tl.dot(_sized(q, size.to(half)[:, None], HOW), v.T, acc)
                else:
                    joined = tl.dot(q, v.T, joined if AHEAD and t > 0 else tl.zeros([OUTPUTS, ROWS], tl.float32))
                    if not AHEAD or t == PLANES - TOGETHER:
                        acc += joined * size.to(tl.float32)[:, None]
            if AHEAD:
                size, away = next_size, next_away
    cell = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if SPLITS > 1:
        tl.store(partial + split * M * N + cell, acc, mask=inside)
        tl.debug_barrier()  # every thread's partial is written before the count says so
        place = counters + tl.program_id(0) * tl.num_programs(1) + program
        if tl.atomic_add(place, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(place, 0)
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for other in tl.static_range(SPLITS):
            acc += tl.load(partial + other * M * N + cell, mask=inside, other=0.0, cache_modifier=".cg")
    if BIASED:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + cell, acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Config:
    """How a product is cut: outputs and rows of a tile, programs that share the inner axis, warps, stages in flight, columns of a
    step where the inner axis is a multiple of them."""

    outputs: int
    rows: int
    warps: int
    stages: int = 3
    splits: int = 1
    inner: int = 128


def linear(
    x: Tensor, weight: Words, bias: Tensor | None = None, *, config: Config | None = None, pdl: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The product of some rows of 16-bit numbers.  x: [rows, columns]"""
    rows, inner = x.shape
    config = config or choose(rows, weight.rows)
    out = torch.empty((rows, weight.rows), dtype=dtype or x.dtype, device=x.device)
    block = weight.planes * weight.width
    all_blocks = inner // block
    step = math.gcd(max(config.inner // block, 1), all_blocks)
    share = blocks(all_blocks // step, splits_of(config.splits, rows, weight.rows)) * step
    splits = blocks(all_blocks, share)
    partial, counters = workspace(x.device) if splits > 1 else (x, x)
    how = None if chips.current().interpreted else unpacking(weight.kind, x.dtype)
    bands, scaled = blocks(rows, config.rows), config.outputs * config.rows > SUMS * config.warps
    _few_rows(
        (bands, blocks(weight.rows, config.outputs), splits), x, weight.words, weight.scales,
        weight.words if weight.zeros is None else weight.zeros, x if bias is None else bias, out, partial, counters, rows,
        weight.rows, x.stride(0), share, K=inner, GROUP=min(weight.group, inner), WIDTH=weight.width, STEP=step,
        OUTPUTS=config.outputs, ROWS=config.rows, SPLITS=splits, PLANES=weight.planes,
        ZEROS=weight.zeros is not None, BIASED=bias is not None, KIND=weight.kind, HOW=how,
        PDL=pdl, SCALED=scaled, EVICT="evict_first" if bands == 1 else "",
        TOGETHER=2 if not scaled and min(weight.group, inner) >= 2 * weight.width else 1,
        dependent=pdl, warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return out


@kernel
def _dense(
    words, scales, zeros, out, N, K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
    PLANES: tl.constexpr, ZEROS: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """OUTPUTS rows of one block of the matrix itself."""
    n, at, j = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1), tl.arange(0, WIDTH)
    half: tl.constexpr = out.dtype.element_ty
    there = tl.minimum(n, N - 1)
    w = tl.load(_rows_of(words, there, K, PLANES, WIDTH) + at * (STRIP * WIDTH))
    for t in tl.static_range(PLANES):
        first = at * PLANES * WIDTH + t * WIDTH
        size, away = _of_group(scales, zeros, there, first // GROUP, N, ZEROS, KIND, half, OUTPUTS)
        q = _plane(w, away, t, OUTPUTS, WIDTH, KIND, HOW)
        value = q.to(tl.float32) * size.to(tl.float32)[:, None]
        tl.store(out + there.to(tl.int64)[:, None] * K + first + j[None, :], value.to(half), mask=(n < N)[:, None])


def dense(weight: Words, dtype: torch.dtype) -> Tensor:
    """The matrix itself, for so many rows that reading it once more costs little."""
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.words.device)
    how = None if chips.current().interpreted else unpacking(weight.kind, dtype)
    _dense(
        (blocks(weight.rows, 16), weight.columns // (weight.planes * weight.width)), weight.words, weight.scales,
        weight.words if weight.zeros is None else weight.zeros, out, weight.rows, K=weight.columns,
        GROUP=min(weight.group, weight.columns), WIDTH=weight.width, OUTPUTS=16, PLANES=weight.planes,
        ZEROS=weight.zeros is not None, KIND=weight.kind, HOW=how, warps=4,
    )  # fmt: skip
    return out


PARTIAL_VALUES = 1 << 23


@functools.cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """(partial sums, counters that are zero between launches), for products that follow each other on one stream."""
    return torch.empty(PARTIAL_VALUES, device=device), torch.zeros(1 << 14, dtype=torch.int32, device=device)


def most_rows() -> int:
    """The rows up to which the product should unpack weights itself; with more of them `dense` and the library's are faster.

    Where this was not measured: the whole tiles that take the chip as long to compute as reading a dense matrix takes, since from
    there on fewer bytes save no time.
    """
    chip = chips.current()
    return min(chip.packed_rows or max(chip.balance // _TILE, 1) * _TILE, MAX_ROWS)


def choose(rows: int, outputs: int) -> Config:
    """The best cut of those measured on an H200, by rows: many small programs where the weights' way to them is what takes time."""
    many = chips.current().multiprocessors
    if rows <= 8:
        return Config(128, 8, 4, 3, splits_of(blocks(2 * many, blocks(outputs, 128)), rows, outputs), 256)
    if rows <= 16:
        return Config(64, 16, 4, 3, splits_of(7 * many // blocks(outputs, 64), rows, outputs))
    most = min(next_power(rows), _TILE)
    if rows <= _TILE and outputs <= 64 * many:
        resident = 3 if most == 32 else 2  # programs of this size on a multiprocessor
        return Config(64, most, 4, 3, splits_of(resident * many // blocks(outputs, 64), rows, outputs), 256)
    if blocks(outputs, 128) * blocks(rows, 128) >= many and blocks(rows, 64) % 2 == 0:
        return Config(128, 128, 4)
    tiles = blocks(outputs, 128) * blocks(rows, most)
    return Config(128, most, 4, 3, splits_of(2 * many // tiles, rows, outputs), 256 if most == 32 else 128)


def splits_of(wanted: int, rows: int, outputs: int) -> int:
    """How many programs may share the inner axis, of `wanted`: there is room for so many partial sums."""
    return max(min(wanted, 8, PARTIAL_VALUES // (rows * outputs)), 1)
