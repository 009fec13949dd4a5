"""The input of a forward pass: the tokens of one step, and where the layers' caches of these tokens are. All tensors are slices of
persistent buffers, so that a graph can be captured over them.

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
    """A step as seen by the layers of one band. The layers of a band share slots and a page table."""

    slots: Tensor  # [tokens] int32: where the new KV goes, below 0: nowhere
    layout: StepLayout
    plan: AttentionPlan  # the backend's, from layout


@dataclass
class Batch:
    tokens: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    logits_at: Tensor | None  # [wanted] int32: which tokens need logits; None: every one, in their order
    # [tokens] int32: max(prompt length, position + 1), the length that length-dependent rope uses. It is a device tensor,
    # because a number computed on the host would be frozen into a captured step.
    reach: Tensor
    views: list[View]  # by band; `KVCache.band` is the index
    caches: Mapping[int, Any]  # what `cache_specs` asked for, by its key: a KVCache or States
    watched: bool = False  # whether somebody looks at the layers' values
