"""What a recurrent layer keeps of a sequence: one state of fixed size instead of numbers for each token. Knows slots, no models."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from trireme.ops.attention import StepLayout, Zeros


@dataclass(frozen=True)
class StateSpec:
    """The parts of a state, by name: their shapes and types."""

    parts: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts.values())


@dataclass
class States:
    """The states of one layer. parts: by name, [slots, *shape]"""

    parts: dict[str, Tensor]

    @classmethod
    def allocate(cls, spec: StateSpec, num_slots: int, zeros: Zeros) -> States:
        return cls({name: zeros((num_slots, *shape), dtype) for name, (shape, dtype) in spec.parts.items()})

    def before(self, name: str, layout: StepLayout) -> Tensor:
        """The state before this step of each sequence; zeros for a new sequence.  [seqs, *shape]"""
        assert layout.states_from is not None, "no layer of this model was said to keep states"
        begins, kept = layout.states_from < 0, self.parts[name]
        found = kept[layout.states_from.clamp_min(0).long()]
        return found.masked_fill(begins.view(-1, *[1] * (kept.dim() - 1)), 0)

    def keep(self, name: str, layout: StepLayout, values: Tensor) -> None:
        """Stores the state of each sequence after this step.  values: [seqs, *shape]"""
        assert layout.states_to is not None, "no layer of this model was said to keep states"
        self.parts[name].index_copy_(0, layout.states_to.long(), values)
