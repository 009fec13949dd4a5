"""One tensor in, one out, element by element: abs, cos, exp, gelu, neg, reciprocal, relu, rsqrt, sigmoid, silu, sin, tanh,
isfinite, isinf, isnan, bitwise_not. Knows scalar formulas; layout and types are `pointwise`'s."""

from __future__ import annotations

import torch
import triton.language as tl

from trireme.kernels import scalar
from trireme.kernels.aten.elementwise.pointwise import pointwise

_HALVES = (torch.float16, torch.bfloat16)


@pointwise()
def same(x):
    return x


@pointwise()
def _abs(x):
    return tl.abs(x)


@pointwise("float")
def _cos(x):
    return tl.cos(x)


@pointwise("float")
def _sin(x):
    return tl.sin(x)


@pointwise("float")
def _quick_cos(x):
    return scalar.quick_cos(x)


@pointwise("float")
def _quick_sin(x):
    return scalar.quick_sin(x)


@pointwise("float")
def exp(x):
    return tl.exp(x)


@pointwise("float")
def rsqrt(x):
    return tl.rsqrt(x)


@pointwise("float")
def _reciprocal(x):
    return scalar.divide(tl.full((1,), 1.0, x.dtype), x)


@pointwise("float")
def _half_reciprocal(x):
    return 1.0 / x


@pointwise("float")
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@pointwise("float")
def _tanh(x):
    return scalar.tanh(x)


@pointwise("float")
def _half_tanh(x):
    return scalar.half_tanh(x)


@pointwise()
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@pointwise()
def _gelu(x):
    return scalar.gelu(x)


@pointwise()
def _half_gelu(x):
    return scalar.half_gelu(x)


@pointwise()
def _gelu_tanh(x):
    return scalar.gelu_tanh(x)


@pointwise()
def _relu(x):
    return tl.where(x < 0, 0, x).to(x.dtype)


@pointwise()
def _neg(x):
    return x * -1.0 if x.dtype.is_floating() else -x  # Triton's −x is 0 − x, which loses the sign of a zero


@pointwise()
def _bitwise_not(x):
    return ~x


@pointwise()
def _byte_not(x):
    return 255 - x


@pointwise()
def _logical_not(x):
    return x == 0


@pointwise("bool")
def isfinite(x):
    return (x - x) == 0


@pointwise("bool")
def isinf(x):
    return (x == x) & ((x - x) != (x - x))


@pointwise("bool")
def isnan(x):
    return x != x


def reciprocal(self: torch.Tensor) -> torch.Tensor:
    """1 / x"""
    return (_half_reciprocal if self.dtype in _HALVES else _reciprocal)(self)


def tanh(self: torch.Tensor) -> torch.Tensor:
    """tanh x"""
    return (_half_tanh if self.dtype in _HALVES else _tanh)(self)


def cos(self: torch.Tensor) -> torch.Tensor:
    """cos x"""
    return (_quick_cos if self.dtype in _HALVES else _cos)(self)


def sin(self: torch.Tensor) -> torch.Tensor:
    """sin x"""
    return (_quick_sin if self.dtype in _HALVES else _sin)(self)


def absolute(self: torch.Tensor) -> torch.Tensor:
    """|x|"""
    return same(self) if self.dtype in (torch.bool, torch.uint8) else _abs(self)


def neg(self: torch.Tensor) -> torch.Tensor:
    """−x"""
    if self.dtype is torch.bool:
        raise RuntimeError("Negation, the `-` operator, on a bool tensor is not supported; use `~` or logical_not()")
    return _neg(self)


def relu(self: torch.Tensor) -> torch.Tensor:
    """max(x, 0); NaN stays"""
    if self.dtype is torch.bool:
        raise RuntimeError("relu has no meaning for bool tensors; convert to a number type first")
    return _relu(self)


def silu(self: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(−x))"""
    _require_float(self, "silu")
    return _silu(self)


def gelu(self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """x Φ(x), or its tanh approximation"""
    _require_float(self, "gelu")
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    if approximate == "tanh":
        return _gelu_tanh(self)
    return (_half_gelu if self.dtype in _HALVES else _gelu)(self)


def bitwise_not(self: torch.Tensor) -> torch.Tensor:
    """~x; for bool the logical complement"""
    if self.is_floating_point():
        raise NotImplementedError("bitwise_not takes integers or bool; convert the tensor first")
    return {torch.bool: _logical_not, torch.uint8: _byte_not}.get(self.dtype, _bitwise_not)(self)


def _require_float(x: torch.Tensor, name: str) -> None:
    if not (x.is_floating_point() or x.is_complex()):
        raise NotImplementedError(f'"{name}" not implemented for {x.dtype}; convert the tensor to a float type')
