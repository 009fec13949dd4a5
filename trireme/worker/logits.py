"""Rules that edit logits before a token is chosen. Each has one task, knows its rows, and works on all of them at once.

A rule sees logits, rows and the token table; nothing of requests or text.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trireme.ipc.messages import Admit, Fork

NEGATIVE = float("-inf")


class Choice:
    """The rows of one sampling: logits [n, vocab], each one's table row, length so far, prompt length."""

    def __init__(self, logits: Tensor, rows: np.ndarray, lengths: np.ndarray, prompts: np.ndarray, tokens: Tensor):
        self.logits, self.rows, self.lengths, self.prompts, self.tokens = logits, rows, lengths, prompts, tokens

    def history(self, at: list[int]) -> tuple[Tensor, Tensor]:
        """The tokens so far of chosen rows, padded: ids [k, longest] and whether each one is there."""
        device = self.tokens.device
        lengths = torch.from_numpy(self.lengths[at].astype(np.int64)).to(device)
        longest = int(self.lengths[at].max())
        ids = self.tokens[torch.from_numpy(self.rows[at].astype(np.int64)).to(device), :longest].long()
        return ids, torch.arange(longest, device=device)[None] < lengths[:, None]


class Rule(Protocol):
    def admit(self, admit: Admit) -> bool:
        """Notes a new request in a row and forgets the one before; returns whether the rule applies to it."""

    def release(self, row: int) -> None:
        """Forgets a row whose request has left."""

    def fork(self, forks: list[Fork]) -> None:
        """Notes that rows have become copies of others. All are read before any is written: rows may change places."""

    def touches(self, rows: np.ndarray) -> list[int]:
        """Which of these rows the rule applies to, as indices."""

    def apply(self, choice: Choice, at: list[int]) -> None:
        """Edits the logits of those rows in place."""


class _ByRow:
    """What the rules share: a value per row, for the rows that have one."""

    def __init__(self) -> None:
        self.values: dict[int, object] = {}

    def admit(self, admit: Admit) -> bool:
        value = self.value(admit)
        if value is None:
            self.release(admit.row)
        else:
            self.values[admit.row] = value
        return value is not None

    def release(self, row: int) -> None:
        self.values.pop(row, None)

    def fork(self, forks: list[Fork]) -> None:
        found = {fork.row: self.values[fork.parent] for fork in forks if fork.parent in self.values}
        for fork in forks:
            self.release(fork.row)
        self.values |= found

    def value(self, admit: Admit) -> object | None:
        raise NotImplementedError

    def touches(self, rows: np.ndarray) -> list[int]:
        if not self.values:
            return []
        return [i for i, row in enumerate(rows.tolist()) if row in self.values]

    def pairs(self, choice: Choice, at: list[int]) -> tuple[Tensor, list]:
        """(indices into the logits repeated once per entry, the rows' values)"""
        values = [self.values[int(choice.rows[i])] for i in at]
        return torch.tensor(at, device=choice.logits.device), values


class Penalties(_ByRow):
    """Repetition (prompt and answer), presence and frequency (answer alone)."""

    def value(self, admit: Admit) -> object | None:
        s = admit.sampling
        used = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        return (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) if used else None

    def apply(self, choice: Choice, at: list[int]) -> None:
        where, values = self.pairs(choice, at)
        ids, there = choice.history(at)
        logits = choice.logits[where].float()
        answered = there & (torch.arange(ids.shape[1], device=ids.device) >= _column(choice.prompts[at], ids.device))
        seen = torch.zeros_like(logits).scatter_add_(1, ids, there.float())
        count = torch.zeros_like(logits).scatter_add_(1, ids, answered.float())
        repetition, presence, frequency = torch.tensor(values, device=logits.device).T.unsqueeze(-1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen > 0, repeated, logits) - frequency * count - presence * (count > 0)
        choice.logits[where] = logits.to(choice.logits.dtype)


class Bias(_ByRow):
    """True logit bias: added to the logits of named tokens."""

    def value(self, admit: Admit) -> object | None:
        bias = admit.sampling.logit_bias
        return (list(bias.keys()), list(bias.values())) if bias else None

    def apply(self, choice: Choice, at: list[int]) -> None:
        _, values = self.pairs(choice, at)
        where = [i for i, (ids, _) in zip(at, values, strict=True) for _ in ids]
        ids = [token for ids, _ in values for token in ids]
        amounts = torch.tensor([b for _, biases in values for b in biases], dtype=choice.logits.dtype, device=choice.logits.device)
        choice.logits.index_put_(_index(where, ids, choice), amounts, accumulate=True)


class Banned(_ByRow):
    """Tokens that are never chosen."""

    def value(self, admit: Admit) -> object | None:
        return admit.sampling.banned_token_ids or None

    def apply(self, choice: Choice, at: list[int]) -> None:
        _, values = self.pairs(choice, at)
        _forbid(choice, at, values)


class Allowed(_ByRow):
    """The only tokens that may be chosen."""

    def value(self, admit: Admit) -> object | None:
        return admit.sampling.allowed_token_ids

    def apply(self, choice: Choice, at: list[int]) -> None:
        where, values = self.pairs(choice, at)
        mask = torch.zeros((len(at), choice.logits.shape[1]), dtype=torch.bool, device=choice.logits.device)
        inner = [i for i, ids in enumerate(values) for _ in ids]
        mask[_index(inner, [token for ids in values for token in ids], choice)] = True
        choice.logits[where] = choice.logits[where].masked_fill(~mask, NEGATIVE)


class MinTokens(_ByRow):
    """Forbids end tokens before `min_tokens` tokens."""

    def value(self, admit: Admit) -> object | None:
        s = admit.sampling
        ends = [*admit.eos_token_ids, *s.stop_token_ids]
        return (admit.num_prompt + s.min_tokens, ends) if s.min_tokens and ends else None

    def apply(self, choice: Choice, at: list[int]) -> None:
        _, values = self.pairs(choice, at)
        early = [(i, ends) for i, (until, ends) in zip(at, values, strict=True) if choice.lengths[i] < until]
        if early:
            _forbid(choice, [i for i, _ in early], [ends for _, ends in early])


class NoRepeatNgram(_ByRow):
    """Forbids repeated n-grams: a token that has followed the last n - 1 tokens before may not follow them again."""

    def value(self, admit: Admit) -> object | None:
        return admit.sampling.no_repeat_ngram or None

    def apply(self, choice: Choice, at: list[int]) -> None:
        _, sizes = self.pairs(choice, at)
        for n in sorted(set(sizes)):
            group = [i for i, size in zip(at, sizes, strict=True) if size == n and choice.lengths[i] >= n]
            if group:
                self._forbid_repeats(choice, group, n)

    def _forbid_repeats(self, choice: Choice, group: list[int], n: int) -> None:
        ids, there = choice.history(group)
        grams = ids.unfold(1, n, 1)  # [k, starts, n]
        lengths = _column(choice.lengths[group], ids.device)
        tail = ids.gather(1, lengths - torch.arange(n - 1, 0, -1, device=ids.device)) if n > 1 else ids[:, :0]
        repeats = (grams[..., : n - 1] == tail.unsqueeze(1)).all(-1) & there.unfold(1, n, 1)[..., -1]
        k, start = repeats.nonzero(as_tuple=True)
        where = torch.tensor(group, device=ids.device)[k]
        choice.logits[where, grams[k, start, -1]] = NEGATIVE


RULES = (Penalties, NoRepeatNgram, Bias, Allowed, Banned, MinTokens)


def _forbid(choice: Choice, at: list[int], tokens: list[list[int]]) -> None:
    where = [i for i, ids in zip(at, tokens, strict=True) for _ in ids]
    choice.logits[_index(where, [token for ids in tokens for token in ids], choice)] = NEGATIVE


def _index(where: list[int], ids: list[int], choice: Choice) -> tuple[Tensor, Tensor]:
    device = choice.logits.device
    return torch.tensor(where, dtype=torch.int64, device=device), torch.tensor(ids, dtype=torch.int64, device=device)


def _column(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device).unsqueeze(1)
