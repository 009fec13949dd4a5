"""Blocks one after the other. Knows which tokens must pass them, nothing of what a block does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trireme.layers.batch import Batch
from trireme.layers.env import Env
from trireme.layers.module import Module


def run_blocks(env: Env, blocks: Sequence[Module], x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """What all blocks make of x, and the residual: of the tokens that need logits.

    The last block leaves out the others as soon as attention has mixed them in, because nobody reads what it would make of them: of
    a prompt through 32 blocks this is 2.7 % of the work. Not where the few tokens left would be computed more coarsely than prompts
    are: an answer's first token decides what follows. And whoever looks at the layers' values is to see all tokens.
    """
    residual: Tensor | None = None
    for block in blocks[:-1]:
        x, residual = block(x, residual, batch)
    whole = batch.watched or env.backend.coarse_few_rows
    early, late = (None, batch.logits_at) if whole else (batch.logits_at, None)
    x, residual = blocks[-1](x, residual, batch, early)
    return env.keep(x, late), env.keep(residual, late)
