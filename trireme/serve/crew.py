"""The worker ranks over time: started, ready, asleep, dead and started again with backoff. Knows no request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from trireme.errors import TriremeError
from trireme.ipc.channel import Channel
from trireme.ipc.messages import Plan, Ready, Reloaded, Sampled
from trireme.ipc.serving import Standing

HEALTHY_SECONDS = 60.0  # after so long without a failure, the count of failures starts again
FAILURES_TO_TELL = 3  # in a row, until "starting" becomes "failed"
LONGEST_BACKOFF = 8.0  # seconds, so that a server is back within ten seconds plus the time of loading


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(LONGEST_BACKOFF, 0.5 * 2 ** (failures - 1))


class Ranks(Protocol):
    """The part of RankGroup (worker/group.py) that is used here."""

    depth: int

    @property
    def is_ready(self) -> bool: ...

    @property
    def ready(self) -> Ready: ...

    @property
    def channels(self) -> list[Channel]: ...

    def ages(self) -> dict[str, float]: ...

    def attend(self) -> None: ...

    def hear(self) -> None: ...

    def launch(self, plan: Plan) -> None: ...

    def collected(self) -> Sampled | None: ...

    def reload(self, path: str) -> None: ...

    def reloaded(self) -> Reloaded | None: ...

    def kill(self) -> None: ...


OpenRanks = Callable[[Callable[[str, float], None]], Ranks]  # (report of phases) -> ranks that have begun to load


class Crew:
    """At most one group of ranks. Whoever owns it calls `tend` often, and watches `ranks.channels` while there are any."""

    def __init__(self, open_ranks: OpenRanks, clock: Callable[[], float] = time.monotonic):
        self._open, self._clock = open_ranks, clock
        self.ranks: Ranks | None = None
        self.standing = Standing("starting", "workers")
        self.num_starts = self.num_restarts = 0  # waking from sleep is not a restart
        self._failures, self._retry_at, self._ready_since = 0, 0.0, 0.0
        self._numbers: Ready | None = None  # of the last group that was ready
        self.is_asleep = self._rises = False

    @property
    def is_ready(self) -> bool:
        return self.standing.name == "ready"

    @property
    def takes_requests(self) -> bool:
        """Whether requests are, or soon will be, computed: one that comes to sleeping workers waits until they are up."""
        return self.standing.name in ("ready", "sleeping")

    def start(self) -> None:
        """Starts to load. Call `tend` until it is ready."""
        name = "sleeping" if self._rises else "starting"
        self._stand(name, "workers")
        self.num_restarts += self.num_starts > 0 and not self._rises
        self.num_starts += 1
        self.ranks = self._open(lambda phase, share: self._stand(name, phase, share))

    def tend(self) -> bool:
        """Checks on the ranks; True when they have just become ready. If they fail, drops the group and raises their error."""
        now = self._clock()
        if self.ranks is None:
            if not self.is_asleep and now >= self._retry_at:
                self.start()
            return False
        try:
            self.ranks.attend()
        except TriremeError as error:
            self.lose(error)
            raise
        if self._failures and self.is_ready and now - self._ready_since > HEALTHY_SECONDS:
            self._failures = 0
        if self.is_ready or not self.ranks.is_ready:
            return False
        self._numbers, self._ready_since, self._rises = self.ranks.ready, now, False
        self._stand("ready")
        return True

    def hear(self) -> None:
        """Only reads the ranks' messages; `tend` also checks heartbeats. Raises the ranks' error, as `tend` does."""
        if self.ranks is not None:
            try:
                self.ranks.hear()
            except TriremeError as error:
                self.lose(error)
                raise

    def sleep(self) -> None:
        """Frees the weights and the KV by killing the ranks. Nothing is lost: weights are read and never written."""
        if self.ranks is not None:
            self.ranks.kill()
            self.ranks = None
        self.is_asleep = True
        self._stand("sleeping")

    def wake(self) -> None:
        """Begins to load again. The standing is "sleeping" until they are up, for requests are taken all the while."""
        if self.is_asleep:
            self.is_asleep, self._rises = False, True
            self.start()

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.kill()
            self.ranks = None

    def lose(self, error: TriremeError) -> None:
        """Notes that the group has failed, for this reason. A new one is started after the backoff."""
        self.ranks, self._rises = None, False
        self._failures += 1
        self._retry_at = self._clock() + backoff(self._failures)
        name = "failed" if self._failures >= FAILURES_TO_TELL else "starting"
        self._stand(name, "restarting workers", reason=str(error))

    def _stand(self, name: str, phase: str = "", share: float = 0.0, reason: str = "") -> None:
        self.standing = Standing(name, phase, share, reason or ("" if name == "ready" else self.standing.reason), self._numbers)
