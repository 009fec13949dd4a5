"""The router process: requests in from the HTTP processes, plans out to the ranks, tokens on to the detokenizer.

Knows the scheduler and who asked for what; nothing of text, HTTP or tensors.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from typing import Any

from trireme.config import Config
from trireme.errors import BadRequest, Overloaded, TriremeError, Unavailable, WorkerDied
from trireme.ipc.channel import Channel
from trireme.ipc.messages import Stop
from trireme.ipc.serving import (
    Abort,
    Alive,
    Ask,
    Crowd,
    Drain,
    Follow,
    Forget,
    Gained,
    Hello,
    Lost,
    Problem,
    Standing,
    Submit,
    Taken,
    Told,
    ToRouter,
    Welcome,
)
from trireme.ipc.switchboard import Switchboard
from trireme.sched.scheduler import Scheduler
from trireme.serve.crew import Crew, OpenRanks
from trireme.types import FinishReason, Progress

BEAT_SECONDS = 0.5
DETOKENIZER = "detokenizer"  # how its name begins; all other peers are HTTP processes

# What the scheduler counts from its beginning; a new one after a restart goes on from the old one's numbers.
COUNTED = ("cache_queries", "cache_hits", "preemptions", "steps", "tokens_scheduled", "tokens_generated", "masked_rows")


class Router:
    def __init__(self, config: Config, control: Channel, listener: Any, open_ranks: OpenRanks):
        self.config, self.control, self._listener = config, control, listener
        self.board, self.crew = Switchboard(), Crew(open_ranks)
        self.scheduler: Scheduler | None = None
        self._in_flight = 0
        self._peers: dict[str, Channel] = {}
        self._detokenizers: list[Channel] = []  # of the peers
        self._owners: dict[str, str] = {}  # request -> HTTP process
        self._held: list[tuple[str, Submit]] = []  # waiting for sleeping workers to wake
        self._crowd = Crowd(0, False)
        self._past: Counter[str] = Counter()
        self._told, self._beaten, self._active_at = Standing("starting"), 0.0, time.monotonic()
        self._draining = self._ending = self._speaking = False
        self._started = self._now = time.monotonic()
        self._tended = 0.0

    def run(self) -> None:
        """Serves until told to stop. Raises if the workers cannot even start."""
        self.board.watch(self._listener, self._accept)
        self.board.join(self.control, self._commanded, lambda reason: self._end())
        try:
            while not self._ending:
                self.board.turn(BEAT_SECONDS)
                self._see_to_crew()
                gained = self._update()
                self._schedule()
                self._hand_out(gained)
                self._tell_crowd()
                self._beat()
        finally:
            self.crew.close()

    # ---- schedule, run, update

    def _schedule(self) -> None:
        """Plans and launches steps, as many as may be in flight."""
        ranks = self.crew.ranks
        if self.scheduler is None or ranks is None:
            return
        while self._in_flight < ranks.depth and (plan := self.scheduler.schedule()) is not None:
            try:
                ranks.launch(plan)
            except TriremeError as error:
                self.crew.lose(error)
                return self._lose_workers(error)
            self._in_flight += 1

    def _update(self) -> list[Progress]:
        """Takes the answers that have come."""
        gained: list[Progress] = []
        if self.scheduler is not None and self.crew.ranks is not None:
            while (sampled := self.crew.ranks.collected()) is not None:
                self._in_flight -= 1
                gained += self.scheduler.update(sampled)
        return gained

    def _hand_out(self, gained: list[Progress]) -> None:
        if not gained:
            return
        self._active_at = self._now
        wanted = [progress for progress in gained if progress.id in self._owners]
        for progress in wanted:
            if progress.finish is not None:
                del self._owners[progress.id]
        self._to_detokenizer(Gained(wanted))

    # ---- workers come and go

    def _see_to_crew(self) -> None:
        """Hears the ranks when they have spoken; looks after them at every beat, and all the time until they are ready."""
        self._now = time.monotonic()
        speaking, self._speaking = self._speaking, False
        try:
            if self._now - self._tended >= BEAT_SECONDS or not self.crew.is_ready:
                self._tend_crew()
            elif speaking:
                self.crew.hear()
        except TriremeError as error:
            if self._told.ready is None:  # they have never been ready: whoever started this server should see why
                raise
            self._lose_workers(error)

    def _tend_crew(self) -> None:
        self._tended = self._now
        if self.crew.tend():
            self._open_scheduler()
        self._sleep_when_idle()
        self._watch_ranks()

    def _watch_ranks(self) -> None:
        """Has to follow every change at once: the next new socket may get a closed one's number."""
        self.board.wake_for(self.crew.ranks.channels if self.crew.ranks else [], self._ranks_speak)

    def _ranks_speak(self) -> None:
        self._speaking = True

    def _open_scheduler(self) -> None:
        """A fresh scheduler for fresh workers: nothing is cached there yet."""
        assert self.crew.ranks is not None
        ready, cache = self.crew.ranks.ready, self.config.cache
        self.scheduler = Scheduler(
            self.config.schedule,
            num_pages=ready.num_pages,
            page_size=0 if cache.page_size == 0 else ready.page_size,
            max_model_len=ready.max_model_len,
            prefix_cache=cache.prefix_cache and ready.shares_prefixes,
            step_seconds=self.config.serve.step_seconds,
        )
        self._in_flight, self._active_at = 0, time.monotonic()
        held, self._held = self._held, []
        for client, submit in held:
            self._add(client, submit)

    def _close_scheduler(self) -> None:
        if self.scheduler is not None:
            stats = self.scheduler.stats()
            self._past.update({name: getattr(stats, name) for name in COUNTED})
        self.scheduler, self._in_flight = None, 0

    def _lose_workers(self, error: TriremeError) -> None:
        print(f"trireme: {error}", file=sys.stderr, flush=True)
        self._watch_ranks()
        self._close_scheduler()
        self._lose_all(WorkerDied(error.cause, "send the request again; the workers are being restarted"))

    def _sleep_when_idle(self) -> None:
        quiet = self.config.serve.idle_unload
        if not quiet or not self.crew.is_ready or self._owners or self._in_flight:
            return
        if time.monotonic() - self._active_at > quiet:
            self._close_scheduler()
            self.crew.sleep()

    # ---- requests come and go

    def _submit(self, client: str, submit: Submit) -> None:
        for follower in submit.requests[1:]:
            follower.tokens = submit.requests[0].tokens  # sent once
        try:
            self._check_open(submit)
            self._active_at = time.monotonic()
            if self.scheduler is None:
                self._held.append((client, submit))
                self.crew.wake()
                self._follow(client, submit)
            else:
                self._add(client, submit)
        except TriremeError as error:
            self._post(client, Lost([request.id for request in submit.requests], Problem.of(error)))
        else:
            self._post(client, Taken(submit.requests[0].id))

    def _check_open(self, submit: Submit) -> None:
        if not submit.requests:
            raise BadRequest("A submission without requests.")
        if self._draining:
            raise Unavailable("The server is shutting down.", "try again later")
        if not self._detokenizers:
            raise Unavailable("The detokenizer is being restarted.", "try again in a moment")
        if not self.crew.takes_requests:
            raise Unavailable(f"The workers are not ready: {self.crew.standing.phase or 'starting'}.", "try again later")
        if len(self._held) >= self.config.schedule.max_waiting:
            raise Overloaded(f"{len(self._held)} requests are waiting already.", "try again later, or raise max_waiting")

    def _tell_crowd(self) -> None:
        """Tells the HTTP processes when the queue has become full, and when it is so no more."""
        waiting = self.scheduler.num_waiting if self.scheduler is not None else len(self._held)
        full = waiting >= self.config.schedule.max_waiting
        if full != self._crowd.full:
            self._crowd = Crowd(waiting, full)
            for name in self._peers:
                if not name.startswith(DETOKENIZER):
                    self._post(name, self._crowd)

    def _follow(self, client: str, submit: Submit) -> None:
        ids = [request.id for request in submit.requests]
        self._owners.update(dict.fromkeys(ids, client))
        self._to_detokenizer(Follow(client, ids, submit.requests[0].sampling))

    def _add(self, client: str, submit: Submit) -> None:
        """Gives all requests of a submission to the scheduler, or none."""
        assert self.scheduler is not None
        added: list[str] = []
        try:
            for request in submit.requests:
                self.scheduler.add(request)
                added.append(request.id)
        except TriremeError as error:
            for id in added:
                self.scheduler.abort(id)
            if submit.requests[0].id not in self._owners:
                raise
            self._lose([request.id for request in submit.requests], error)  # it was taken while the workers slept
            return
        if submit.requests[0].id not in self._owners:
            self._follow(client, submit)

    def _abort(self, ids: list[str], reason: FinishReason) -> None:
        self._active_at = time.monotonic()
        ids = [id for id in ids if self._owners.pop(id, None) is not None]
        self._held = [(client, submit) for client, submit in self._held if submit.requests[0].id not in ids]
        for id in ids:
            if self.scheduler is not None:
                self.scheduler.abort(id, reason)
        if reason is FinishReason.ABORT and ids:
            self._to_detokenizer(Forget(ids))

    def _lose(self, ids: list[str], error: TriremeError) -> None:
        """Tells the owners that their requests cannot go on."""
        by_client: dict[str, list[str]] = {}
        for id in ids:
            by_client.setdefault(self._owners.pop(id), []).append(id)
        for client, lost in by_client.items():
            self._post(client, Lost(lost, Problem.of(error)))
        if ids:
            self._to_detokenizer(Forget(ids))

    def _lose_all(self, error: TriremeError) -> None:
        ids = list(self._owners)
        self._held = []
        if self.scheduler is not None:
            for id in ids:
                self.scheduler.abort(id)
        self._lose(ids, error)

    # ---- peers

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        channel: Channel = Channel(connection, ToRouter)
        name: list[str] = []

        def heard(message: Any) -> None:
            if isinstance(message, Hello):
                name.append(message.name)
                self._peers[message.name] = channel
                self._find_detokenizers()
                self.board.post(channel, Welcome())
                if self._crowd.full and not message.name.startswith(DETOKENIZER):
                    self.board.post(channel, self._crowd)
            elif name:
                self._heard(name[0], message)

        self.board.join(channel, heard, lambda reason: self._gone(name[0], channel) if name else None)

    def _heard(self, peer: str, message: Any) -> None:
        if isinstance(message, Submit):
            self._submit(peer, message)
        elif isinstance(message, Abort):
            self._abort(message.ids, message.reason)
        elif isinstance(message, Ask):
            self._post(peer, Told(message.number, self.stats()))

    def _gone(self, peer: str, channel: Channel) -> None:
        if self._peers.get(peer) is not channel:
            return
        del self._peers[peer]
        self._find_detokenizers()
        if peer.startswith(DETOKENIZER):
            self._lose_all(WorkerDied("The detokenizer process ended.", "send the request again; it is being restarted"))
        else:
            self._abort([id for id, owner in self._owners.items() if owner == peer], FinishReason.ABORT)

    def _find_detokenizers(self) -> None:
        self._detokenizers = [channel for name, channel in self._peers.items() if name.startswith(DETOKENIZER)]

    def _to_detokenizer(self, message: Any) -> None:
        for channel in self._detokenizers:
            self.board.post(channel, message)

    def _post(self, peer: str, message: Any) -> None:
        if peer in self._peers:
            self.board.post(self._peers[peer], message)

    # ---- the supervisor

    def _commanded(self, message: Any) -> None:
        if isinstance(message, Drain):
            self._draining = True
        elif isinstance(message, Stop):
            self._end()

    def _end(self) -> None:
        self._ending = True

    def _beat(self) -> None:
        """Says how the engine stands, when that has changed, and that this loop turns."""
        if self.crew.standing is not self._told:
            self._told = self.crew.standing
            self.board.post(self.control, self._told)
        if self._now - self._beaten >= BEAT_SECONDS:
            self._beaten = self._now
            ages = self.crew.ranks.ages() if self.crew.ranks and self.crew.is_ready else {}
            self.board.post(self.control, Alive(len(self._owners), self._draining, ages))

    def stats(self) -> dict[str, Any]:
        """The scheduler's numbers, counted over restarts, and the router's own."""
        stats: dict[str, Any] = dataclasses.asdict(self.scheduler.stats()) if self.scheduler else dict(self._past)
        if self.scheduler is not None:
            stats |= {name: stats[name] + self._past[name] for name in COUNTED}
        stats |= {
            "requests": len(self._owners),
            "held": len(self._held),
            "in_flight": self._in_flight,
            "worker_starts": self.crew.num_starts,
            "uptime": time.monotonic() - self._started,
            "state": self.crew.standing.name,
        }
        return stats
