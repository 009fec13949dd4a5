"""Plain int8 weights: one scale per output row, made at load from whatever the checkpoint holds."""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.ops import Ops
from trireme.quant.base import Stored, WeightMethod, decode, take_tensors


class Int8(WeightMethod):
    """weight ≈ q * scale.  q: [out, in] int8; scale: [out] float32"""

    title = "int8"

    def __init__(self, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype):
        self.q, self.scale, self.bias, self.dtype = q, scale, bias, dtype

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Int8:
        pieces = [_quantize(decode(part, torch.float32, device)) for part in parts]
        return cls(torch.cat([q for q, _ in pieces]), torch.cat([scale for _, scale in pieces]), bias, dtype)

    def linear(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.linear_int8(x, self.q, self.scale, self.bias)

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        rows = ops.embedding(ids, self.q).to(self.dtype)
        return rows * ops.embedding(ids, self.scale.unsqueeze(1)).to(self.dtype)

    def take(self, new: WeightMethod) -> bool:
        return take_tensors(self, new)

    def num_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.q.numel() + 4 * self.scale.numel() + bias


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = (weight.abs().amax(1) / 127.0).clamp_min(1e-30)
    return (weight / scale.unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8), scale
