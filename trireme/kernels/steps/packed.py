"""Products with weights of four bits: two or more are unpacked by an instruction, and scaled where their group ends.

    y[m, n] = bias[n] + sum_k x[m, k] (number(q[n, k]) - zero[g, n]) scale[g, n]          g = k // group

Numbers are whole ("int4") or floats (e2m1). Eight lie in a word of 32 bits: number t of word j of a block of 8 * width columns is
column t * width + j, so that a word gives each of eight planes a number, and a plane is columns side by side.
Knows nothing of layers or files.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel, kernel_of_any, next_power

MAX_ROWS = 256


@dataclass
class FourBits:
    """A matrix [rows, columns] as the kernels read it."""

    words: Tensor  # [rows, columns / 8] int32
    scales: Tensor  # [groups, rows]
    zeros: Tensor | None  # [groups, rows] uint8; None: 8
    group: int
    width: int  # of a plane
    kind: str  # int4 or e2m1

    @property
    def rows(self) -> int:
        return self.words.shape[0]

    @property
    def columns(self) -> int:
        return self.words.shape[1] * 8

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.words, self.scales, self.zeros) if t is not None)


def pack(codes: Tensor, width: int) -> Tensor:
    """Words of numbers in their places.  codes: [rows, columns] uint8"""
    rows, columns = codes.shape
    planes = codes.view(rows, columns // (8 * width), 8, width)
    words = torch.zeros(rows, columns // (8 * width), width, dtype=torch.int32, device=codes.device)
    for t in range(8):
        words |= planes[:, :, t].int() << 4 * t
    return words.view(rows, columns // 8)


def unpack(words: Tensor, width: int) -> Tensor:
    """The numbers of some rows, in the order of their columns.  words: [rows, columns / 8]"""
    planes = words.view(len(words), -1, 1, width) >> torch.arange(0, 32, 4, dtype=torch.int32, device=words.device).view(8, 1)
    return (planes & 15).flatten(1).to(torch.uint8)


def width_for(columns: int, group: int) -> int:
    """How wide the planes are: 0 where there is no width for it."""
    for width in WIDTHS:
        if columns % (8 * width) == 0 and group % width == 0:
            return width
    return 0


WIDTHS = (16, 32, 64)
_ONE = {torch.bfloat16: "0x3F803F80", torch.float16: "0x3C003C00"}
_OVER = {torch.bfloat16: (128, "0x43004300"), torch.float16: (1024, "0x64006400")}  # a number or-ed to this is added to it
# e2m1: where its exponent and fraction go, what is left of the rest, and what brings the exponent to that of the wide type
_SMALL = {torch.bfloat16: (6, "0x01C001C0", "0x7E807E80"), torch.float16: (9, "0x0E000E00", "0x74007400")}


@functools.cache
def unpacking(kind: str, dtype: torch.dtype) -> tuple[str, ...]:
    """For each of the eight numbers of a word, what makes it a number of the wide type, for two words at a time.

    $0: two numbers; $1, $2: two words; $3: two times what is to be added to a whole number
    """
    name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    texts = []
    for t in range(8):
        text = f"{{ .reg .b32 a, b, c; prmt.b32 a, $1, $2, {'0x5410' if t < 4 else '0x7632'};"
        if kind == "int4":
            text += f" shr.u32 a, a, {4 * (t % 4)};" if t % 4 else ""
            text += f" lop3.b32 a, a, 0x000F000F, {_OVER[dtype][1]}, 0xEA;"
            text += f" mov.b32 b, {_ONE[dtype]}; fma.rn.{name} $0, a, b, $3; }}"
        else:
            up, mask, power = _SMALL[dtype]
            left, sign = up - 4 * (t % 4), 12 - 4 * (t % 4)
            text += f" {_shift('b', 'a', sign)} {_shift('a', 'a', left)}"
            text += f" and.b32 b, b, 0x80008000; lop3.b32 a, a, {mask}, b, 0xEA;"
            text += f" mov.b32 b, {power}; mov.b32 c, 0x80008000; fma.rn.{name} $0, a, b, c; }}"
        texts.append(text)
    return tuple(texts)


def _shift(to: str, source: str, left: int) -> str:
    return f"shl.b32 {to}, {source}, {left};" if left >= 0 else f"shr.u32 {to}, {source}, {-left};"


@triton.jit
def _number(words, away, T: tl.constexpr, KIND: tl.constexpr, TYPE: tl.constexpr):
    """Number T of each word; whole numbers with `away` added to what they are over."""
    code = (words >> (4 * T)) & 15
    if KIND == "int4":
        return (code.to(tl.float32) + away.to(tl.float32) + (128.0 if tl.bfloat16 == TYPE else 1024.0)).to(TYPE)
    exponent, fraction = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    size = tl.where(exponent == 0, fraction, (1.0 + fraction) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where(code >= 8, -size, size).to(TYPE)


@kernel_of_any("M")
def _few_rows(
    x, words, scales, zeros, bias, out, partial, counters, M, N, x_stride, share,
    K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    ZEROS: tl.constexpr, BIASED: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS columns of the product of ROWS rows, over one share of the blocks of the inner axis."""
    # x: [M, K]; words: [N, K / 8]; scales, zeros: [K / GROUP, N]; out: [M, N]; partial: [SPLITS, M, N] float32
    block, split = tl.program_id(0), tl.program_id(1)
    n, m, j = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    half: tl.constexpr = x.dtype.element_ty
    over: tl.constexpr = 128.0 if half == tl.bfloat16 else 1024.0
    there = tl.minimum(n, N - 1)
    row = words + there.to(tl.int64)[:, None] * (K // 8) + j[None, :]
    source = x + m[:, None] * x_stride + j[None, :]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    away = tl.full([OUTPUTS], -over - 8.0, tl.float32).to(half)
    if PDL:
        chips.wait()
        chips.let_next()
    for at in range(split * share, tl.minimum(split * share + share, K // (8 * WIDTH))):
        w = tl.load(row + at * WIDTH, eviction_policy="evict_first")
        joined = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for t in tl.static_range(8):
            g = (at * 8 * WIDTH + t * WIDTH) // GROUP
            if ZEROS and (t == 0 or GROUP < 8 * WIDTH):
                away = (-over - tl.load(zeros + g * N + there).to(tl.float32)).to(half)
            moved = tl.broadcast_to(away[:, None], [OUTPUTS, WIDTH])
            if HOW is None:
                q = _number(w, moved, t, KIND, half)
            else:
                q = tl.inline_asm_elementwise(HOW[t], "=r,r,r,r", [w, moved], dtype=x.dtype.element_ty, is_pure=True, pack=2)
            v = tl.load(source + at * 8 * WIDTH + t * WIDTH, mask=(m < M)[:, None], other=0.0)
            if GROUP >= 8 * WIDTH:
                joined = tl.dot(q, v.T, joined)
            else:
                acc += tl.dot(q, v.T) * tl.load(scales + g * N + there).to(tl.float32)[:, None]
        if GROUP >= 8 * WIDTH:
            acc += joined * tl.load(scales + at * 8 * WIDTH // GROUP * N + there).to(tl.float32)[:, None]
    cell = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if SPLITS > 1:
        tl.store(partial + split * M * N + cell, acc, mask=inside)
        tl.debug_barrier()  # every thread's partial is written before the count says so
        place = counters + tl.program_id(2) * tl.num_programs(0) + block
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
    """How a product is cut: outputs and rows of a tile, programs that share the inner axis, warps, stages in flight."""

    outputs: int
    rows: int
    warps: int
    stages: int = 3
    splits: int = 1


def linear(
    x: Tensor, weight: FourBits, bias: Tensor | None = None, *, config: Config | None = None, pdl: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The product of some rows of 16-bit numbers.  x: [rows, columns]"""
    rows, inner = x.shape
    config = config or choose(rows, weight.rows, inner)
    out = torch.empty((rows, weight.rows), dtype=dtype or x.dtype, device=x.device)
    steps = inner // (8 * weight.width)
    share = blocks(steps, config.splits)
    splits = blocks(steps, share)
    partial, counters = workspace(x.device) if splits > 1 else (x, x)
    how = None if chips.current().interpreted else unpacking(weight.kind, x.dtype)
    _few_rows(
        (blocks(weight.rows, config.outputs), splits, blocks(rows, config.rows)), x, weight.words, weight.scales,
        weight.words if weight.zeros is None else weight.zeros, x if bias is None else bias, out, partial, counters, rows,
        weight.rows, x.stride(0), share, K=inner, GROUP=min(weight.group, inner), WIDTH=weight.width, OUTPUTS=config.outputs,
        ROWS=config.rows, SPLITS=splits, ZEROS=weight.zeros is not None, BIASED=bias is not None, KIND=weight.kind, HOW=how,
        PDL=pdl, dependent=pdl, warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return out


@kernel
def _dense(
    words, scales, zeros, out, N, K: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
    ZEROS: tl.constexpr, KIND: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """OUTPUTS rows of one block of the matrix itself."""
    n, at, j = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1), tl.arange(0, WIDTH)
    half: tl.constexpr = out.dtype.element_ty
    over: tl.constexpr = 128.0 if half == tl.bfloat16 else 1024.0
    there = tl.minimum(n, N - 1)
    w = tl.load(words + there.to(tl.int64)[:, None] * (K // 8) + at * WIDTH + j[None, :])
    for t in tl.static_range(8):
        first = at * 8 * WIDTH + t * WIDTH
        away = tl.full([OUTPUTS], -over - 8.0, tl.float32)
        if ZEROS:
            away = -over - tl.load(zeros + first // GROUP * N + there).to(tl.float32)
        moved = tl.broadcast_to(away.to(half)[:, None], [OUTPUTS, WIDTH])
        if HOW is None:
            q = _number(w, moved, t, KIND, half)
        else:
            q = tl.inline_asm_elementwise(HOW[t], "=r,r,r,r", [w, moved], dtype=out.dtype.element_ty, is_pure=True, pack=2)
        value = q.to(tl.float32) * tl.load(scales + first // GROUP * N + there).to(tl.float32)[:, None]
        tl.store(out + there.to(tl.int64)[:, None] * K + first + j[None, :], value.to(half), mask=(n < N)[:, None])


def dense(weight: FourBits, dtype: torch.dtype) -> Tensor:
    """The matrix itself, for so many rows that reading it once more costs little."""
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.words.device)
    how = None if chips.current().interpreted else unpacking(weight.kind, dtype)
    _dense(
        (blocks(weight.rows, 16), weight.columns // (8 * weight.width)), weight.words, weight.scales,
        weight.words if weight.zeros is None else weight.zeros, out, weight.rows, K=weight.columns,
        GROUP=min(weight.group, weight.columns), WIDTH=weight.width, OUTPUTS=16, ZEROS=weight.zeros is not None,
        KIND=weight.kind, HOW=how, warps=4,
    )  # fmt: skip
    return out


PARTIAL_VALUES = 1 << 23


@functools.cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """(partial sums, counters that are zero between launches), for products that follow each other on one stream."""
    return torch.empty(PARTIAL_VALUES, device=device), torch.zeros(1 << 14, dtype=torch.int32, device=device)


def choose(rows: int, outputs: int, inner: int) -> Config:
    """The best cut of those measured on an H200, by rows."""
    many = chips.current().multiprocessors
    if rows <= 16:
        # two warps: the small matrix unit takes weights as they are unpacked, the large one waits for four warps of them
        tile = 64 if outputs > 2048 else 32
        return Config(tile, 16, 2, 3, _splits(4 * many // blocks(outputs, tile), rows, outputs))
    most = min(next_power(rows), 64)
    tiles = blocks(outputs, 128) * blocks(rows, most)
    return Config(128, most, 4, 3, _splits(2 * many // tiles, rows, outputs))


def _splits(wanted: int, rows: int, outputs: int) -> int:
    return max(min(wanted, 8, PARTIAL_VALUES // (rows * outputs)), 1)
