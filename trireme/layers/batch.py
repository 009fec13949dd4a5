"""What a forward is given: the tokens of one step and where their KV lives. Slices of persistent buffers, ready to be captured."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trireme.ops import AttentionPlan, KVCache, StepLayout


@dataclass
class Batch:
    tokens: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int32: where the new KV goes; below 0: nowhere (padding)
    logits_at: Tensor | None  # [wanted] int32: which tokens need logits; None: every one, in their order
    reach: Tensor  # [tokens] int32: max(prompt length, position + 1), the length that length-dependent rope goes by
    layout: StepLayout
    plan: AttentionPlan  # the backend's, from layout
    caches: list[KVCache]  # by attention layer
    watched: bool = False  # whether somebody looks at the layers' values
