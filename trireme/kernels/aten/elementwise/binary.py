"""Arithmetic of two operands: add, sub, mul, div, pow, outer. Knows scalar formulas; layout and types are `pointwise`'s."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from trireme.kernels import scalar
from trireme.kernels.aten.elementwise.pointwise import Number, pointwise, promoted, require_held
from trireme.kernels.aten.elementwise.unary import reciprocal, rsqrt, same

_HALVES = (torch.float16, torch.bfloat16)


@pointwise()
def _add(x, y):
    return x + y


@pointwise(scalars=1)
def _add_scaled(x, y, alpha):
    return x + (y * alpha).to(x.dtype)


@pointwise()
def _sub(x, y):
    return x - y


@pointwise()
def mul(x, y):
    return x * y


@pointwise("float")
def _div(x, y):
    return scalar.divide(x, y)


@pointwise("float")
def _half_div(x, y):
    return x / y


@pointwise(subnormal=True)
def _power(x, y):
    return scalar.power(x, y)


@pointwise()
def _half_power(x, y):
    return scalar.half_power(x, y)


@pointwise(scalars=1)
def _half_power_by(x, y):
    return scalar.half_power_by(x, y)


@pointwise()
def _positive_half_power(x, y):
    return scalar.positive_half_power(x, y)


@pointwise()
def _integer_power(x, y):
    return scalar.integer_power(x, y)


@pointwise()
def _square(x):
    return x * x


@pointwise()
def _cube(x):
    return x * x * x


@pointwise()
def _inverse_square(x):
    return scalar.divide(tl.full((1,), 1.0, x.dtype), x * x)


@pointwise()
def _root(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@pointwise()
def _unit(x):
    return tl.zeros_like(x) + 1


# As torch has them, so that −∞ has no root, and that of −0 is −0.
_SIMPLE: dict[Number, Any] = {
    0: _unit, 1: same, 2: _square, 3: _cube, 0.5: _root, -0.5: rsqrt, -1: reciprocal, -2: _inverse_square,
}  # fmt: skip


def add(self: Any, other: Any, *, alpha: Number = 1) -> torch.Tensor:
    """x + α y"""
    _check_alpha(promoted([self, other]), alpha)
    return _add(self, other) if alpha == 1 else _scaled(self, other, alpha)


def sub(self: Any, other: Any, *, alpha: Number = 1) -> torch.Tensor:
    """x − α y"""
    if _is_bool(self) or _is_bool(other):
        raise RuntimeError("Subtraction, the `-` operator, with a bool tensor is not supported; use `^` or logical_xor()")
    _check_alpha(promoted([self, other]), alpha)
    return _sub(self, other) if alpha == 1 else _scaled(self, other, -alpha)


def _scaled(self: Any, other: Any, alpha: Number) -> torch.Tensor:
    dtype = promoted([self, other])
    return _add_scaled(self, other, float(alpha) if dtype.is_floating_point else int(bool(alpha) if dtype is torch.bool else alpha))


def _check_alpha(dtype: torch.dtype, alpha: Number) -> None:
    if isinstance(alpha, bool) and dtype is not torch.bool:
        raise RuntimeError("Boolean alpha only supported for Boolean results.")
    if isinstance(alpha, float) and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool) or (isinstance(x, torch.Tensor) and x.dtype is torch.bool)


def div(self: Any, other: Any) -> torch.Tensor:
    """x / y, a float even of integers"""
    return (_half_div if promoted([self, other]) in _HALVES else _div)(self, other)


def pow_tensor_tensor(self: Any, exponent: Any) -> torch.Tensor:
    """x ** y, element by element"""
    dtype = promoted([self, exponent])
    if not dtype.is_floating_point:
        return _integer_power(self, exponent)
    return _half_power(self, exponent) if dtype in _HALVES else _power(self, exponent)


def pow_scalar(self: Number, exponent: torch.Tensor) -> torch.Tensor:
    """c ** y"""
    if not isinstance(self, complex) and self > 0 and exponent.dtype in _HALVES:
        return _positive_half_power(self, exponent)
    return pow_tensor_tensor(self, exponent)


def pow_tensor_scalar(self: torch.Tensor, exponent: Number) -> torch.Tensor:
    """x ** c; squares, cubes and their like by multiplication and division"""
    dtype = promoted([self, exponent])
    require_held(dtype, exponent)
    if not dtype.is_floating_point:
        if not isinstance(exponent, complex) and exponent < 0:
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        return _integer_power(self, exponent)
    if exponent in _SIMPLE and self.dtype is dtype:
        return _SIMPLE[exponent](self)
    if self.dtype in _HALVES and exponent == exponent:
        return _half_power_by(self, float(exponent))
    return _half_power(self, exponent) if dtype in _HALVES else _power(self, exponent)


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return outer_forward(x, y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return (grad * y).sum(1).to(x.dtype), (grad * x[:, None]).sum(0).to(y.dtype)


def outer_forward(self: torch.Tensor, vec2: torch.Tensor) -> torch.Tensor:
    """x yᵀ"""
    if self.dim() != 1 or vec2.dim() != 1:
        raise RuntimeError(f"outer: Expected 1-D arguments, but got {self.dim()}-D and {vec2.dim()}-D")
    return mul(self[:, None], vec2)


def outer(self: torch.Tensor, vec2: torch.Tensor) -> torch.Tensor:
    """x yᵀ, differentiable"""
    return _Outer.apply(self, vec2)
