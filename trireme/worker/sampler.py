"""Chooses the next tokens of a step, for all rows at once. If a row's logits are broken, only that row fails.

Knows logits and sampling parameters; nothing of text. A row's random numbers come from its seed and position alone, so its tokens
do not depend on what else is in the batch, or on pauses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trireme.ipc.messages import Admit, Fork, Plan
from trireme.ops import Ops
from trireme.worker.grammar import Grammars
from trireme.worker.logits import RULES, Choice, Rule
from trireme.worker.scores import Scores, score
from trireme.worker.tables import Step, Tables

BROKEN = -1  # the id of a row that could not choose


@dataclass
class Pick:
    """The chosen tokens, still on the device."""

    ids: Tensor  # [sequences that sample]; BROKEN where a row failed
    scores: Scores | None = None  # of the chosen tokens whose log-probabilities are wanted
    errors: dict[int, str] = field(default_factory=dict)  # by row: why there is nothing to choose


class Sampler:
    def __init__(self, ops: Ops, tables: Tables, max_rows: int, grammars: Grammars | None = None):
        self.ops, self.tables, self.grammars = ops, tables, grammars
        self.rules: list[Rule] = [rule() for rule in RULES]
        if grammars is not None:
            self.rules.append(grammars)
        self.seeds = np.zeros(max_rows + 1, dtype=np.uint64)
        self.ruled: set[int] = set()  # rows with rules, or whose log-probabilities are wanted
        self.random: set[int] = set()  # rows that are not greedy
        self.num_top = np.full(max_rows + 1, -1, dtype=np.int32)  # -1: no logprobs wanted
        self.num_prompt_top = np.full(max_rows + 1, -1, dtype=np.int32)

    def admit(self, admit: Admit) -> None:
        s, row = admit.sampling, admit.row
        self.seeds[row] = admit.seed & (2**64 - 1)
        bound = [rule.admit(admit) for rule in self.rules]  # each of them: a rule forgets the row's former request so
        (self.ruled.add if any(bound) or s.logprobs is not None else self.ruled.discard)(row)
        (self.random.discard if s.greedy else self.random.add)(row)
        self.num_top[row] = -1 if s.logprobs is None else s.logprobs
        self.num_prompt_top[row] = -1 if s.prompt_logprobs is None else s.prompt_logprobs

    def fork(self, forks: list[Fork]) -> None:
        """Copies other rows' sampling parameters to rows, with random numbers of their own. All are read before any is written."""
        rows, parents = [fork.row for fork in forks], [fork.parent for fork in forks]
        self.seeds[rows] = np.array([fork.seed & (2**64 - 1) for fork in forks], dtype=np.uint64)
        for rule in self.rules:
            rule.fork(forks)
        for kind in (self.ruled, self.random):
            found = {fork.row for fork in forks if fork.parent in kind}
            kind.difference_update(rows)
            kind |= found
        self.num_top[rows], self.num_prompt_top[rows] = self.num_top[parents], -1

    def release(self, row: int) -> None:
        """Forgets a row that holds no request any more, and gives back what rules keep for it."""
        for rule in self.rules:
            rule.release(row)
        self.ruled.discard(row)
        self.random.discard(row)
        self.num_top[row] = self.num_prompt_top[row] = -1

    def prepare(self, step: Step) -> None:
        """Starts the host's work for a step's sampling, before the device computes its logits."""
        if self.grammars is not None and step.samples.any():
            rows, lengths = step.rows[step.samples], (step.starts + step.counts)[step.samples]
            self.grammars.prepare(rows, lengths, self.tables.tokens)

    def uniforms(self, plan: Plan) -> np.ndarray:
        """The random number in [0, 1) of each row for the token after its last; its seed, where the device alone can tell which."""
        if plan.drafts:
            return self.seeds[plan.rows]
        positions = np.asarray(plan.starts, dtype=np.uint64) + np.asarray(plan.counts, dtype=np.uint64)
        with np.errstate(over="ignore"):
            return uniform(self.seeds[plan.rows], positions)

    def mode(self, rows: list[int]) -> str:
        """Which kind of sampling these rows need: greedy, random, or also rules and logprobs."""
        if not self.ruled.isdisjoint(rows):
            return "ruled"
        return "greedy" if self.random.isdisjoint(rows) else "random"

    def choose(self, logits: Tensor, step: Step) -> Tensor:
        """One id per row of logits, by greedy or random choice alone; fit for capture. BROKEN where a row failed."""
        if self.random.isdisjoint(step.rows[step.samples].tolist()):
            return self.ops.choose_greedy(logits)
        return self.ops.choose(logits, step.choosing, step.uniform)

    def pick(self, logits: Tensor, step: Step) -> Pick:
        """The tokens of the sequences that sample, by every rule they ask for.  logits: one row per such sequence"""
        rows, lengths = step.rows[step.samples], (step.starts + step.counts)[step.samples]
        wanted = np.flatnonzero(self.num_top[rows] >= 0)
        raw = None  # a copy, without what a captured step has behind its rows: rules edit logits in place
        if len(wanted):
            raw = logits[: len(rows)].clone() if len(wanted) == len(rows) else logits[torch.from_numpy(wanted).to(logits.device)]
        choice = Choice(logits, rows, lengths, self.tables.host.num_prompt[rows], self.tables.tokens)
        for rule in self.rules:
            at = rule.touches(rows)
            if at:
                rule.apply(choice, at)
        ids = self.choose(choice.logits, step)
        errors = self.grammars.take_errors(rows) if self.grammars is not None else {}
        if raw is None:
            return Pick(ids, None, errors)
        chosen = ids[: len(rows)] if len(wanted) == len(rows) else ids[torch.from_numpy(wanted).to(ids.device)]
        tops = self.num_top[rows[wanted]].tolist()
        return Pick(ids, score(self.ops, raw, chosen.clamp_min(0), rows[wanted].tolist(), tops), errors)

    def prompt_scores(self, row: int, logits: Tensor, targets: Tensor) -> Scores:
        """Log-probabilities of a prompt's own tokens.  logits: [n, vocab]; targets: [n], the tokens that follow"""
        tops = [int(self.num_prompt_top[row])] * len(targets)
        return score(self.ops, logits, targets, [row] * len(targets), tops, prompt=True)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[0, 1) from (seed, position): two rounds of the splitmix64 finaliser, the top 24 bits."""
    x = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(2):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(40)).astype(np.float64) / (1 << 24)).astype(np.float32)
