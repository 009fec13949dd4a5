"""Attention layers: projections, positions, and one attention op over the cache. Knows heads; nothing of other layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trireme.layers.batch import Batch
from trireme.layers.env import Env
from trireme.layers.linear import Linear, Rows
from trireme.layers.module import Module
from trireme.layers.norm import HeadNorm, WholeNorm
from trireme.layers.rope import Rope
from trireme.ops import AttentionKind, CacheSpec


@dataclass(frozen=True)
class Heads:
    """The heads of a model's attention."""

    num: int
    num_kv: int
    dim: int


@dataclass(frozen=True)
class HeadNormSpec:
    """The norm of query and key heads, for the models that have one."""

    eps: float
    offset: float = 0.0
    whole: bool = False  # over all heads at once, not over each


@dataclass(frozen=True)
class Projections:
    """What a model's projections have besides their matrices."""

    bias: bool = False  # of q, k and v
    out_bias: bool = False
    norm: HeadNormSpec | None = None  # of each query and key head


class Attention(Module):
    """Grouped-query attention with rope over the cache."""

    def __init__(
        self,
        env: Env,
        hidden: int,
        heads: Heads,
        layer: int,
        rope: Rope,
        *,
        scale: float | None = None,
        window: int = 0,
        projections: Projections = Projections(),
    ):
        self.env, self.layer, self.dim, self.rope = env, layer, heads.dim, rope
        q, kv = env.tp.heads(heads.num, heads.num_kv)
        self.num_kv_heads = kv.stop - kv.start
        self.qkv = env.new(Linear, hidden, qkv_rows(heads, q, kv), cut="out", bias=projections.bias)
        columns = slice(q.start * heads.dim, q.stop * heads.dim)
        self.out = env.new(Linear, heads.num * heads.dim, {"o_proj": hidden}, cut="in", bias=projections.out_bias, columns=columns)
        self.q_norm, self.k_norm = (_norm(env, heads, projections.norm, which) for which in ("q", "k"))
        self.kind = AttentionKind(scale=heads.dim**-0.5 if scale is None else scale, window=window)

    def cache_specs(self) -> dict[int, CacheSpec]:
        shape = self.num_kv_heads, self.dim
        return {self.layer: CacheSpec(shape, shape, window=self.kind.window, chunked=self.kind.chunked)}

    def __call__(self, x: Tensor, batch: Batch, only: Tensor | None = None, key: int | None = None) -> Tensor:
        """The attention output of each token.

        only: the tokens to compute, None for all; key: the key of the layer's cache, if it is not the layer's number
        """
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv.split(x))
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cache = batch.caches[self.layer if key is None else key]
        view = batch.views[cache.band]
        q = self.env.ops.qkv_rope_store(q, k, v, *self.rope.at(batch), cache, view.slots)
        mixed = self.env.ops.attention(q, cache, view.plan, self.kind).flatten(1)
        return self.out(self.env.keep(mixed, only))


def _norm(env: Env, heads: Heads, norm: HeadNormSpec | None, which: Literal["q", "k"]) -> HeadNorm | WholeNorm | None:
    if norm is None or not norm.whole:
        return env.new(HeadNorm, heads.dim, norm.eps, norm.offset) if norm else None
    q, kv = env.tp.heads(heads.num, heads.num_kv)
    if which == "q":
        return env.new(WholeNorm, heads.num * heads.dim, slice(q.start * heads.dim, q.stop * heads.dim), norm.eps)
    sharers = sum(env.tp.span(heads.num_kv, rank=rank) == kv for rank in range(env.tp.size))
    return env.new(WholeNorm, heads.num_kv * heads.dim, slice(kv.start * heads.dim, kv.stop * heads.dim), norm.eps, sharers)


def qkv_rows(heads: Heads, q: slice, kv: slice) -> list[Rows]:
    """The rows of q_proj, k_proj and v_proj that a rank with these heads owns."""
    dim = heads.dim
    kv_rows = slice(kv.start * dim, kv.stop * dim)
    return [
        Rows("q_proj", heads.num * dim, slice(q.start * dim, q.stop * dim)),
        Rows("k_proj", heads.num_kv * dim, kv_rows),
        Rows("v_proj", heads.num_kv * dim, kv_rows),
    ]


def alibi_slopes(num_heads: int) -> Tensor:
    """The slope of each head. For a power of two of heads it is a geometric series that ends at 2^-8. Further heads take every
    second number of the series for twice as many heads.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(num_heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32)
