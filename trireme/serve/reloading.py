"""A reload of weights while serving: running requests finish with the old weights, new ones wait, then the ranks reload.

Knows the order of these steps; nothing of weights or of clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trireme.errors import BadRequest, TriremeError, Unavailable, WorkerDied
from trireme.sched.scheduler import Scheduler
from trireme.serve.crew import Ranks

Tell = Callable[[TriremeError | None], None]


class Reloading:
    """One reload. Its owner calls `turn` until `is_over`."""

    def __init__(self, path: str, seconds: float, scheduler: Scheduler, tell: Tell):
        self.path, self._scheduler, self._tell = path, scheduler, tell
        self._until = time.monotonic() + seconds
        self._is_sent = False
        self.is_over = self.has_changed = False
        scheduler.holds = True

    def overdue(self) -> list[str]:
        """Requests that have used up their time with the old weights and must end."""
        late = not self._is_sent and time.monotonic() > self._until
        return self._scheduler.begun() if late else []

    def turn(self, ranks: Ranks, in_flight: int) -> None:
        """Does what can be done now. If the ranks have failed, raises their error."""
        if not self._is_sent:
            if in_flight or self._scheduler.begun():
                return
            self._is_sent = True
            ranks.reload(self.path)
        answer = ranks.reloaded()
        if answer is None:
            return
        self.has_changed = not answer.problem
        if self.has_changed:
            self._scheduler.version += 1  # so that the prefix cache finds nothing that the old weights computed
        self._end(BadRequest(answer.problem, param="path") if answer.problem else None)

    def fail(self, error: TriremeError) -> None:
        """Notes that the ranks have ended."""
        self._end(WorkerDied(f"The workers ended during the reload: {error.cause}", "the old weights are being loaded again"))

    def _end(self, error: TriremeError | None) -> None:
        self.is_over, self._scheduler.holds = True, False
        self._tell(error)


def refused(is_ready: bool, is_reloading: bool) -> TriremeError | None:
    """The reason why no reload can begin now."""
    if is_reloading:
        return Unavailable("Weights are being reloaded already.", "wait for that to end")
    return None if is_ready else Unavailable("The workers are not loaded.", "try again when /ready says so")
