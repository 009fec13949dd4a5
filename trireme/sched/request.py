"""A request on its way through the scheduler: what it asks for, what it has gained, how far it may go.

A pause (preemption) takes its row and sends it back to the queue; what it has gained stays.

Knows token counts and limits, never pages or rows' contents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from trireme.sched.pages import Numbers, numbers
from trireme.types import FinishReason, Request, TokenLogprobs

NO_ROW = -1


class Arrival(NamedTuple):
    """What a request gets on arrival."""

    key: int  # its place in the order: lower goes first
    at: float  # by the scheduler's clock
    seed: int
    draw: float  # in [0, 1): the quantile of output lengths at which this request is assumed to end


@dataclass(slots=True)
class PromptScores:
    """The log-probabilities of a prompt's own tokens."""

    done: bool  # all have been computed, or none are wanted
    entries: list[TokenLogprobs] = field(default_factory=list)  # of positions 1, 2, ...


class Task:
    """One live request. `tokens` holds the prompt and every token that has come back."""

    __slots__ = (
        "_keys",
        "arrival",
        "asked",
        "cached",
        "finish",
        "id",
        "mark",
        "max_total",
        "num_prompt",
        "pauses",
        "ready_after",
        "row",
        "scores",
        "stops",
        "tokens",
    )

    def __init__(self, request: Request, arrival: Arrival, longest: int):
        sampling = request.sampling
        self.id, self.arrival = request.id, arrival
        self.asked = msgspec.structs.replace(request, tokens=[], keys=None)  # this task keeps them instead
        self.tokens = numbers(request.tokens)
        self._keys = None if request.keys is None else numbers(request.keys)  # of the prompt
        self.num_prompt = len(self.tokens)
        room = longest - self.num_prompt
        self.max_total = self.num_prompt + (room if sampling.max_tokens is None else min(room, sampling.max_tokens))
        # From this length on, `gains` checks a token for more: first the length with one token, then that of the longest answer.
        self.mark = self.num_prompt + 1
        stops = set(sampling.stop_token_ids)
        self.stops = frozenset(stops if sampling.ignore_eos else stops.union(request.eos_token_ids))
        self.row = NO_ROW
        self.finish: FinishReason | None = None
        self.cached = -1  # prompt tokens found in the prefix cache; -1 until first admitted
        self.pauses = 0
        self.ready_after = 0  # the last step launched before its pause, whose answer may still bring tokens
        self.scores = PromptScores(done=sampling.prompt_logprobs is None)

    @property
    def need(self) -> int:
        """How many positions will ever be computed. The last sampled token is not computed, because nothing follows it."""
        return max(self.num_prompt, self.max_total - 1)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def keys(self) -> Numbers:
        """What the prefix cache compares: the tokens. If the request has keys, they stand in the place of the prompt's tokens."""
        return self.tokens if self._keys is None else self._keys + self.tokens[self.num_prompt :]

    def ends(self, token: int) -> FinishReason | None:
        """Whether the request is over, now that `token` is its last."""
        total = len(self.tokens)
        if token in self.stops and total > self.num_prompt + self.asked.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if total >= self.max_total else None


class Waiting:
    """The queue, ordered by key, lowest first. A paused request keeps the key that it got on arrival."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, task: Task) -> None:
        """Inserts the task at its place in the order."""
        tasks, low = self._tasks, len(self._tasks)
        if tasks and task.arrival.key < tasks[-1].arrival.key:
            low, high = 0, len(tasks) - 1
            while low < high:
                middle = (low + high) // 2
                if tasks[middle].arrival.key < task.arrival.key:
                    low = middle + 1
                else:
                    high = middle
        tasks.insert(low, task)

    def remove(self, task: Task) -> None:
        self._tasks.remove(task)

    def first(self, ready: Callable[[Task], bool]) -> Task | None:
        """The first task that can run now. Tasks that wait for their group or for an unanswered step are skipped."""
        return next((task for task in self._tasks if ready(task)), None)

    def head(self) -> Task | None:
        return self._tasks[0] if self._tasks else None
