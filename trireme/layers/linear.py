"""Linear layers: what they read of the checkpoint and how they are cut over the tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from trireme.layers.env import Env, Read
from trireme.layers.module import Module, calls_as
from trireme.quant import WeightMethod, decode


@dataclass(frozen=True)
class Rows:
    """Some rows of one checkpoint matrix that has `total` of them."""

    name: str
    total: int
    rows: slice | np.ndarray

    @property
    def count(self) -> int:
        return len(range(*self.rows.indices(self.total))) if isinstance(self.rows, slice) else len(self.rows)


class Linear(Module):
    """y = x Wᵀ + b, cut over the tensor-parallel group by output ("out") or by input ("in").

    `outs` names the checkpoint matrices stacked into W, so that q/k/v or gate/up are one matmul: {name: rows}, cut in units of
    `unit`, or exactly the rows given. Names are read beside this layer's own path. `turned`: they are stored [in, out].
    """

    weight: WeightMethod

    def __init__(
        self,
        env: Env,
        n_in: int,
        outs: dict[str, int] | list[Rows],
        *,
        cut: Literal["out", "in"] | None = None,
        unit: int = 1,
        bias: bool = False,
        columns: slice | None = None,
        turned: bool = False,
    ):
        self.env, self.n_in, self.cut, self.bias, self.turned = env, n_in, cut, bias, turned
        if isinstance(outs, dict):
            outs = [Rows(name, n, env.tp.span(n, unit) if cut == "out" else slice(0, n)) for name, n in outs.items()]
        self.parts = outs
        self.columns = columns or (env.tp.span(n_in, unit) if cut == "in" else slice(0, n_in))
        self.widths = [part.count for part in outs]

    def load(self, read: Read, path: str = "") -> None:
        home = path.rpartition(".")[0]
        prefix = f"{home}." if home else ""
        parts = []
        for part in self.parts:
            shape = (self.n_in, part.total) if self.turned else (part.total, self.n_in)
            stored = read(f"{prefix}{part.name}.weight", shape)
            stored = (stored.turned() if self.turned else stored).rows(part.rows)
            parts.append(stored.columns(self.columns) if self.cut == "in" else stored)
        self.weight = self.env.weights(parts, self._load_bias(read, prefix))

    def _load_bias(self, read: Read, prefix: str) -> Tensor | None:
        if not self.bias:
            return None
        pieces = [read(f"{prefix}{part.name}.bias", (part.total,)).rows(part.rows) for part in self.parts]
        bias = torch.cat([decode(piece, self.env.dtype, self.env.device) for piece in pieces])
        # if cut by input, the ranks' products are summed, so only one rank adds the bias
        return torch.zeros_like(bias) if self.cut == "in" and self.env.tp.rank else bias

    def __call__(self, x: Tensor) -> Tensor:
        y = self.weight.linear(self.env.ops, x)
        return self.env.tp.comm.all_reduce(y) if self.cut == "in" else y

    def gated(self, x: Tensor, kind: str) -> Tensor:
        """activation(gate) * up of the product, whose first half is the gate; not for one that is cut by input."""
        if not calls_as(self, Linear):
            return self.env.ops.gated(self(x), kind)
        return self.weight.gated(self.env.ops, x, kind)

    @property
    def takes_gated(self) -> bool:
        """Whether `of_gated` is faster than calling the gate separately."""
        return self.weight.takes_gated

    def of_gated(self, x: Tensor, kind: str) -> Tensor:
        """The product with activation(gate) * up of x, whose first half is the gate."""
        if not calls_as(self, Linear):
            return self(self.env.ops.gated(x, kind))
        y = self.weight.of_gated(self.env.ops, x, kind)
        return self.env.tp.comm.all_reduce(y) if self.cut == "in" else y

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The product, cut into its parts."""
        return self.env.ops.split(self(x), self.widths)
