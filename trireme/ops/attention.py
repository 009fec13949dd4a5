"""The arguments of attention: where the step's tokens and their KV are, and which kind of attention a layer has.

Knows positions, pages and slots; nothing of models or of how a device computes. A backend's `plan_attention` sees a
step's layout as numpy on the host and as tensors on the device, and no layers. So the layout is described here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0  # larger numbers are clamped to this
Zeros = Callable[[tuple[int, ...], torch.dtype], Tensor]  # makes a tensor of zeros on a device


@dataclass(frozen=True)
class CacheSpec:
    """What a layer caches for each token: keys and values, each with the shape (heads, numbers of a head).

    `kind` names the storage: "plain" is the activations' own type, "int8" is bytes with a float32 scale per head, "fp8" is floats
    of eight bits (e4m3).
    """

    k: tuple[int, int]
    v: tuple[int, int]
    kind: str = "plain"
    window: int = 0  # how many of the last tokens are ever read; 0: all
    shared: bool = False  # whether a value is the first numbers of its key, kept once

    @property
    def kept(self) -> tuple[tuple[int, int], ...]:
        """The shapes that take memory of their own."""
        return (self.k,) if self.shared else (self.k, self.v)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        of_head = {"int8": lambda width: width + 4, "fp8": lambda width: width}.get(self.kind, lambda width: width * dtype.itemsize)
        return sum(heads * of_head(width) for heads, width in self.kept)


@dataclass
class KVCache:
    """The slots of one layer. k, v: [slots, heads, numbers of a head]; an int8 cache stands for k * scale."""

    k: Tensor
    v: Tensor
    scales: tuple[Tensor, Tensor] | None = None  # of k and v: [slots, heads] float32
    shared: bool = False  # whether v is a part of k
    band: int = 0  # which of the step's views has its slots

    @classmethod
    def allocate(cls, spec: CacheSpec, num_slots: int, dtype: torch.dtype, zeros: Zeros) -> KVCache:
        kept = {"int8": torch.int8, "fp8": FP8}.get(spec.kind, dtype)
        made = [zeros((num_slots, *shape), kept) for shape in spec.kept]
        scales = [zeros((num_slots, heads), torch.float32) for heads, _ in spec.kept] if spec.kind == "int8" else []
        k, v = made[0], made[0][..., : spec.v[1]] if spec.shared else made[1]
        return cls(k, v, (scales[0], scales[-1]) if scales else None, spec.shared)

    @property
    def is_alike(self) -> bool:
        """Whether keys and values have the same shape and separate memory, as most kernels require."""
        return self.k.shape == self.v.shape and not self.shared

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies the slots `source` to the slots `target`. All are read before any is written."""
        kept = [self.k] if self.shared else [self.k, self.v]
        for tensor in (*kept, *(self.scales or ())):
            plain = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
            plain.index_copy_(0, target, plain.index_select(0, source))

    def at(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of these slots."""
        if self.k.dtype == FP8:
            k, v = (kept.view(torch.uint8)[slots].view(FP8).float() for kept in (self.k, self.v))
            return k, v
        if self.scales is None:
            return self.k[slots], self.v[slots]
        k, v = (kept[slots] * scale[slots].unsqueeze(-1) for kept, scale in zip((self.k, self.v), self.scales, strict=True))
        return k, v


@dataclass(frozen=True)
class AttentionKind:
    """Which attention a layer has. It is always causal; the fields say what else it does."""

    scale: float
    window: int = 0  # how many of the last tokens a token sees, itself included; 0: all
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap); 0: as they are
    slopes: Tensor | None = None  # ALiBi: a head's scores gain slope * (key position - query position)
    sinks: Tensor | None = None  # per head, a score of a key that has no value: it takes weight from the others and gives nothing


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
