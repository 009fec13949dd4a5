"""How long a step may take before its rank counts as hung. Knows tokens and seconds, nothing of what is computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# A step counts as hung if it takes this many times the expected time. Long contexts, swapping or other programs slow steps down.
SLACK = 10.0
FRESH = 0.3  # the weight of the newest step in the estimated cost of a token, if it was faster


class StepLimit:
    """Learns what a token costs from the steps that were answered. A step of many tokens may take minutes on a slow machine."""

    def __init__(self, least: float, clock: Callable[[], float] = time.monotonic):
        """least: seconds that any step may take, however few its tokens"""
        self._least, self._clock = least, clock
        self._per_token = self.answered_at = 0.0
        self._steps: deque[tuple[float, int]] = deque()  # when each was launched, and its tokens

    def believe(self, per_token: float) -> None:
        """Sets the cost of a token from a step of one token, which is more than a token costs in a batch."""
        slower = per_token > self._per_token
        self._per_token = per_token if slower else FRESH * per_token + (1 - FRESH) * self._per_token

    def begin(self, tokens: int) -> None:
        """Notes that a step was launched."""
        self._steps.append((self._clock(), tokens))

    def end(self) -> None:
        """Notes that the oldest step was answered. It ran after the one before it had been answered."""
        begun, tokens = self._steps.popleft()
        spent, self.answered_at = self._clock() - max(begun, self.answered_at), self._clock()
        self.believe(spent / max(tokens, 1))

    @property
    def seconds(self) -> float:
        """How many seconds the steps in flight may take."""
        return self._least + SLACK * self._per_token * sum(tokens for _, tokens in self._steps)
