"""Norm layers. If called with a residual, they add it first and return (norm(x + residual), x + residual)."""

from __future__ import annotations

from torch import Tensor

from trireme.layers.env import Env, Read
from trireme.layers.module import Module
from trireme.quant import decode


class RMSNorm(Module):
    """x / rms(x) * (weight + offset). Gemma's weights have an offset of 1."""

    def __init__(self, env: Env, size: int, eps: float, offset: float = 0.0):
        self.env, self.size, self.eps, self.offset = env, size, eps, offset

    def load(self, read: Read, path: str = "") -> None:
        self.weight = decode(read(f"{path}.weight", (self.size,)), self.env.dtype, self.env.device)
        if self.offset:
            self.weight = self.weight + self.offset

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.env.ops.rms_norm(x, self.weight, self.eps), x
        return self.env.ops.add_rms_norm(x, residual, self.weight, self.eps)


class HeadNorm(RMSNorm):
    """The norm of each query or key head."""

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.env.ops.qk_norm(x, self.weight, self.eps)


class WholeNorm(RMSNorm):
    """The norm over all query or key heads at once (OLMo 2). Each rank has its own heads, and the ranks add their squares up."""

    def __init__(self, env: Env, total: int, span: slice, eps: float, sharers: int = 1):
        """span: this rank's part of the `total` columns; sharers: how many ranks have the same part"""
        super().__init__(env, total, eps)
        self.span, self.sharers = span, sharers

    def load(self, read: Read, path: str = "") -> None:
        self.weight = decode(read(f"{path}.weight", (self.size,)).rows(self.span), self.env.dtype, self.env.device)

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x: [tokens, heads of this rank, dim]"""
        if self.env.tp.size == 1:
            return self.env.ops.rms_norm(x.flatten(1), self.weight, self.eps).view_as(x)
        wide = x.flatten(1).float()
        squares = self.env.tp.comm.all_reduce(wide.square().sum(-1, keepdim=True) / self.sharers)
        normed = wide * (squares / self.size + self.eps).rsqrt()
        return (normed * self.weight.float()).to(x.dtype).view_as(x)


class LayerNorm(Module):
    """(x - mean) / std * weight + bias"""

    def __init__(self, env: Env, size: int, eps: float, bias: bool = True):
        self.env, self.size, self.eps, self.has_bias = env, size, eps, bias

    def load(self, read: Read, path: str = "") -> None:
        self.weight = decode(read(f"{path}.weight", (self.size,)), self.env.dtype, self.env.device)
        bias = read(f"{path}.bias", (self.size,)) if self.has_bias else None
        self.bias = None if bias is None else decode(bias, self.env.dtype, self.env.device)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.env.ops.layer_norm(x, self.weight, self.bias, self.eps), x
        return self.env.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
