"""Layers the CPU backend writes itself, where one C step can do what the op table would do in several."""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.backends.cpu.methods import Packed
from trireme.backends.cpu.ops import CpuOps, gate_transform, readable
from trireme.backends.cpu.program import PLAIN, Transform
from trireme.layers import Attention, Batch, GatedMLP, HeadNorm, Linear


class CpuAttention(Attention):
    """Heads are normed and turned where the projection left them, and stored, in one step."""

    def __call__(self, x: Tensor, batch: Batch, only: Tensor | None = None, key: int | None = None) -> Tensor:
        ops, cache = self.env.ops, batch.caches[self.layer if key is None else key]
        looked_at = self.q_norm is not None and not (isinstance(self.q_norm, HeadNorm) and isinstance(self.k_norm, HeadNorm))
        if x.dtype != torch.float32 or not readable(cache) or looked_at:
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
        """Whether the weights before it were rounded anyway, so that attention may be."""
        weight = self.qkv.weight
        return isinstance(weight, Packed) and any(part.kind != "f32" for part in weight.weights)


class CpuGatedMLP(GatedMLP):
    """The gate's activation happens as the down projection reads its input."""

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(self.down, Linear) or not isinstance(self.down.weight, Packed):  # a tap stands where somebody looks
            return super().__call__(x)
        y = self.down.weight.linear(self.env.ops, self.gate_up(x), gate_transform(self.activation))
        return self.env.tp.comm.all_reduce(y)
