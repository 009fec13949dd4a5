"""Moving elements by place: embedding, triu, flip. Knows indices, never values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.elementwise.layout import normalise, plan_reversed
from trireme.kernels.aten.elementwise.unary import same
from trireme.kernels.launch import Unsupported, blocks, empty, empty_like, kernel, next_power

_WIDEST = 1 << 25  # of a row that is cut into blocks by a grid's second number, which ends at 65535


@kernel
def _embedding(weight, indices, out, count, width, entries, stride, M: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr):
    """out[i] = weight[indices[i]]; an index outside the table reads as zeros instead of foreign memory"""
    chips.begin(EARLY, OPEN=True)
    row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    index = tl.load(indices + row, mask=row < count, other=-1).to(tl.int64)
    inside = (index >= 0) & (index < entries)
    wide = (column < width)[None, :]
    value = tl.load(weight + index[:, None] * stride + column[None, :], mask=inside[:, None] & wide, other=0)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=(row < count)[:, None] & wide)


@kernel
def _triu(x, out, row_blocks, height, width, diagonal, M: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr):
    """out[i, j] = x[i, j] where j − i ≥ diagonal, else 0; a tile below the diagonal is not read"""
    chips.begin(EARLY, OPEN=True)
    item = tl.program_id(0) // row_blocks
    first = (tl.program_id(0) % row_blocks) * M
    row = first + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    mask = (row < height)[:, None] & (column < width)[None, :]
    at = (item.to(tl.int64) * height + row)[:, None] * width + column[None, :]
    some = tl.program_id(1) * N + N - 1 - first >= diagonal
    value = tl.load(x + at, mask=mask & some, other=0)
    keep = column[None, :] - row[:, None] >= diagonal
    tl.store(out + at, tl.where(keep, value, tl.zeros_like(value)), mask=mask)


def embedding(
    weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> torch.Tensor:
    """rows of a table; the other arguments only shape its gradient, which stays torch's"""
    if weight.dim() != 2 or indices.dtype not in (torch.int64, torch.int32) or weight.is_complex() or weight.shape[1] >= _WIDEST:
        raise Unsupported("an embedding that is not rows of a table")
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    width, count = weight.shape[1], indices.numel()
    out = empty((*indices.shape, width), weight.dtype, weight.device)
    if out.numel():
        n = min(next_power(width), 2048)
        # Programs enough for the chip, but no more than must be.
        m = max(1, min(1024 // n, next_power(count)), min(4096 // n, next_power(count // (4 * chips.current().multiprocessors))))
        grid = (blocks(count, m), blocks(width, n))
        _embedding(grid, weight, indices.contiguous(), out, count, width, weight.shape[0], weight.stride(0), M=m, N=n)
    return out


def triu(self: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    """the upper triangle of the last two dimensions"""
    if self.dim() < 2:
        raise RuntimeError("triu: input tensor must have at least 2 dimensions")
    height, width = self.shape[-2:]
    if self.is_complex() or width >= _WIDEST:
        raise Unsupported("complex or very wide triangles")
    x = self.contiguous()
    out = empty(x.shape, x.dtype, x.device)
    if out.numel():
        n = min(next_power(width), 1024)
        m = max(1, min(2048 // n, next_power(height)))
        row_blocks, items = blocks(height, m), math.prod(x.shape[:-2])
        diagonal = max(-height, min(diagonal, width))
        _triu((items * row_blocks, blocks(width, n)), x, out, row_blocks, height, width, diagonal, M=m, N=n)
    return out


def flip(self: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """y[…, i, …] = x[…, n − 1 − i, …] along `dims`"""
    if self.is_complex():
        raise Unsupported("complex flips")
    chosen = [d for d in normalise(dims, self.dim()) if self.shape[d] > 1] if dims else []
    if not chosen:
        return same(self)
    out = empty_like(self)
    if out.numel():
        last = self
        for d in chosen:
            last = last.narrow(d, self.shape[d] - 1, 1)
        same.launch(plan_reversed(self, out, chosen), [last], [], [out], self.dtype)
    return out
