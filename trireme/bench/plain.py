"""Backends that compute a device's weight methods in plain torch: the same rounded weights and activations, summed in float32.

Knows which devices have such a form; how they round stands in `plain_cpu` and `plain_cuda`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.backends.registry import BUILT_IN
from trireme.errors import BadConfig
from trireme.ops import Ops
from trireme.quant import WeightMethod

FORMS = {"cpu": "trireme.bench.plain_cpu:PlainCpu", "cuda": "trireme.bench.plain_cuda:PlainCuda"}
ROUNDED_BY_ROWS = ("cpu",)  # where steps of few tokens are rounded in another way than those of many


def plain_backend(name: str) -> str:
    """The name of the backend that computes in plain torch as backend `name` rounds."""
    if name not in FORMS:
        raise BadConfig(f"--plain has no plain form of the backend {name!r}.", f"use --backend {' or --backend '.join(FORMS)}")
    BUILT_IN[f"plain {name}"] = FORMS[name]
    return f"plain {name}"


class Plain(WeightMethod):
    """What a method of a device keeps, as float32 matrices. Subclasses say how the device rounds activations."""

    title = "plain"

    def __init__(self, values: list[Tensor], bias: Tensor | None):
        self.values, self.bias = values, bias

    def product(self, i: int, x: Tensor) -> Tensor:
        """x, rounded as the device does for matrix i, times that matrix."""
        raise NotImplementedError

    def linear(self, ops: Ops, x: Tensor) -> Tensor:
        y = torch.cat([self.product(i, x) for i in range(len(self.values))], -1)
        return y if self.bias is None else y + self.bias

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        return self.values[0][ids.long()]

    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.values)
