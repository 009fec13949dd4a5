"""Products with weights of eight bits, whole numbers or floats, that have a scale for each row, group or block.

    y[m, n] = bias[n] + sum_k x[m, k] w[n, k] scale[g, n]          g = k // group

x is in eight bits too, with a scale for each row, which doubles what the matrix units do. Knows nothing of layers or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel, kernel_of_any, next_power
from trireme.kernels.steps.packed import Config, splits_of, workspace
from trireme.kernels.steps.skinny import activate


@dataclass
class EightBits:
    """A matrix [rows, columns] as the kernels read it."""

    codes: Tensor  # [rows, columns] int8 or float8_e4m3fn
    scales: Tensor  # [groups, rows] float32
    group: int  # columns

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales))


@kernel
def _quantize(x, q, scale, K, x_stride, WIDTH: tl.constexpr, MOST: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """A row in eight bits, and what to multiply it by; where KIND names an activation, of the row that its gate and values make."""
    m, k = tl.program_id(0), tl.arange(0, WIDTH)
    if PDL:
        chips.wait()
        chips.let_next()
    row = x + m.to(tl.int64) * x_stride + k
    v = tl.load(row, mask=k < K, other=0.0).to(tl.float32)
    if KIND != "":
        v = activate(v, KIND) * tl.load(row + K, mask=k < K, other=0.0).to(tl.float32)
    size = tl.maximum(tl.max(tl.abs(v)), 1e-12) / MOST
    v = v / size
    if MOST == 127.0:
        v = tl.where(v < 0, v - 0.5, v + 0.5)
    tl.store(q + m.to(tl.int64) * K + k, v.to(q.dtype.element_ty), mask=k < K)
    tl.store(scale + m, size)


def quantize(x: Tensor, dtype: torch.dtype, gated: str = "", pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Each row in eight bits with one scale; gated names an activation: of activation(first half) * second half.

    x: [rows, columns], [rows, 2 columns] where gated
    """
    rows, inner = x.shape[0], x.shape[1] // (2 if gated else 1)
    q = torch.empty((rows, inner), dtype=dtype, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    width = next_power(inner)
    _quantize(
        (rows,), x, q, scale, inner, x.stride(0), WIDTH=width, MOST=127.0 if dtype == torch.int8 else 448.0, KIND=gated, PDL=pdl,
        dependent=pdl, warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return q, scale


@kernel_of_any("M")
def _rows(
    x, sizes, codes, scales, bias, out, partial, counters, M, K, N, share,
    GROUP: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, OFTEN: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """OUTPUTS columns of ROWS rows of eight bits, over one share of the inner axis. Programs that follow each other read the same
    weights for the next rows, of as many tiles as axis 0 has, and then those rows again with the next weights.
    """
    # x: [M, K]; sizes: [M]; codes: [N, K]; scales: [groups, N]; out: [M, N]; partial: [SPLITS, M, N] float32
    band = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    block, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    if band * ROWS >= M:  # the last tiles of rows may be fewer than axis 0 has
        return
    n, m, k = block * OUTPUTS + tl.arange(0, OUTPUTS), band * ROWS + tl.arange(0, ROWS), tl.arange(0, INNER)
    there = tl.minimum(n, N - 1)
    row = codes + there.to(tl.int64)[:, None] * K + k[None, :]
    source = x + m.to(tl.int64)[:, None] * K + k[None, :]
    kind: tl.constexpr = tl.int32 if codes.dtype.element_ty == tl.int8 else tl.float32
    whole: tl.constexpr = GROUP == 0 and not OFTEN
    acc = tl.zeros([OUTPUTS, ROWS], kind if whole else tl.float32)
    begin = split * share
    end = tl.minimum(begin + share, K)
    if PDL:
        chips.wait()
        chips.let_next()
    for start in range(begin, end, INNER):
        if EVEN:
            w = tl.load(row + start, eviction_policy=EVICT)
            v = tl.load(source + start, mask=(m < M)[:, None], other=0.0)
        else:
            w = tl.load(row + start, mask=(start + k < end)[None, :], other=0.0, eviction_policy=EVICT)
            v = tl.load(source + start, mask=(m < M)[:, None] & (start + k < end)[None, :], other=0.0)
        if whole:
            acc = tl.dot(w, v.T, acc, out_dtype=kind)
        else:
            joined = tl.dot(w, v.T, out_dtype=kind).to(tl.float32)
            if GROUP != 0:
                joined *= tl.load(scales + start // GROUP * N + there)[:, None]
            acc += joined
    total = acc.to(tl.float32)
    cell = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if SPLITS > 1:
        tl.store(partial + split * M * N + cell, total, mask=inside)
        tl.debug_barrier()  # every thread's partial is written before the count says so
        place = counters + band * (tl.num_programs(1) // SPLITS) + block
        if tl.atomic_add(place, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(place, 0)
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(partial + other * M * N + cell, mask=inside, other=0.0, cache_modifier=".cg")
    if GROUP == 0:
        total *= tl.load(scales + there)[:, None]
    total *= tl.load(sizes + m, mask=m < M, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + there).to(tl.float32)[:, None]
    tl.store(out + cell, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Cut(Config):
    """How a product is cut, and whether sums leave the matrix units after each tile, where they are
    held with fewer bits than float32 has."""

    often: bool = False


def rows(
    q: Tensor, sizes: Tensor, weight: EightBits, bias: Tensor | None = None, *, dtype: torch.dtype, cut: Cut | None = None,
    pdl: bool = False,
) -> Tensor:  # fmt: skip
    """The product of rows that were quantized.  q: [rows, columns]; sizes: [rows]"""
    (count, inner), outputs = q.shape, weight.rows
    cut = cut or choose(count, outputs)
    group = 0 if weight.group >= inner else weight.group
    step = min(cut.inner, group & -group) if group else cut.inner
    out = torch.empty((count, outputs), dtype=dtype, device=q.device)
    share = blocks(blocks(inner, step), cut.splits) * step
    splits = blocks(inner, share)
    partial, counters = workspace(q.device) if splits > 1 else (q, q)
    bands = blocks(count, cut.rows)
    side = min(bands, SIDE)
    _rows(
        (side, blocks(outputs, cut.outputs) * splits, blocks(bands, side)), q, sizes, weight.codes, weight.scales,
        q if bias is None else bias, out, partial, counters, count, inner, outputs, share, GROUP=group,
        OUTPUTS=cut.outputs, ROWS=cut.rows, INNER=step, SPLITS=splits, EVEN=inner % step == 0, OFTEN=cut.often,
        BIASED=bias is not None, PDL=pdl, EVICT="evict_first" if bands == 1 else "", dependent=pdl, warps=cut.warps,
        stages=cut.stages,
    )  # fmt: skip
    return out


SIDE = 8  # tiles of rows that share weights in the cache
TILES = ((128, 256, 8), (128, 128, 8), (64, 128, 4))  # outputs, rows, warps


def choose(count: int, outputs: int) -> Cut:
    """The best cut of those measured on an H200, by rows; with many, the largest tile of which there are enough for the chip."""
    many = chips.current().multiprocessors
    if count <= 16:
        tile = 128 if outputs >= 64 * many else 64
        splits = 2 * many // blocks(outputs, tile) // (tile // 64)
        return Cut(tile, 16, 4, 4, splits_of(splits, count, outputs), inner=256)
    if count <= 64:
        return Cut(64, next_power(count), 4, 4, splits_of(2 * many // blocks(outputs, 64), count, outputs), inner=128)
    if count <= 128:
        programs = blocks(outputs, 64)
        return Cut(64, 128, 4, 4, splits_of(many // programs, count, outputs), inner=128)
    for tile, most, warps in TILES:
        programs = blocks(outputs, tile) * blocks(count, most)
        if programs >= 0.8 * many and most < 2 * count:
            return Cut(tile, most, warps, 3 if count > 4096 else 4, 1, inner=128)
    return Cut(tile, most, warps, 4, splits_of(2 * many // programs, count, outputs), inner=128)
