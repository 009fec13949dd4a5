"""Stacked matrices that no single weight method takes together: each is multiplied by a method of its own.

Knows weight methods; nothing of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from trireme.ops import Ops
from trireme.quant.base import Stored, WeightMethod

Choice = Callable[[list[Stored]], type[WeightMethod]]


class Joined(WeightMethod):
    """The products of several methods side by side."""

    title = "joined"
    method_of: ClassVar[Choice]

    def __init__(self, methods: list[WeightMethod]):
        self.methods = methods
        self.title = " and ".join(dict.fromkeys(method.title for method in methods))

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Joined:
        """Neighbours of one kind share a method."""
        runs: list[list[Stored]] = []
        for part in parts:
            if runs and runs[-1][-1].kind == part.kind:
                runs[-1].append(part)
            else:
                runs.append([part])
        rows = [sum(part.shape[0] for part in run) for run in runs]
        biases = [None] * len(runs) if bias is None else list(bias.split(rows))
        loaded = [cls.method_of(run).load(run, own, dtype, device) for run, own in zip(runs, biases, strict=True)]
        return cls(loaded)

    def linear(self, ops: Ops, x: Tensor) -> Tensor:
        return torch.cat([method.linear(ops, x) for method in self.methods], -1)

    def logits(self, ops: Ops, x: Tensor) -> Tensor:
        return torch.cat([method.logits(ops, x) for method in self.methods], -1)

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        raise AssertionError("a vocabulary is one matrix")

    def take(self, new: WeightMethod) -> bool:
        if not isinstance(new, Joined) or [type(method) for method in new.methods] != [type(method) for method in self.methods]:
            return False
        return all(mine.take(other) for mine, other in zip(self.methods, new.methods, strict=True))

    def num_bytes(self) -> int:
        return sum(method.num_bytes() for method in self.methods)


def joined(method_of: Choice) -> type[Joined]:
    return type("Joined", (Joined,), {"method_of": staticmethod(method_of)})
