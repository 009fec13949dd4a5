"""Worker processes, one per rank, seen as one worker. A rank that dies or hangs ends the group with one clear line.

Knows processes and sockets. Imports no torch: the ranks do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from trireme.config import Config
from trireme.errors import TriremeError, WorkerDied
from trireme.ipc.channel import Channel, ChannelClosed, pair
from trireme.ipc.lifeline import show_stacks
from trireme.ipc.messages import Beat, Failed, FromWorker, Phase, Plan, Ready, Reload, Reloaded, Sampled, Start, Stop
from trireme.worker.limit import StepLimit

SILENCE_SECONDS = 5.0  # a rank without a heartbeat for so long counts as hung
START_SILENCE_SECONDS = 120.0  # imports and mapping files may delay a heartbeat

Report = Callable[[str, float], None]


class _Rank:
    def __init__(self, rank: int, size: int, config: Config, path: pathlib.Path, store: str):
        ours, theirs = pair()
        environ = dict(os.environ, GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"), OMP_WAIT_POLICY="PASSIVE")
        # A main thread lasts as long as its process; ranks that another thread starts learn of its end by their channel alone.
        tied = [str(os.getpid())] if threading.current_thread() is threading.main_thread() else []
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trireme.worker.rank", str(theirs.fileno()), *tied],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environ,
            )
        self.rank = rank
        self.channel: Channel = Channel(ours, FromWorker)
        self.ready: Ready | None = None
        self.beaten, self.busy = time.monotonic(), 0.0
        groups = {name: values for name, values in dataclasses.asdict(config).items() if name != "serve"}
        self.channel.send(Start(rank, size, store, groups, str(path)))

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.process.poll()
        if code is None:
            return "closed its channel"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class RankGroup:
    """Has the interface of the runner (launch, collect), and channels and attend for loops that also wait for other things."""

    depth = 2  # a plan is sent while the one before it runs

    def __init__(
        self, config: Config, path: pathlib.Path, report: Report, silence: float = SILENCE_SECONDS, folder: str | None = None
    ):
        """Starts the ranks and does not wait for them; `attend` until `is_ready`, or use `open_ranks`. What they share lies in
        `folder`, or where temporary files do."""
        self.config, self.size, self._report, self._silence = config, config.device.tp, report, silence
        self._folder = tempfile.TemporaryDirectory(prefix="trireme-", dir=folder)
        store = os.path.join(self._folder.name, "store")
        self._sampled: deque[Sampled] = deque()
        self._limit = StepLimit(config.device.collective_timeout)
        self._reloaded: list[Reloaded] = []
        self._closed = False
        self.ranks: list[_Rank] = []
        try:
            for rank in range(self.size):
                self.ranks.append(_Rank(rank, self.size, config, path, store))
        except BaseException:
            self.kill()
            raise

    @property
    def is_ready(self) -> bool:
        return all(rank.ready is not None for rank in self.ranks)

    @property
    def ready(self) -> Ready:
        """The numbers of the loaded model; ranks may differ by a page where memory does."""
        known = [rank.ready for rank in self.ranks if rank.ready]
        bands = [min(sizes, key=lambda band: band.num_pages) for sizes in zip(*(ready.bands for ready in known), strict=True)]
        return msgspec.structs.replace(min(known, key=lambda ready: ready.num_pages), bands=bands)

    @property
    def channels(self) -> list[Channel]:
        return [rank.channel for rank in self.ranks]

    def ages(self) -> dict[str, float]:
        """Seconds since each rank's last heartbeat."""
        now = time.monotonic()
        return {f"rank-{rank.rank}": now - rank.beaten for rank in self.ranks}

    def launch(self, plan: Plan) -> None:
        self._limit.begin(sum(plan.counts))
        self._post(plan)

    def reload(self, path: str) -> None:
        """Tells every rank to load the weights of a folder; `reloaded` returns the result. No step may be in flight."""
        self._post(Reload(path))

    def reloaded(self) -> Reloaded | None:
        """The ranks' common answer, once all have answered."""
        if len(self._reloaded) < self.size:
            return None
        answers, self._reloaded = self._reloaded, []
        if any(answer.problem for answer in answers) and not all(answer.problem for answer in answers):
            self.kill()
            raise WorkerDied("Some ranks took new weights and some did not; the group was ended.", "see above for the reason")
        return answers[0]

    def _post(self, message: Plan | Reload) -> None:
        for rank in self.ranks:
            try:
                rank.channel.post(message)
            except ChannelClosed:
                self._end(rank, rank.ending())

    def collect(self) -> Sampled:
        while not self._sampled:
            self.wait(0.5)
        return self._sampled.popleft()

    def collected(self) -> Sampled | None:
        """The answer to the oldest launched plan, if it has arrived."""
        return self._sampled.popleft() if self._sampled else None

    def wait(self, timeout: float) -> None:
        """Waits for a rank's message or the timeout, and then calls `attend`."""
        poll = select.poll()
        for channel in self.channels:
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.backlog else 0))
        poll.poll(timeout * 1000)
        self.attend()

    def attend(self) -> None:
        """Reads the ranks' messages and checks for dead or hung ranks. Does not wait."""
        self.hear()
        now = time.monotonic()
        for rank in self.ranks:
            self._look_after(rank, now)

    def _look_after(self, rank: _Rank, now: float) -> None:
        limit = self._silence if rank.ready else START_SILENCE_SECONDS
        if now - rank.beaten > limit:
            self._end(rank, f"has given no sign of life for {limit:.0f} s", hung=True)
        busy = min(rank.busy, now - self._limit.answered_at)  # the last heartbeat may be about a step that has been answered since
        if busy > self._limit.seconds:
            self._end(rank, f"has been in one step for {busy:.0f} s", hung=True)

    def hear(self) -> None:
        """Reads the ranks' messages. Does not wait."""
        for rank in self.ranks:
            self._hear(rank)

    def _hear(self, rank: _Rank) -> None:
        try:
            rank.channel.flush()
            for message in rank.channel.read():
                rank.beaten = time.monotonic()
                if isinstance(message, Sampled):
                    self._sampled.append(message)
                    self._limit.end()
                elif isinstance(message, Reloaded):
                    self._reloaded.append(message)
                elif isinstance(message, Beat):
                    rank.busy = message.busy_seconds
                elif isinstance(message, Ready):
                    rank.ready = message
                    self._limit.believe(message.token_seconds)
                elif isinstance(message, Phase) and rank.rank == 0:
                    self._report(message.name, message.share)
                elif isinstance(message, Failed):
                    self._fail(rank, message)
        except ChannelClosed:
            self._end(rank, rank.ending())

    def _fail(self, rank: _Rank, failed: Failed) -> None:
        """Handles a rank's own report of failure. If it only reports the loss of another rank, that rank is taken as the cause."""
        deadline = time.monotonic() + 2.0
        while self.size > 1 and failed.exit_code == WorkerDied.exit_code and time.monotonic() < deadline:
            dead = next((r for r in self.ranks if r is not rank and (r.process.poll() or 0) < 0), None)
            if dead:
                self._end(dead, dead.ending())
            time.sleep(0.05)
        self.kill()
        if failed.details:
            print(failed.details, file=sys.stderr)
        error = TriremeError(failed.line)
        error.exit_code = failed.exit_code
        raise error

    def _end(self, rank: _Rank, what: str, hung: bool = False) -> None:
        if rank.process.poll() is None:
            show_stacks(rank.process.pid)
            time.sleep(0.1)
        if not hung:  # a hung rank may die when asked for its stacks, but this is not the cause
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(timeout=0.5)
                what = rank.ending()
        self.kill()
        raise WorkerDied(
            f"Worker rank {rank.rank} of {self.size} {what}; the group was ended.", "start again; its last words stand above"
        )

    def kill(self) -> None:
        """Ends every rank at once."""
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            rank.channel.close()
        self._folder.cleanup()
        self._closed = True

    def close(self) -> None:
        """Lets the ranks end by themselves, and kills those that do not."""
        if self._closed:
            return
        for rank in self.ranks:
            with contextlib.suppress(ChannelClosed):
                rank.channel.send(Stop())
        deadline = time.monotonic() + 5.0
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        self.kill()


def open_ranks(config: Config, path: pathlib.Path, report: Report = lambda name, share: None) -> RankGroup:
    """Opens a group and waits until it is ready."""
    group = RankGroup(config, path, report)
    try:
        while not group.is_ready:
            group.wait(0.5)
    except BaseException:
        group.kill()
        raise
    return group
