"""Whether two tensors are close everywhere: a comparison, and a fold of what it says."""

from __future__ import annotations

import torch

from trireme.kernels.aten.calls.repeat import repeating
from trireme.kernels.aten.elementwise.compare import isclose
from trireme.kernels.aten.folds import reduce

_all = repeating(reduce.all_dims)  # a bool is no tensor, so `allclose` itself cannot be repeated, but its steps can


def allclose(self: torch.Tensor, other: torch.Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """whether every element is close"""
    return bool(_all(isclose(self, other, rtol, atol, equal_nan)).item())
