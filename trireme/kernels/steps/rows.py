"""The steps of a model that go row by row: norms, gates, look-up. Lean forms for an engine: out of place, no gradients.

    rms_norm      x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm  residual := x + residual; rms_norm(residual)
    gated         act(gate) * up, for rows (gate, up)
    embedding     weight[ids]

Knows rows; nothing of heads or layers.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from trireme.kernels.launch import blocks, kernel, kernel_of_any, next_power
from trireme.kernels.steps.skinny import activate, depend


@kernel_of_any("count")
def _norm(
    x, residual, weight, out, x_stride, x_inner, count, eps, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows. Row r of x is the slice r % HEADS of token r // HEADS; residual and out are dense."""
    r, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    scale = tl.load(weight + d, mask=d < SIZE, other=0.0).to(tl.float32)  # nobody writes weights: this need not wait
    depend(PDL)
    mask = (r < count)[:, None] & (d < SIZE)[None, :]
    source = (r // HEADS).to(tl.int64) * x_stride + (r % HEADS) * x_inner
    cell = r.to(tl.int64)[:, None] * SIZE + d[None, :]
    wide = tl.load(x + source[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        total = wide + tl.load(residual + cell, mask=mask, other=0.0).to(tl.float32)
        stored = total.to(residual.dtype.element_ty)
        tl.store(residual + cell, stored, mask=mask)
        wide = stored.to(tl.float32)  # the norm of what the residual now holds
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    tl.store(out + cell, (wide * factor[:, None] * scale[None, :]).to(out.dtype.element_ty), mask=mask)


@kernel
def _gated(x, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """A block of act(gate) * up of one row."""  # x: [rows, 2 WIDTH]; out: [rows, WIDTH]
    depend(PDL)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * stride + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + WIDTH + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=i < WIDTH)


@kernel
def _embedding(ids, weight, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = weight[ids[t]]"""
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + t).to(tl.int64)
    tl.store(out + t * SIZE + d, tl.load(weight + token * SIZE + d, mask=d < SIZE), mask=d < SIZE)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, pdl: bool = False) -> Tensor:
    """The norm of the last axis; with a residual, of the sum, which takes the residual's place.

    x: [rows, size] or [tokens, heads, size], the last axis dense; residual: dense
    """
    size = x.shape[-1]
    count = x.numel() // size
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power(size)
    # short rows share a program: 1024 values are 16 bytes a thread with 4 warps
    together = max(min(1024 // block, next_power(count)), 1)
    _norm(
        (blocks(count, together),), x, x if residual is None else residual, weight, out, x.stride(0), x.stride(-2), count, eps,
        HEADS=heads, SIZE=size, BLOCK=block, ROWS=together, ADDED=residual is not None, PDL=pdl, dependent=pdl,
        warps=max(min(block * together // 512, 16), 1),
    )  # fmt: skip
    return out


def gated(x: Tensor, kind: str, pdl: bool = False) -> Tensor:
    """act(gate) * up.  x: [rows, 2 * width], the gate first"""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(next_power(width), 1024)
    _gated((rows, blocks(width, block)), x, out, x.stride(0), WIDTH=width, BLOCK=block, KIND=kind, PDL=pdl, dependent=pdl)
    return out


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids].  ids: [tokens]; weight: [vocabulary, size], dense"""
    size = weight.shape[1]
    out = torch.empty((ids.shape[0], size), dtype=weight.dtype, device=weight.device)
    block = min(next_power(size), 1024)
    _embedding((ids.shape[0], blocks(size, block)), ids, weight, out, SIZE=size, BLOCK=block)
    return out
