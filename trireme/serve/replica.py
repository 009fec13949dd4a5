"""One replica of the model: its scheduler, its ranks and the steps between them, over all lives of the ranks.

Knows plans and progress; nothing of who asked, of text or of sockets to clients.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any

from trireme.config import Config
from trireme.errors import TriremeError
from trireme.ipc.switchboard import Switchboard
from trireme.sched.capacity import Capacity
from trireme.sched.scheduler import Scheduler
from trireme.sched.stats import Stats
from trireme.serve.crew import Crew, OpenRanks
from trireme.types import FinishReason, Progress, Request

BEAT_SECONDS = 0.5

# What the scheduler counts from its beginning; a new one after a restart goes on from the old one's numbers.
COUNTED = ("cache_queries", "cache_hits", "preemptions", "steps", "tokens_scheduled", "tokens_generated", "masked_rows")


class Replica:
    """Its owner calls `tend` in every turn, then `update` and `schedule`."""

    def __init__(self, config: Config, board: Switchboard, open_ranks: OpenRanks):
        self.config, self.crew = config, Crew(open_ranks)
        self.scheduler: Scheduler | None = None  # while ranks are ready
        self.active_at = time.monotonic()  # when there was last something to do
        self._board, self._in_flight = board, 0
        self._past: Counter[str] = Counter()
        self._speaking, self._tended = False, 0.0

    # ---- schedule, run, update

    def schedule(self) -> None:
        """Plans and launches steps, as many as may be in flight. Raises what ended the ranks."""
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
        """Takes the answers that have come."""
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

    # ---- the ranks come and go

    def tend(self) -> bool:
        """Hears the ranks when they have spoken; looks after them at every beat, and all the time until they are ready. True when
        they have just become ready. Raises what ended them."""
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
        """Has to follow every change of the ranks at once: the next new socket may get a closed one's number."""
        self._board.wake_for(self.crew.ranks.channels if self.crew.ranks else [], self._heard)

    def _heard(self) -> None:
        self._speaking = True

    def _open_scheduler(self) -> None:
        """A fresh scheduler for fresh ranks: nothing is cached there yet."""
        assert self.crew.ranks is not None
        capacity = Capacity.of(self.crew.ranks.ready, self.config.cache)
        self.scheduler = Scheduler(self.config.schedule, capacity, step_seconds=self.config.serve.step_seconds)
        self._in_flight, self.active_at = 0, time.monotonic()

    def close_scheduler(self) -> None:
        """The ranks are gone, or about to go: what was counted is kept."""
        if self.scheduler is not None:
            stats = self.scheduler.stats()
            self._past.update({name: getattr(stats, name) for name in COUNTED})
        self.scheduler, self._in_flight = None, 0

    def sleep_when_idle(self, quiet: float) -> None:
        """Frees weights and KV after so many seconds without anything to do."""
        if self.crew.is_ready and not self._in_flight and time.monotonic() - self.active_at > quiet:
            self.close_scheduler()
            self.crew.sleep()
            self.watch()

    def stats(self) -> dict[str, Any]:
        """The scheduler's numbers, counted over restarts. Without a scheduler nothing runs and nothing waits."""
        numbers = dataclasses.asdict(self.scheduler.stats()) if self.scheduler else {}
        stats: dict[str, Any] = {field.name: numbers.get(field.name, 0) for field in dataclasses.fields(Stats)}
        stats |= {name: stats[name] + self._past[name] for name in COUNTED}
        crew = {"worker_starts": self.crew.num_starts, "worker_restarts": self.crew.num_restarts, "state": self.crew.standing.name}
        return stats | {"in_flight": self._in_flight, **crew}
