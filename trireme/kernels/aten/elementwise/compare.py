"""Comparisons: eq, ne, lt, le, gt, ge, and closeness. Knows scalar formulas; layout and types are `pointwise`'s."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trireme.kernels.aten.elementwise.pointwise import pointwise
from trireme.kernels.launch import Unsupported


@pointwise("bool")
def eq(x, y):
    return x == y


@pointwise("bool")
def ne(x, y):
    return x != y


@pointwise("bool")
def lt(x, y):
    return x < y


@pointwise("bool")
def le(x, y):
    return x <= y


@pointwise("bool")
def gt(x, y):
    return x > y


@pointwise("bool")
def ge(x, y):
    return x >= y


@triton.jit
def _near(x, y, rtol, atol):
    off = tl.abs(x - y)
    return (x == y) | ((off <= atol + tl.abs(rtol * y)) & (off != float("inf")))


@pointwise("bool", scalars=2)
def _isclose(x, y, rtol, atol):
    """|x − y| ≤ atol + rtol |y|, and infinities only to themselves"""
    return _near(x, y, rtol, atol)


@pointwise("bool", scalars=2)
def _isclose_nan(x, y, rtol, atol):
    """the same, with NaN close to NaN"""
    return _near(x, y, rtol, atol) | ((x != x) & (y != y))


def isclose(
    self: torch.Tensor, other: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> torch.Tensor:
    """|x − y| ≤ atol + rtol |y|"""
    if self.dtype != other.dtype:
        raise RuntimeError(f"{self.dtype} did not match {other.dtype}; isclose takes two tensors of one type")
    if not (rtol >= 0 and atol >= 0):  # NaN is neither
        raise RuntimeError(f"rtol and atol must be at least zero, but are {rtol} and {atol}")
    if self.is_complex():
        raise Unsupported("complex numbers")
    if not self.is_floating_point():
        if rtol == 0 and atol == 0:
            return eq(self, other)
        raise Unsupported("integers compare in their own width")
    return _isclose_nan(self, other, rtol, atol) if equal_nan else _isclose(self, other, rtol, atol)
