"""Choosing and bounding: where, clamp. Knows scalar formulas; layout and types are `pointwise`'s."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from trireme.kernels.aten.elementwise.pointwise import Number, pointwise, promoted, require_held
from trireme.kernels.launch import Unsupported


@pointwise("condition")
def _where(condition, x, y):
    return tl.where(condition, x, y)


@pointwise()
def _clamp(x, low, high):
    """min(max(x, low), high); NaN anywhere stays NaN"""
    raised = tl.where((x < low) | (low != low), low, x)
    return tl.where((raised > high) | (high != high), high, raised)


@pointwise()
def _clamp_low(x, low):
    return tl.where((x < low) | (low != low), low, x)


@pointwise()
def _clamp_high(x, high):
    return tl.where((x > high) | (high != high), high, x)


def where(condition: torch.Tensor, self: Any, other: Any) -> torch.Tensor:
    """x where the condition holds, else y"""
    if condition.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"where expected condition to be a boolean tensor, but got a tensor with dtype {condition.dtype}")
    require_held(promoted([self, other]), self, other)
    return _where(condition, self, other)


def clamp(self: torch.Tensor, min: Number | torch.Tensor | None = None, max: Number | torch.Tensor | None = None) -> torch.Tensor:
    """min(max(x, low), high)"""
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    dtype = promoted([x for x in (self, min, max) if x is not None])
    if dtype is torch.bool:
        raise Unsupported("bounds of truth values, which torch refuses in its own words")
    require_held(dtype, min, max)
    if min is None:
        return _clamp_high(self, max)
    return _clamp_low(self, min) if max is None else _clamp(self, min, max)
