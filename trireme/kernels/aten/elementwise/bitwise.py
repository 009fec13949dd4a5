"""Bitwise and, or. Knows scalar formulas; layout and types are `pointwise`'s."""

from __future__ import annotations

from typing import Any

import torch

from trireme.kernels.aten.elementwise.pointwise import pointwise, promoted


@pointwise()
def _and(x, y):
    return x & y


@pointwise()
def _or(x, y):
    return x | y


def bitwise_and(self: Any, other: Any) -> torch.Tensor:
    """x & y"""
    _require_integer(self, other, "bitwise_and")
    return _and(self, other)


def bitwise_or(self: Any, other: Any) -> torch.Tensor:
    """x | y"""
    _require_integer(self, other, "bitwise_or")
    return _or(self, other)


def _require_integer(x: Any, y: Any, name: str) -> None:
    dtype = promoted([x, y])
    if dtype.is_floating_point or dtype.is_complex:
        raise NotImplementedError(f'"{name}" not implemented for {dtype}; it takes integers and bool')
