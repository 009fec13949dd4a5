"""What a forward is given: the tokens of one step and where what layers keep of them lives. Slices of persistent buffers, ready to
be captured.

It is here and not in `worker`, because layers take it as an argument and may not import the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trireme.ops import AttentionPlan, StepLayout


@dataclass
class View:
    """How the layers of one band, those that keep alike, see a step."""

    slots: Tensor  # [tokens] int32: where the new KV goes, below 0: nowhere
    layout: StepLayout
    plan: AttentionPlan  # the backend's, from layout


@dataclass
class Batch:
    tokens: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    logits_at: Tensor | None  # [wanted] int32: which tokens need logits; None: every one, in their order
    # [tokens] int32: max(prompt length, position + 1), the length that length-dependent rope goes by. A column of its own: computed
    # on the host it would be frozen into a captured step.
    reach: Tensor
    views: list[View]  # by band; a cache says of which it is
    caches: Mapping[int, Any]  # what `cache_specs` asked for, by its key: a KVCache or States
    watched: bool = False  # whether somebody looks at the layers' values
