"""The device mesh, seen from one rank: which share it owns along each axis, and how it communicates with the other ranks.

Knows counts and collectives; nothing of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """The collectives of one group of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor: ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor: ...

    def reduce_scatter(self, x: Tensor) -> Tensor: ...

    def all_to_all(self, x: Tensor) -> Tensor: ...


class Alone:
    """A group of one rank, which needs no communication."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Group:
    rank: int = 0
    size: int = 1
    comm: Comm = field(default_factory=Alone)

    def span(self, n: int, unit: int = 1, rank: int | None = None) -> slice:
        """The part of an axis of length `n` that this rank owns. Units are never cut. If there are too few, ranks share one."""
        units, rank = n // unit, self.rank if rank is None else rank
        low = rank * units // self.size
        high = max((rank + 1) * units // self.size, low + 1)
        return slice(low * unit, n if high == units else high * unit)

    def sizes(self, n: int, unit: int = 1) -> list[int]:
        """How much of the axis each rank owns."""
        spans = (self.span(n, unit, rank) for rank in range(self.size))
        return [span.stop - span.start for span in spans]

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[slice, slice]:
        """The query heads and the KV heads that this rank owns, which include the KV head of each of its query heads. If there are
        fewer KV heads than ranks, ranks share a KV head and divide its query heads."""
        per_kv = num_heads // num_kv_heads
        kv = self.span(num_kv_heads)
        if num_kv_heads >= self.size:
            return slice(kv.start * per_kv, kv.stop * per_kv), kv
        sharers = [rank for rank in range(self.size) if self.span(num_kv_heads, rank=rank) == kv]
        inner = Group(sharers.index(self.rank), len(sharers)).span(per_kv)
        first = kv.start * per_kv
        return slice(first + inner.start, first + inner.stop), kv


@dataclass(frozen=True)
class Mesh:
    """The axes along which a model is spread over ranks. An axis of size 1 spreads nothing."""

    tp: Group = field(default_factory=Group)  # tensor: each rank has a share of every matrix
    pp: Group = field(default_factory=Group)  # pipeline: each rank has some of the layers
    ep: Group = field(default_factory=Group)  # experts: each rank has some of the experts
    dp: Group = field(default_factory=Group)  # data: each rank has requests of its own
