"""The products of the CPU's packed weights in plain torch. Knows packed weights and how the kernels round; nothing of models."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from trireme.backends.cpu import library
from trireme.backends.cpu.methods import METHODS, Packed
from trireme.backends.cpu.weights import PackedWeight
from trireme.backends.reference import Reference
from trireme.bench.plain import Plain
from trireme.quant import Stored

GROUP = 32  # activations that share a scale
WIDE = {"amx": 16, "bf16": 16}  # instruction sets that multiply bfloat16, and from how many rows on


class PlainPacked(Plain):
    packed: ClassVar[type[Packed]]

    def __init__(self, weights: list[PackedWeight], bias: Tensor | None):
        super().__init__([weight.floats() for weight in weights], bias)
        self.kinds, self.orders = [weight.kind for weight in weights], [weight.order for weight in weights]

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> PlainPacked:
        made = cls.packed.load(parts, bias, dtype, device)
        return cls(made.weights, made.bias)

    def product(self, i: int, x: Tensor) -> Tensor:
        """With many rows some chips multiply bfloat16; with few rows activations have eight bits."""
        kind, values, order = self.kinds[i], self.values[i], self.orders[i]
        x = x if order is None else x.index_select(1, order)
        if kind == "f32":
            return x @ values.t()
        if len(x) >= WIDE.get(library.isa(), len(x) + 1):
            return x.bfloat16().float() @ values.bfloat16().float().t()
        return (x if kind in ("bf16", "f16") else rounded(x)) @ values.t()


class PlainCpu(Reference):
    methods = {name: type(f"Plain{method.__name__}", (PlainPacked,), {"packed": method}) for name, method in METHODS.items()}


def rounded(x: Tensor) -> Tensor:
    """Whole numbers from -127 to 127 times a scale for each group of columns."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    largest = padded.abs().amax(-1, keepdim=True)
    numbers = (padded * (127.0 / largest.clamp_min(1e-30))).round()
    return (numbers * (largest / 127.0)).flatten(1)[:, : x.shape[1]]
