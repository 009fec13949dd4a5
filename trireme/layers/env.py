"""The environment that every layer is built with. It is passed as an argument; the engine has no global state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from trireme.ops import Ops
from trireme.parallel import Group, Mesh
from trireme.quant import Stored, WeightMethod, choose

Layer = TypeVar("Layer")
Read = Callable[[str, tuple[int, ...]], Stored]  # (name, expected shape) -> the stored tensor; refuses any other shape


class Device(Protocol):
    """What a layer needs of a backend."""

    ops: Ops
    device: torch.device
    layers: Mapping[type, type]
    methods: Mapping[str, type[WeightMethod]]
    coarse_few_rows: bool


@dataclass(frozen=True)
class Env:
    backend: Device
    dtype: torch.dtype = torch.float32
    mesh: Mesh = field(default_factory=Mesh)
    quantize: str = "auto"
    max_len: int = 4096  # positions for which rope tables are made

    @property
    def tp(self) -> Group:
        return self.mesh.tp

    @property
    def ops(self) -> Ops:
        return self.backend.ops

    @property
    def device(self) -> torch.device:
        return self.backend.device

    def new(self, cls: type[Layer], *args: Any, **kwargs: Any) -> Layer:
        """Builds a layer, or the backend's own version of it."""
        return self.backend.layers.get(cls, cls)(self, *args, **kwargs)

    def keep(self, x: Tensor, only: Tensor | None) -> Tensor:
        """The rows of x that `only` names; all rows if it is None."""
        return x if only is None else self.ops.select(x, only)

    def weights(self, parts: list[Stored], bias: Tensor | None) -> WeightMethod:
        """Loads stacked matrices in the form chosen for this backend."""
        return choose(self.quantize, parts, self.backend.methods).load(parts, bias, self.dtype, self.device)
