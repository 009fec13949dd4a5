"""A request on its way through the scheduler: what it asks for, what it has gained, how far it may go.

Knows token counts and limits, never pages or rows' contents.
"""

from __future__ import annotations

from collections.abc import Callable

from trireme.sched.pages import Numbers, numbers
from trireme.types import FinishReason, Request, TokenLogprobs

NO_ROW = -1


class Task:
    """One live request. `tokens` holds the prompt and every token that has come back."""

    __slots__ = (
        "_keys",
        "arrival",
        "cached",
        "draw",
        "eos_token_ids",
        "finish",
        "id",
        "key",
        "mark",
        "max_total",
        "min_total",
        "need",
        "num_prompt",
        "pauses",
        "prompt_scores",
        "ready_after",
        "row",
        "salt",
        "sampling",
        "scored",
        "seed",
        "stops",
        "tokens",
    )

    def __init__(self, request: Request, key: int, max_model_len: int, seed: int, draw: float):
        sampling = request.sampling
        self.id, self.key, self.seed, self.sampling = request.id, key, seed, sampling
        self.salt, self.arrival = request.salt, request.arrival
        self.eos_token_ids = request.eos_token_ids
        self.tokens = numbers(request.tokens)
        self._keys = None if request.keys is None else numbers(request.keys)  # of the prompt
        self.num_prompt = len(self.tokens)
        room = max_model_len - self.num_prompt
        self.max_total = self.num_prompt + (room if sampling.max_tokens is None else min(room, sampling.max_tokens))
        # The last token sampled is never computed: nothing follows it.
        self.need = max(self.num_prompt, self.max_total - 1)
        self.mark = self.num_prompt + 1  # the length at which a token is more than the next one: the first, then the last
        self.min_total = self.num_prompt + sampling.min_tokens
        stops = set(sampling.stop_token_ids)
        self.stops = frozenset(stops if sampling.ignore_eos else stops.union(request.eos_token_ids))
        self.row = NO_ROW
        self.finish: FinishReason | None = None
        self.cached = -1  # prompt tokens found in the prefix cache; -1 until first admitted
        self.pauses = 0
        self.ready_after = 0  # the last step that may still bring this request something from before its pause
        self.draw = draw  # in [0, 1): where in the distribution of output lengths this request is taken to end
        self.scored = sampling.prompt_logprobs is None  # whether prompt logprobs are delivered, or not wanted
        self.prompt_scores: list[TokenLogprobs] = []  # for prompt positions 1, 2, ...

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def keys(self) -> Numbers:
        """What the prefix cache compares: the tokens, or what stands for those of the prompt and the tokens behind it."""
        return self.tokens if self._keys is None else self._keys + self.tokens[self.num_prompt :]

    def ends(self, token: int) -> FinishReason | None:
        """Whether the request is over, now that `token` is its last."""
        total = len(self.tokens)
        if token in self.stops and total > self.min_total:
            return FinishReason.STOP
        return FinishReason.LENGTH if total >= self.max_total else None


class Waiting:
    """The queue, first to go first. Order is by key; a paused request keeps the key it was born with."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def __len__(self) -> int:
        return len(self._tasks)

    def put(self, task: Task) -> None:
        """Files the task at its place by key."""
        tasks, low = self._tasks, len(self._tasks)
        if tasks and task.key < tasks[-1].key:
            low, high = 0, len(tasks) - 1
            while low < high:
                middle = (low + high) // 2
                if tasks[middle].key < task.key:
                    low = middle + 1
                else:
                    high = middle
        tasks.insert(low, task)

    def remove(self, task: Task) -> None:
        self._tasks.remove(task)

    def first(self, ready: Callable[[Task], bool]) -> Task | None:
        """The first task that may go now; those held back by their group or by an unanswered step are passed over."""
        return next((task for task in self._tasks if ready(task)), None)

    def head(self) -> Task | None:
        return self._tasks[0] if self._tasks else None
