"""The arguments of attention: where the step's tokens and their KV are, and which kind of attention a layer has.

Knows positions, pages and slots; nothing of models or of how a device computes. A backend's `plan_attention` sees a
step's layout as numpy on the host and as tensors on the device, and no layers. So the layout is described here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.ops import kv_kinds

Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]  # makes a tensor of zeros on a device


@dataclass(frozen=True)
class CacheSpec:
    """What a layer caches for each token: keys and values, each with the shape (heads, numbers of a head).

    `kind` names the storage, as `kv_kinds` describes.
    """

    k: tuple[int, int]
    v: tuple[int, int]
    kind: str = "plain"
    window: int = 0  # how many of the last tokens are ever read; 0: all
    chunked: bool = False  # whether what is read begins at a multiple of the window, as for AttentionKind
    shared: bool = False  # whether a value is the first numbers of its key, kept once

    @property
    def kept(self) -> tuple[tuple[int, int], ...]:
        """The shapes that take memory of their own."""
        return (self.k,) if self.shared else (self.k, self.v)

    def as_kind(self, kind: str) -> CacheSpec:
        """The same heads, kept as another kind; refused if the kind cannot keep heads of their size."""
        for _, width in self.kept:
            kv_kinds.check_head(kind, width)
        return replace(self, kind=kind)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return sum(heads * kv_kinds.bytes_of_head(self.kind, width, dtype) for heads, width in self.kept)


@dataclass
class KVCache:
    """The slots of one layer. k, v: [slots, heads, numbers], as `kind` keeps them."""

    k: Tensor
    v: Tensor
    scales: tuple[Tensor, Tensor] | None = None  # of k and v, where the kind has scales for each slot: [slots, heads, ...]
    shared: bool = False  # whether v is a part of k
    band: int = 0  # which of the step's views has its slots
    kind: str = "plain"
    value_dim: int = 0  # how many numbers a value has, if they are not as many as are kept
    factors: tuple[Tensor, Tensor] | None = None  # of fp8 and int8, where the checkpoint has them: [heads] float32 for k and v

    @classmethod
    def allocate(cls, spec: CacheSpec, num_slots: int, dtype: torch.dtype, zeros: Zeros) -> KVCache:
        made, scales = [], []
        for heads, width in spec.kept:
            count, kept = kv_kinds.stored(spec.kind, width, dtype)
            made.append(zeros((num_slots, heads, count), kept))
            beside = kv_kinds.scales_of(spec.kind, width)
            if beside:
                scales.append(zeros((num_slots, heads, *beside[0]), beside[1]))
        k, v = made[0], made[-1]
        if spec.shared and spec.kind != "int4":
            v = k[..., : spec.v[1]]
        return cls(k, v, (scales[0], scales[-1]) if scales else None, spec.shared, 0, spec.kind, spec.v[1])

    @property
    def is_alike(self) -> bool:
        """Whether keys and values have the same shape and separate memory, as most kernels require."""
        return self.k.shape == self.v.shape and not self.shared

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies the slots `source` to the slots `target`. All are read before any is written."""
        kept = [self.k] if self.shared else [self.k, self.v]
        for tensor in (*kept, *(self.scales or ())):
            plain = _bytes(tensor)
            plain.index_copy_(0, target, plain.index_select(0, source))

    def put(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Keeps the keys and values of these slots; v is ignored if it is a part of k."""
        for i, (kept, new) in enumerate(((self.k, k), (self.v, v))[: 1 if self.shared else 2]):
            values, scales = kv_kinds.pack(self.kind, new, self.factors[i] if self.factors else None)
            _bytes(kept).index_copy_(0, slots, _bytes(values.to(kept.dtype)))
            if scales is not None and self.scales is not None:
                self.scales[i].index_copy_(0, slots, scales)

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of these slots."""
        found = []
        for i, kept in enumerate((self.k, self.v)):
            scales, factor = self.scales[i][slots] if self.scales else None, self.factors[i] if self.factors else None
            found.append(kv_kinds.unpack(self.kind, _bytes(kept)[slots], scales, factor))
        k, v = found
        return k, v[..., : self.value_dim or v.shape[-1]]


def _bytes(x: Tensor) -> Tensor:
    """The bytes of fp8, because torch does not index that type; anything else as it is."""
    return x.view(torch.uint8) if x.dtype == kv_kinds.FP8 else x


@dataclass(frozen=True)
class AttentionKind:
    """Which attention a layer has. It is always causal; the fields say what else it does."""

    scale: float
    window: int = 0  # how many of the last tokens a token sees, itself included; 0: all
    chunked: bool = False  # whether a window begins anew at every multiple of its length: a token sees none before the last of them
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap); 0: as they are
    slopes: Tensor | None = None  # ALiBi: a head's scores gain slope * (key position - query position)
    sinks: Tensor | None = None  # per head, a score of a key that has no value: it takes weight from the others and gives nothing

    def first_seen(self, position: int) -> int:
        """The position of the first token that a token sees."""
        if not self.window:
            return 0
        return position // self.window * self.window if self.chunked else max(position - self.window + 1, 0)


@dataclass
class StepLayout:
    """Where a step's sequences lie. The numpy columns are for planning on the host, the tensors for the device.

    A device tensor is a slice of a persistent buffer: captured graphs read the same memory at every replay.
    """

    page_size: int
    rows: np.ndarray  # [seqs] int32: each sequence's row of the page table
    starts: np.ndarray  # [seqs] int32: position of its first new token
    counts: np.ndarray  # [seqs] int32: how many new tokens
    page_table: Tensor  # [all rows, pages] int32: the whole table; sequence i uses page_table[rows[i]]
    rows_device: Tensor  # [seqs] int32
    query_starts: Tensor  # [seqs + 1] int32: where each sequence's new tokens begin among the step's tokens
    context_lengths: Tensor  # [seqs] int32: starts + counts
    states_from: Tensor | None = (
        None  # [seqs] int32: the state each sequence goes on from, below 0: none; only where layers keep any
    )
    states_to: Tensor | None = None  # [seqs] int32: the slot for its new state, always another one
    padded: bool = False  # whether trailing sequences are padding for a captured graph (counts of 0 or scratch slots)
    room: int = 0  # while a graph with prompts is captured: how many tokens it has room for; else 0

    @property
    def replayed(self) -> bool:
        """Whether later steps will reuse this step's plan. If so, the plan must not depend on the numpy columns, which describe
        this step only.
        """
        return self.room > 0

    def slots(self, sequence: int) -> Tensor:
        """All slots of one sequence up to its newest token, by position."""
        length = int(self.context_lengths[sequence])
        pages = self.page_table[int(self.rows[sequence]), : -(-length // self.page_size)].long()
        offsets = torch.arange(self.page_size, device=pages.device)
        return (pages[:, None] * self.page_size + offsets).flatten()[:length]


AttentionPlan = Any  # a backend's own: whatever its plan_attention returns
