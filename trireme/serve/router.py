"""The router process: requests in from the HTTP processes, plans out to the ranks, tokens on to the detokenizer.

Knows the scheduler and who asked for what; nothing of text, HTTP or tensors.
"""

from __future__ import annotations

import pathlib
import sys
import time
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
    Lost,
    Problem,
    Renew,
    Renewed,
    Serves,
    Standing,
    Submit,
    Taken,
    Told,
)
from trireme.ipc.switchboard import Switchboard
from trireme.serve.peers import DETOKENIZER, Peers
from trireme.serve.reloading import refused
from trireme.serve.replica import BEAT_SECONDS, OpenRanks, Replica
from trireme.types import FinishReason, Progress


class Router:
    def __init__(self, config: Config, control: Channel, listener: Any, open_ranks: OpenRanks, path: pathlib.Path):
        self.config, self.control = config, control
        self.board = Switchboard()
        self.peers = Peers(self.board, listener, self._came, self._heard, self._gone)
        self.replicas = [Replica(config, self.board, open_ranks, path)]
        self._owners: dict[str, str] = {}  # request -> HTTP process
        self._held: list[tuple[str, Submit]] = []  # waiting for sleeping workers to wake
        self._crowd = Crowd(0, False)
        self._told, self._beaten = Standing("starting"), 0.0
        self._draining = self._ending = False
        self._started = time.monotonic()

    @property
    def replica(self) -> Replica:
        """Where the next request goes."""
        return self.replicas[0]

    def run(self) -> None:
        """Serves until told to stop. Raises if the workers cannot even start."""
        self.board.join(self.control, self._commanded, lambda reason: self._end())
        try:
            while not self._ending:
                self.board.turn(BEAT_SECONDS)
                for replica in self.replicas:
                    self._turn(replica)
                self._tell_crowd()
                self._beat()
        finally:
            for replica in self.replicas:
                replica.crew.close()

    def _turn(self, replica: Replica) -> None:
        """Schedule, run, update: one replica's share of a turn."""
        try:
            if replica.tend():
                self._let_in()
        except TriremeError as error:
            if self._told.ready is None:  # the ranks have never been ready: whoever started this server should see why
                raise
            self._lose_workers(replica, error)
        if self.config.serve.idle_unload and not self._owners:
            replica.sleep_when_idle(self.config.serve.idle_unload)
        gained = replica.update()
        self._end_overdue(replica)
        try:
            if replica.see_to_reload():
                self.board.post(self.control, Serves(str(replica.path)))
            replica.schedule()
        except TriremeError as error:
            self._lose_workers(replica, error)
        self._hand_out(gained)

    def _hand_out(self, gained: list[Progress]) -> None:
        if not gained:
            return
        wanted = [progress for progress in gained if progress.id in self._owners]
        for progress in wanted:
            if progress.finish is not None:
                del self._owners[progress.id]
        self.peers.to_detokenizer(Gained(wanted))

    def _let_in(self) -> None:
        """Requests that came while the workers slept."""
        held, self._held = self._held, []
        for client, submit in held:
            self._add(client, submit)

    def _lose_workers(self, replica: Replica, error: TriremeError) -> None:
        print(f"trireme: {error}", file=sys.stderr, flush=True)
        replica.watch()
        replica.close_scheduler(error)
        self._lose_all(WorkerDied(error.cause, "send the request again; the workers are being restarted"))

    # ---- new weights

    def _renew(self, client: str, order: Renew) -> None:
        replica = self.replica

        def tell(error: TriremeError | None) -> None:
            problem = Problem.of(error) if error else None
            self.peers.post(client, Renewed(order.number, replica.version + (error is None), problem))

        refusal = refused(replica.scheduler is not None, replica.reloading is not None)
        if refusal is not None:
            tell(refusal)
        else:
            replica.reload(pathlib.Path(order.path), order.seconds, tell)

    def _end_overdue(self, replica: Replica) -> None:
        """Ends the answers that have used up the time they had to finish with the old weights."""
        ids = [id for id in replica.overdue() if id in self._owners]
        for id in ids:
            replica.abort(id)
        self._lose(ids, Unavailable("The server takes new weights; the answer was ended.", "send the request again"))

    # ---- adding and ending requests

    def _submit(self, client: str, submit: Submit) -> None:
        for follower in submit.requests[1:]:
            follower.tokens = submit.requests[0].tokens  # sent once
        try:
            self._check_open(submit)
            if self.replica.scheduler is None:
                self._held.append((client, submit))
                self.replica.crew.wake()
                self._follow(client, submit)
            else:
                self._add(client, submit)
        except TriremeError as error:
            self.peers.post(client, Lost([request.id for request in submit.requests], Problem.of(error)))
        else:
            self.peers.post(client, Taken(submit.requests[0].id))

    def _check_open(self, submit: Submit) -> None:
        if not submit.requests:
            raise BadRequest("A submission without requests.")
        if self._draining:
            raise Unavailable("The server is shutting down.", "try again later")
        if not self.peers.has_detokenizer:
            raise Unavailable("The detokenizer is being restarted.", "try again in a moment")
        if not self.replica.crew.takes_requests:
            raise Unavailable(f"The workers are not ready: {self.replica.crew.standing.phase or 'starting'}.", "try again later")
        if len(self._held) >= self.config.schedule.max_waiting:
            raise Overloaded(f"{len(self._held)} requests are waiting already.", "try again later, or raise max_waiting")

    def _tell_crowd(self) -> None:
        """Tells the HTTP processes when the queue has become full, and when it has room again."""
        waiting = len(self._held) + sum(replica.scheduler.num_waiting for replica in self.replicas if replica.scheduler is not None)
        full = waiting >= self.config.schedule.max_waiting
        if full != self._crowd.full:
            self._crowd = Crowd(waiting, full)
            for name in self.peers.http():
                self.peers.post(name, self._crowd)

    def _follow(self, client: str, submit: Submit) -> None:
        ids = [request.id for request in submit.requests]
        self._owners.update(dict.fromkeys(ids, client))
        self.peers.to_detokenizer(Follow(client, ids, submit.requests[0].sampling.text))

    def _add(self, client: str, submit: Submit) -> None:
        """Gives all requests of a submission to a replica, or none."""
        was_taken = submit.requests[0].id in self._owners  # while the workers slept
        try:
            self.replica.add(submit.requests)
        except TriremeError as error:
            if not was_taken:
                raise
            self._lose([request.id for request in submit.requests], error)
            return
        if not was_taken:
            self._follow(client, submit)

    def _abort(self, ids: list[str], reason: FinishReason) -> None:
        ids = [id for id in ids if self._owners.pop(id, None) is not None]
        self._held = [(client, submit) for client, submit in self._held if submit.requests[0].id not in ids]
        for id in ids:
            for replica in self.replicas:
                replica.abort(id, reason)
        if reason is FinishReason.ABORT and ids:
            self.peers.to_detokenizer(Forget(ids))

    def _lose(self, ids: list[str], error: TriremeError) -> None:
        """Tells the owners that their requests cannot go on."""
        by_client: dict[str, list[str]] = {}
        for id in ids:
            by_client.setdefault(self._owners.pop(id), []).append(id)
        for client, lost in by_client.items():
            self.peers.post(client, Lost(lost, Problem.of(error)))
        if ids:
            self.peers.to_detokenizer(Forget(ids))

    def _lose_all(self, error: TriremeError) -> None:
        ids = list(self._owners)
        self._held = []
        for replica in self.replicas:
            for id in ids:
                replica.abort(id)
        self._lose(ids, error)

    # ---- peers

    def _came(self, peer: str) -> None:
        if self._crowd.full and not peer.startswith(DETOKENIZER):
            self.peers.post(peer, self._crowd)

    def _heard(self, peer: str, message: Any) -> None:
        if isinstance(message, Submit):
            self._submit(peer, message)
        elif isinstance(message, Abort):
            self._abort(message.ids, message.reason)
        elif isinstance(message, Renew):
            self._renew(peer, message)
        elif isinstance(message, Ask):
            self.peers.post(peer, Told(message.number, self.stats()))

    def _gone(self, peer: str) -> None:
        if peer.startswith(DETOKENIZER):
            self._lose_all(WorkerDied("The detokenizer process ended.", "send the request again; it is being restarted"))
        else:
            self._abort([id for id, owner in self._owners.items() if owner == peer], FinishReason.ABORT)

    # ---- the supervisor

    def _commanded(self, message: Any) -> None:
        if isinstance(message, Drain):
            self._draining = True
        elif isinstance(message, Stop):
            self._end()

    def _end(self) -> None:
        self._ending = True

    def _beat(self) -> None:
        """Sends the supervisor the engine's state when it has changed, and a heartbeat."""
        crew, now = self.replica.crew, time.monotonic()
        if crew.standing is not self._told:
            self._told = crew.standing
            self.board.post(self.control, self._told)
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            ages = crew.ranks.ages() if crew.ranks and crew.is_ready else {}
            self.board.post(self.control, Alive(len(self._owners), self._draining, ages))

    def stats(self) -> dict[str, Any]:
        """The replica's numbers and the router's own."""
        own = {"requests": len(self._owners), "held": len(self._held), "uptime": time.monotonic() - self._started}
        return self.replica.stats() | own
