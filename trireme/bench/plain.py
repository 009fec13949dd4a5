"""The products of the CPU's packed weights in plain torch: the same values, and activations rounded alike, summed in float32.

Knows packed weights and how the kernels round; nothing of models.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from trireme.backends.cpu import library
from trireme.backends.cpu.methods import METHODS, Packed
from trireme.ops import Ops
from trireme.quant import Stored, WeightMethod
from trireme.quant.choose import METHODS as OFFERED

GROUP = 32  # activations that share a scale
WIDE = {"amx": 16, "bf16": 16}  # instruction sets that multiply bfloat16, and from how many rows on


class Plain(WeightMethod):
    """What a packed method keeps, as float32 matrices."""

    title = "plain"
    packed: ClassVar[type[Packed]] = Packed

    def __init__(self, matrices: list[tuple[str, Tensor]], bias: Tensor | None):
        self.matrices, self.bias = matrices, bias

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Plain:
        made = cls.packed.load(parts, bias, dtype, device)
        return cls([(weight.kind, weight.floats()) for weight in made.weights], made.bias)

    def linear(self, ops: Ops, x: Tensor) -> Tensor:
        y = torch.cat([_product(kind, values, x) for kind, values in self.matrices], -1)
        return y if self.bias is None else y + self.bias

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        return self.matrices[0][1][ids.long()]

    def num_bytes(self) -> int:
        return sum(values.nbytes for _, values in self.matrices)


def offer_plain(method: str) -> str:
    """Makes the plain form of a method of the CPU one that `--quantize` takes; returns its name."""
    name = f"{method}-plain"
    OFFERED[name] = type(name, (Plain,), {"packed": METHODS[method]})
    return name


def _product(kind: str, values: Tensor, x: Tensor) -> Tensor:
    if kind == "f32":
        return x @ values.t()
    if len(x) >= WIDE.get(library.isa(), len(x) + 1):
        return x.bfloat16().float() @ values.bfloat16().float().t()
    return (x if kind in ("bf16", "f16") else rounded(x)) @ values.t()


def rounded(x: Tensor) -> Tensor:
    """Whole numbers from -127 to 127 times a scale for each group of columns."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    largest = padded.abs().amax(-1, keepdim=True)
    numbers = (padded * (127.0 / largest.clamp_min(1e-30))).round()
    return (numbers * (largest / 127.0)).flatten(1)[:, : x.shape[1]]
