"""Runs the blocks of a model one after the other. Knows which tokens each block must compute, nothing of what a block does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trireme.layers.batch import Batch
from trireme.layers.env import Env
from trireme.layers.module import Module


def run_blocks(env: Env, blocks: Sequence[Module], x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Runs all blocks and returns (output, residual) of the tokens that need logits, which `batch.logits_at` names.

    The last block drops the other tokens right after its attention, because nothing reads its output for them. For a prompt
    through 32 blocks this saves 2.7 % of the work. In two cases the last block computes all tokens, and they are dropped after it:
    when `batch.watched` is set, because the watcher must see every token; and when the backend computes few rows less precisely
    than many (`coarse_few_rows`), because that would make the first token of an answer less precise.
    """
    residual: Tensor | None = None
    for block in blocks[:-1]:
        x, residual = block(x, residual, batch)
    whole = batch.watched or env.backend.coarse_few_rows
    early, late = (None, batch.logits_at) if whole else (batch.logits_at, None)
    x, residual = blocks[-1](x, residual, batch, early)
    return env.keep(x, late), env.keep(residual, late)
