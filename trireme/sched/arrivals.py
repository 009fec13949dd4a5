"""What a request gets on arrival: its place in the order, a seed and a draw. Knows the policy's ranks; nothing of the queue."""

from __future__ import annotations

import random
from collections.abc import Callable

from trireme.sched.policy import Policy
from trireme.sched.request import Arrival, Task
from trireme.types import Request

RANK_SPAN = 1 << 40  # how many arrivals one rank has keys for
MAX_RANK = 1 << 20


class Arrivals:
    def __init__(self, policy: Policy, clock: Callable[[], float], seed: int | None):
        self.clock = clock
        self._policy, self._random, self._count = policy, random.Random(seed), 0

    def take(self, request: Request, longest: int) -> Task:
        """Makes the request's task. Prompt and answer together may have at most `longest` tokens."""
        rank = max(-MAX_RANK, min(MAX_RANK, self._policy.rank(request)))
        self._count += 1
        seed = request.sampling.seed if request.sampling.seed is not None else self._random.getrandbits(63)
        key, draw = rank * RANK_SPAN + self._count, self._random.random()
        return Task(request, Arrival(key, request.arrival or self.clock(), seed, draw), longest)

    def age(self, task: Task) -> float:
        """Seconds since the request arrived."""
        return self.clock() - task.arrival.at
