"""The sampling parameters of a step, one column for each parameter, and the plain body that defines what they mean.

The record is passed as a whole from the tables to the kernels. A backend whose kernel does not support every column falls back to
the plain body here, so a column that is added here and to `trireme.types.Draw` works everywhere. Knows tensors, not requests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Choosing(NamedTuple):
    """The columns: one number for each row of logits, int32 if WHOLE names the column, else float32. Padding rows hold 0."""

    temperature: Tensor  # 0: greedy
    top_k: Tensor  # 0: all
    top_p: Tensor
    min_p: Tensor


WHOLE = ("top_k",)


def column_type(name: str) -> torch.dtype:
    return torch.int32 if name in WHOLE else torch.float32


def sample(logits: Tensor, by: Choosing, uniform: Tensor) -> Tensor:
    """One token per row from softmax(logits / temperature), after top-k, then top-p, then min-p.

    `uniform` in [0, 1) is the row's random number. The kept tokens are ordered by id, and the result is the first token at which
    their cumulative probability exceeds it.
    """
    scaled = logits.float() / by.temperature.clamp_min(1e-6).unsqueeze(1)
    ranked, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    keep = (rank < torch.where(by.top_k > 0, by.top_k, ranked.shape[1]).unsqueeze(1)) | (rank == 0)
    p = torch.softmax(ranked.masked_fill(~keep, float("-inf")), -1)
    before = p.cumsum(-1) - p
    keep &= (before < by.top_p.unsqueeze(1)) & (p >= by.min_p.unsqueeze(1) * p[:, :1]) | (rank == 0)
    kept = torch.zeros_like(p, dtype=torch.float64).scatter(1, ids, torch.where(keep, p, 0.0).double())
    return pick(kept, uniform)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """In each row, the first index whose cumulative weight exceeds uniform * total; never an index of weight 0."""
    total = weights.cumsum(-1)
    chosen = (total <= uniform.double().unsqueeze(1) * total[:, -1:]).sum(-1)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1)  # rounding may carry the target past the end
    return torch.minimum(chosen, last)
