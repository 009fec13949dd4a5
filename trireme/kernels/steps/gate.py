"""A product of many rows and the gated activation behind it in one kernel: y = act(x gateᵀ) * (x upᵀ).

Gate and up are the halves of one weight. A tile of both is read as one operand of twice the width, so the tensor cores work as in
a plain product, and the halves meet in registers: the product itself is never written.
Knows nothing of layers; few rows are `skinny`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel_of_any
from trireme.kernels.steps.skinny import activate, depend
from trireme.kernels.steps.tiles import place


@dataclass(frozen=True)
class Config:
    """A tile: rows, outputs (of each half), inner elements; warps, stages in flight, rows of tiles that go together."""

    rows: int
    outputs: int
    inner: int
    warps: int
    stages: int
    group: int = 8


@kernel_of_any("m")
def _gated_tiles(
    x, weight, bias, out, m, n, k,
    KIND: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Each program walks tiles of the output."""
    # descriptors: x [m, k], weight [2, n, k], out [m, n]; bias: [2 n]
    tiles_m, tiles_n = tl.cdiv(m, M), tl.cdiv(n, N)
    steps = tl.cdiv(k, K)
    # The store's own counter keeps the tile's place from living through the pipelined inner loop.
    done = tl.program_id(0) - tl.num_programs(0)
    depend(PDL)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = place(tile, tiles_m, tiles_n, GROUP)
        both = tl.zeros((M, 2 * N), tl.float32)
        for step in range(steps):
            left = x.load([tile_m * M, step * K])
            right = weight.load([0, tile_n * N, step * K]).reshape(2 * N, K)
            both = tl.dot(left, right.T, both)
        done += tl.num_programs(0)
        tile_m, tile_n = place(done, tiles_m, tiles_n, GROUP)
        gate, up = tl.split(both.reshape(M, 2, N).permute(0, 2, 1))
        if BIASED:
            column = tile_n * N + tl.arange(0, N)
            gate += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + n + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        # Two stores of half the width need half the shared memory, which buys one more stage of loads.
        width: tl.constexpr = N // 2
        first, second = tl.split((activate(gate, KIND) * up).reshape(M, 2, width).permute(0, 2, 1))
        out.store([tile_m * M, tile_n * N], first.to(out.dtype))
        out.store([tile_m * M, tile_n * N + width], second.to(out.dtype))


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the operands can be described to the copy engine: half types, dense rows of whole 16 bytes."""
    described = chips.current().descriptors and x.element_size() == 2 and weight.dtype == x.dtype and weight.is_contiguous()
    outputs, inner = weight.shape[0] // 2, weight.shape[1]
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and outputs % 8 == 0 and inner % 8 == 0
    return described and x.dim() == 2 and x.shape[0] > 0 and x.is_contiguous() and aligned


def linear(
    x: Tensor, weight: Tensor, kind: str, bias: Tensor | None = None, *, config: Config | None = None, pdl: bool = False
) -> Tensor:
    """x: [rows, in]; weight: [2 out, in], the gate's rows first; bias: [2 out] -> [rows, out]"""
    rows, inner = x.shape
    outputs = weight.shape[0] // 2
    config = config or choose(rows, outputs, inner)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    halves = TensorDescriptor(weight, [2, outputs, inner], [outputs * inner, inner, 1], [2, config.outputs, config.inner])
    _gated_tiles(
        (min(blocks(rows, config.rows) * blocks(outputs, config.outputs), chips.current().multiprocessors),),
        TensorDescriptor(x, [rows, inner], [inner, 1], [config.rows, config.inner]), halves, weight if bias is None else bias,
        TensorDescriptor(out, [rows, outputs], [outputs, 1], [config.rows, config.outputs // 2]), rows, outputs, inner,
        KIND=kind, BIASED=bias is not None, PDL=pdl, M=config.rows, N=config.outputs, K=config.inner, GROUP=config.group,
        warps=config.warps, stages=config.stages, dependent=pdl,
    )  # fmt: skip
    return out


def pays(rows: int, outputs: int, inner: int) -> bool:
    """Whether this beats cuBLAS and a kernel for the gate, on an H200.

    Products of long rows are held back by the chip's power there, and cuBLAS, which sends a tile to two multiprocessors at once,
    needs less of it: 10.5 against 9.8 ms a step of 256 rows of an 8B model, no difference for whole prompts.
    """
    if inner > 1024:
        return rows <= 128 and 0.8 <= blocks(outputs, 128) / chips.current().multiprocessors <= 1
    return rows >= 1024 or outputs <= 2048


def choose(rows: int, outputs: int, inner: int) -> Config:
    """The best cut of those measured on an H200, by class of shape."""
    tiles = blocks(rows, 128) * blocks(outputs, 128)
    if tiles >= 0.8 * chips.current().multiprocessors and (outputs > 2048 or rows > 4096):
        return Config(128, 128, 64, 8, 4)
    return Config(64, 64, 128, 4, 4) if rows <= 256 else Config(128, 64, 64, 4, 4)
