"""One replica of the model: its scheduler, its ranks and the steps between them, over all lives of the ranks.

Knows plans and progress; nothing of who asked, of text or of sockets to clients.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from trireme.config import Config
from trireme.errors import TriremeError
from trireme.ipc.switchboard import Switchboard
from trireme.sched.capacity import Capacity
from trireme.sched.scheduler import Scheduler
from trireme.sched.stats import Stats
from trireme.serve.crew import Crew, Ranks
from trireme.serve.reloading import Reloading, Tell
from trireme.types import FinishReason, Progress, Request

BEAT_SECONDS = 0.5

OpenRanks = Callable[[pathlib.Path, Callable[[str, float], None]], Ranks]  # (model, report of phases) -> ranks that begin to load

# Counters of the scheduler. After a restart, the counts of the earlier schedulers are added.
COUNTED = ("cache_queries", "cache_hits", "preemptions", "steps", "tokens_scheduled", "tokens_generated", "masked_rows")


class Replica:
    """Its owner calls `tend` in every turn, then `update` and `schedule`."""

    def __init__(self, config: Config, board: Switchboard, open_ranks: OpenRanks, path: pathlib.Path):
        self.config, self.path = config, path
        self.crew = Crew(lambda report: open_ranks(self.path, report))
        self.scheduler: Scheduler | None = None  # while ranks are ready
        self.active_at = time.monotonic()  # the last time there was work
        self._board, self._in_flight = board, 0
        self._past: Counter[str] = Counter()
        self._speaking, self._tended = False, 0.0
        self.version = 0  # of the weights: how often they were reloaded
        self.reloading: Reloading | None = None

    # ---- schedule, run, update

    def schedule(self) -> None:
        """Plans and launches as many steps as may be in flight. If the ranks have failed, raises their error."""
        ranks = self.crew.ranks
        if self.scheduler is None or ranks is None:
            return
        while self._in_flight < ranks.depth and (plan := self.scheduler.schedule()) is not None:
            try:
                ranks.launch(plan)
            except TriremeError as error:
                self.crew.lose(error)
                raise
            self._in_flight += 1

    def update(self) -> list[Progress]:
        """Applies the answers that have arrived."""
        gained: list[Progress] = []
        if self.scheduler is not None and self.crew.ranks is not None:
            while (sampled := self.crew.ranks.collected()) is not None:
                self._in_flight -= 1
                gained += self.scheduler.update(sampled)
        if gained:
            self.active_at = time.monotonic()
        return gained

    def add(self, requests: list[Request]) -> None:
        """Gives all of these requests to the scheduler, or none."""
        assert self.scheduler is not None
        self.active_at = time.monotonic()
        self.scheduler.add(*requests)

    def abort(self, id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.active_at = time.monotonic()
        if self.scheduler is not None:
            self.scheduler.abort(id, reason)

    # ---- new weights

    def reload(self, path: pathlib.Path, seconds: float, tell: Tell) -> None:
        """Begins to load the weights of another folder; `tell` is called with the result."""
        assert self.scheduler is not None
        self.reloading = Reloading(str(path), seconds, self.scheduler, tell)

    def overdue(self) -> list[str]:
        """Requests that must end now, so that new weights can come."""
        return self.reloading.overdue() if self.reloading else []

    def see_to_reload(self) -> bool:
        """Moves a reload on; True when the new weights have just been loaded. If the ranks have failed, raises their error."""
        reloading, ranks = self.reloading, self.crew.ranks
        if reloading is None or ranks is None:
            return False
        try:
            reloading.turn(ranks, self._in_flight)
        except TriremeError as error:
            self.crew.lose(error)
            raise
        if not reloading.is_over:
            return False
        self.reloading, self.active_at = None, time.monotonic()
        if reloading.has_changed:
            self.version, self.path = self.version + 1, pathlib.Path(reloading.path)
        return reloading.has_changed

    # ---- start and end of the ranks

    def tend(self) -> bool:
        """Reads the ranks' messages; checks on them at every beat, and in every turn until they are ready. True when they have
        just become ready. If they have failed, raises their error."""
        now = time.monotonic()
        speaking, self._speaking = self._speaking, False
        if now - self._tended < BEAT_SECONDS and self.crew.is_ready:
            if speaking:
                self.crew.hear()
            return False
        self._tended = now
        is_new = self.crew.tend()
        if is_new:
            self._open_scheduler()
        self.watch()
        return is_new

    def watch(self) -> None:
        """Polls the current ranks' channels. Call it at once when they change: a new socket may get a closed one's number."""
        self._board.wake_for(self.crew.ranks.channels if self.crew.ranks else [], self._heard)

    def _heard(self) -> None:
        self._speaking = True

    def _open_scheduler(self) -> None:
        """Makes a new scheduler for new ranks, whose cache is empty."""
        assert self.crew.ranks is not None
        capacity = Capacity.of(self.crew.ranks.ready, self.config.cache)
        self.scheduler = Scheduler(self.config.schedule, capacity, step_seconds=self.config.serve.step_seconds)
        self._in_flight, self.active_at = 0, time.monotonic()

    def close_scheduler(self, error: TriremeError | None = None) -> None:
        """Drops the scheduler, because the ranks have ended or will end. Its counts are kept."""
        if self.reloading is not None and error is not None:
            self.reloading.fail(error)
        self.reloading = None
        if self.scheduler is not None:
            stats = self.scheduler.stats()
            self._past.update({name: getattr(stats, name) for name in COUNTED})
        self.scheduler, self._in_flight = None, 0

    def sleep_when_idle(self, quiet: float) -> None:
        """Frees weights and KV after so many seconds without work."""
        if self.crew.is_ready and not (self._in_flight or self.reloading) and time.monotonic() - self.active_at > quiet:
            self.close_scheduler()
            self.crew.sleep()
            self.watch()

    def stats(self) -> dict[str, Any]:
        """The scheduler's numbers, counted over restarts. Without a scheduler nothing runs and nothing waits."""
        numbers = dataclasses.asdict(self.scheduler.stats()) if self.scheduler else {}
        stats: dict[str, Any] = {field.name: numbers.get(field.name, 0) for field in dataclasses.fields(Stats)}
        stats |= {name: stats[name] + self._past[name] for name in COUNTED}
        crew = {"worker_starts": self.crew.num_starts, "worker_restarts": self.crew.num_restarts, "state": self.crew.standing.name}
        return stats | {"in_flight": self._in_flight, "weights_version": self.version, **crew}
