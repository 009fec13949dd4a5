"""The CPU backend's own layers. One C step in them does the work of several ops."""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.backends.cpu.methods import Packed
from trireme.backends.cpu.ops import CpuOps, readable
from trireme.backends.cpu.program import PLAIN, Transform
from trireme.layers import Attention, Batch, GatedMLP, HeadNorm, calls_as


class CpuAttention(Attention):
    """Attention that applies norm and rope to the heads in place and stores keys and values, all in one step."""

    def __call__(self, x: Tensor, batch: Batch, only: Tensor | None = None, key: int | None = None) -> Tensor:
        ops, cache = self.env.ops, batch.caches[self.layer if key is None else key]
        wrapped = any(norm is not None and not calls_as(norm, HeadNorm) for norm in (self.q_norm, self.k_norm))
        if x.dtype != torch.float32 or not readable(cache) or wrapped:
            return super().__call__(x, batch, only, key)
        assert isinstance(ops, CpuOps), type(ops)
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv.split(x))
        norms = PLAIN
        if self.q_norm and self.k_norm:
            norms = Transform(weight=self.q_norm.weight.float(), bias=self.k_norm.weight.float(), epsilon=self.q_norm.eps)
        view = batch.views[cache.band]
        ops.rope_store_in_place(q, k, v, *self.rope.at(batch), cache, view.slots, norms)
        mixed = ops.attention(q, cache, view.plan, self.kind, self.rounded).flatten(1)
        return self.out(self.env.keep(mixed, only))

    @property
    def rounded(self) -> bool:
        """Whether the weights before it are rounded, so that attention may be rounded too."""
        weight = self.qkv.weight
        return isinstance(weight, Packed) and any(part.kind != "f32" for part in weight.weights)


class CpuGatedMLP(GatedMLP):
    """A gated MLP that applies the gate's activation while the down projection reads its input."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.down.of_gated(self.gate_up(x), self.activation)
