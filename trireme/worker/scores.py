"""Log-probabilities of a step: computed on the device as one table, brought to the host in one copy.

Knows logits and tokens; nothing of the rules that choose them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trireme.backends import Backend
from trireme.ops import Ops
from trireme.types import TokenLogprobs

FIRST = 3  # columns of the table before the likeliest tokens: the token, its rank, its log-probability


@dataclass
class Scores:
    """Log-probabilities of some tokens. `table` is [tokens, FIRST + 2 * most] int32: what is no whole number lies there by its
    bits; the likeliest tokens come before their log-probabilities."""

    rows: list[int]  # of the token tables, one for each token
    tops: list[int]  # how many of the likeliest tokens each one wants
    table: Tensor
    prompt: bool = False  # whether these are the prompt's own tokens


def score(ops: Ops, logits: Tensor, ids: Tensor, rows: list[int], tops: list[int], prompt: bool = False) -> Scores:
    """Log-probabilities of ids[i] in row i of the logits. Waits for nothing."""
    logprob, rank = ops.logprobs(logits, ids)
    top, top_ids = torch.log_softmax(logits.float(), -1).topk(max(*tops, 1), -1)
    first = torch.stack([ids.int(), rank.int(), logprob.float().view(torch.int32)], 1)
    return Scores(rows, tops, torch.cat([first, top_ids.int(), top.view(torch.int32)], 1), prompt)


class ToHost:
    """Copies a step's scores to the host. Each step that may be in flight has a buffer of its own."""

    def __init__(self, backend: Backend, steps: int):
        self.backend, self.buffers = backend, [torch.zeros(0, dtype=torch.int32)] * steps

    def send(self, step: int, scores: list[Scores]) -> Tensor:
        """Copies the tables one behind the other; they are there when the device reaches a mark set after this."""
        tables = torch.cat([part.table.flatten() for part in scores]) if len(scores) > 1 else scores[0].table.flatten()
        turn = step % len(self.buffers)
        if len(tables) > len(self.buffers[turn]):
            self.buffers[turn] = self.backend.buffer((len(tables),), torch.int32)
        host = self.buffers[turn][: len(tables)]
        host.copy_(tables, non_blocking=True)
        return host


def read(scores: list[Scores], host: Tensor) -> list[tuple[Scores, list[TokenLogprobs]]]:
    """Decodes a copy that has arrived: the log-probabilities of each token."""
    found, begin, numbers = [], 0, host.numpy()
    for part in scores:
        tokens, width = part.table.shape
        found.append((part, _entries(numbers[begin : begin + tokens * width].reshape(tokens, width), part.tops)))
        begin += tokens * width
    return found


def _entries(table: np.ndarray, tops: list[int]) -> list[TokenLogprobs]:
    most, floats = (table.shape[1] - FIRST) // 2, table.view(np.float32)
    ids, shares = table[:, FIRST : FIRST + most].tolist(), floats[:, FIRST + most :].tolist()
    columns = zip(table[:, 0].tolist(), floats[:, 2].tolist(), table[:, 1].tolist(), ids, shares, tops, strict=True)
    return [TokenLogprobs(t, p, rank, list(zip(i[:k], v[:k], strict=True))) for t, p, rank, i, v, k in columns]
