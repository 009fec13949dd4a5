"""Steps in flight: sent to the workers and not yet answered. Knows their order and how long they took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from trireme.sched.pace import Pace
from trireme.sched.plan import Flight


class Flights:
    """The pace learns from every answer."""

    def __init__(self, pace: Pace, clock: Callable[[], float]):
        self._pace, self._clock = pace, clock
        self._unanswered: deque[Flight] = deque()
        self.last: Flight | None = None  # the newest, answered or not
        self.step = self.answered = 0  # numbers of the newest step and of the newest that was answered

    def __len__(self) -> int:
        return len(self._unanswered)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._unanswered)

    def begin(self, flight: Flight) -> None:
        self.step, flight.begun, self.last = flight.step, self._clock(), flight
        self._unanswered.append(flight)

    def end(self, step: int) -> Flight:
        """The oldest flight, which is now answered."""
        flight = self._unanswered.popleft()
        assert flight.step == step, f"the answer to step {step} came when step {flight.step} was due"
        self.answered = step
        self._pace.learn(flight.begun, self._clock(), flight.num_tokens, flight.prompt_tokens)
        return flight

    def waits_for_long(self) -> bool:
        """Whether the newest step in flight is so long that the next one should be planned only after its answer."""
        return bool(self._unanswered) and self._pace.is_long(self._unanswered[-1].prompt_tokens)
