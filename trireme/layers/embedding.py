"""Token embeddings and the head that turns hidden states into logits; one matrix for both where the model ties them."""

from __future__ import annotations

from torch import Tensor

from trireme.layers.env import Env, Read
from trireme.layers.module import Module
from trireme.quant import WeightMethod


class Embedding(Module):
    """weight[ids], with the vocabulary split over the tensor-parallel group."""

    weight: WeightMethod

    def __init__(self, env: Env, vocab: int, size: int):
        self.env, self.vocab, self.size = env, vocab, size
        self.rows = env.tp.span(vocab)

    def load(self, read: Read, path: str = "") -> None:
        stored = read(f"{path}.weight", (self.vocab, self.size))
        self.weight = self.env.weights([stored if self.env.tp.size == 1 else stored.rows(self.rows)], None)

    def __call__(self, ids: Tensor) -> Tensor:
        if self.env.tp.size == 1:
            return self.weight.embed(self.env.ops, ids)
        local = ids - self.rows.start
        mine = (local >= 0) & (local < self.rows.stop - self.rows.start)
        x = self.weight.embed(self.env.ops, local * mine) * mine.unsqueeze(1)
        return self.env.tp.comm.all_reduce(x)


class Head(Embedding):
    """Logits of hidden states, in float32. If tied, it multiplies by the embedding's weights."""

    def __init__(self, env: Env, vocab: int, size: int, tied: Embedding | None = None):
        super().__init__(env, vocab, size)
        self.tied = lambda: tied  # a function, so that `children` does not list the embedding under the head

    def load(self, read: Read, path: str = "") -> None:
        source = self.tied()
        if source is None:
            super().load(read, path)
        else:
            self.weight = source.weight

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.weight.logits(self.env.ops, x)
        return logits if self.env.tp.size == 1 else self.env.tp.comm.all_gather(logits, self.env.tp.sizes(self.vocab))
