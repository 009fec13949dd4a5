"""The supervisor: starts the server's processes, watches their heartbeats, replaces the dead and the hung, drains at the end.

Knows processes and their standing; nothing of requests, text or tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from trireme.config import Config
from trireme.errors import TriremeError, WorkerDied
from trireme.ipc.channel import Channel, pair
from trireme.ipc.lifeline import show_stacks
from trireme.ipc.messages import Failed, Ready, Stop
from trireme.ipc.serving import Alive, Begin, Drain, FromChild, Serves, Standing
from trireme.ipc.switchboard import Switchboard
from trireme.serve.crew import FAILURES_TO_TELL, HEALTHY_SECONDS, backoff
from trireme.serve.display import Display
from trireme.serve.runtime import Record, write_record
from trireme.serve.systemd import notify

TURN_SECONDS = 0.25
START_SILENCE_SECONDS = 60.0  # imports on a busy machine may delay the first heartbeat
ECHO_SECONDS = 0.5  # a signal repeated within this time is the same signal
STOP_SECONDS = 8.0  # for children that were told to stop
HTTP_MODULE, ENGINE_MODULE = "trireme.api.process", "trireme.serve.launch"


@dataclasses.dataclass
class Orders:
    """The settings that all children get."""

    config: Config
    path: pathlib.Path
    model: str  # the name in the API
    folder: pathlib.Path
    listener: socket.socket
    http_module: str = HTTP_MODULE


class Child:
    """One process of the server, over all its restarts."""

    def __init__(self, role: str, module: str, orders: Orders):
        self.role, self.module, self.orders = role, module, orders
        self.process: subprocess.Popen | None = None
        self.channel: Channel | None = None
        self.said = Alive(0)  # its last heartbeat
        self.beaten, self.is_up = 0.0, False
        self.failures, self.lives = 0, 0
        self.retry_at, self.up_since = 0.0, 0.0
        self.last_words, self.reason = "", ""  # of the current process, and why the one before it ended

    def start(self) -> Channel:
        ours, theirs = pair()
        serves = self.module == self.orders.http_module
        inherited = [theirs.fileno()] + ([self.orders.listener.fileno()] if serves else [])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, str(theirs.fileno()), str(os.getpid()), self.role],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                env=self._environ() if serves else None,
                start_new_session=True,  # the terminal signals only the supervisor; the group can be killed as one
            )
        self.lives += 1
        self.beaten, self.is_up, self.said = time.monotonic(), False, Alive(0)
        self.channel = Channel(ours, FromChild)
        self.channel.post(self._begin(self.orders.listener.fileno() if serves else -1))
        return self.channel

    def _environ(self) -> dict[str, str]:
        """Makes several HTTP processes write their metrics to files of one folder, so that each can report all of them."""
        if self.orders.config.serve.http_workers == 1:
            return dict(os.environ)
        folder = self.orders.folder / "metrics"
        folder.mkdir(exist_ok=True, mode=0o700)
        return dict(os.environ, PROMETHEUS_MULTIPROC_DIR=str(folder))

    def _begin(self, listener: int) -> Begin:
        orders = self.orders
        groups = dataclasses.asdict(orders.config)
        return Begin(f"{self.role}.{self.lives}", groups, str(orders.path), orders.model, str(orders.folder), listener)

    def beat(self, alive: Alive) -> None:
        self.beaten, self.said = time.monotonic(), alive
        if not self.is_up:
            self.is_up, self.up_since = True, self.beaten
        elif self.failures and self.beaten - self.up_since > HEALTHY_SECONDS:
            self.failures = 0

    def silence(self, now: float) -> float:
        return now - self.beaten

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.process.poll() if self.process else None
        if code is None:
            return "was ended"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        """Ends the process and whatever it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def fail(self, reason: str) -> None:
        """Counts a failure and sets the time of the next start."""
        self.process, self.channel, self.is_up, self.said = None, None, False, Alive(0)
        self.failures += 1
        self.retry_at = time.monotonic() + backoff(self.failures)
        self.last_words, self.reason = "", reason


class Supervisor:
    def __init__(self, orders: Orders, record: Record, display: Display):
        self.orders, self.options, self.display = orders, orders.config.serve, display
        self._record, self._url = record, record.url
        self.board = Switchboard()
        engine = [Child("router", ENGINE_MODULE, orders), Child("detokenizer", ENGINE_MODULE, orders)]
        self._https = [Child(f"http-{i}", orders.http_module, orders) for i in range(self.options.http_workers)]
        self._engine, self.children = engine, engine + self._https
        self._standing = Standing("starting")  # of the engine, as the router last said
        self._told: Standing | None = None
        self._told_at = 0.0
        self._been_ready = False
        self._signals: list[tuple[int, float]] = []  # (number, when)
        self._drain_until = 0.0

    def run(self) -> int:
        """Serves until asked to end; returns the exit code. Raises what made the start fail."""
        restore = self._catch_signals()
        try:
            for child in self.children:
                self._start(child)
            while True:
                self.board.turn(TURN_SECONDS)
                if self._signals and (code := self._ending()) is not None:
                    return code
                for child in self.children:
                    self._look_after(child)
                self._tell()
        finally:
            for child in self.children:
                child.kill()
            self.display.close()
            shutil.rmtree(self.orders.folder, ignore_errors=True)
            restore()

    # ---- children

    def _start(self, child: Child) -> None:
        channel = child.start()
        self.board.join(channel, lambda message: self._heard(child, message), lambda reason: self._lost(child, channel))

    def _heard(self, child: Child, message: Any) -> None:
        if isinstance(message, Alive):
            child.beat(message)
        elif isinstance(message, Standing):
            self._standing = message
        elif isinstance(message, Serves):
            self.orders.path = pathlib.Path(message.path)
        elif isinstance(message, Failed):
            child.last_words = message.line
            if message.details:
                print(message.details, file=sys.stderr)
            if not self._been_ready:
                error = TriremeError(message.line)
                error.exit_code = message.exit_code
                raise error

    def _lost(self, child: Child, channel: Channel) -> None:
        """Handles a child that has closed its channel: it has ended or is about to end."""
        if child.channel is not channel:
            return
        if child.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=0.2)  # it says how it ended, if it has
        how = child.ending()
        child.kill()
        self._failed(child, child.last_words or f"The {child.role} process {how}.")

    def _look_after(self, child: Child) -> None:
        now = time.monotonic()
        if child.process is None:
            if now >= child.retry_at and not self._drain_until:
                self._start(child)
            return
        limit = self.options.heartbeat_timeout if child.is_up else START_SILENCE_SECONDS
        if child.silence(now) > limit:
            self._end_hung(child, limit)

    def _end_hung(self, child: Child, limit: float) -> None:
        assert child.process is not None and child.channel is not None
        self._tell()  # before the stacks are written, which takes a while
        show_stacks(child.process.pid)
        time.sleep(0.2)
        child.kill()
        self.board.leave(child.channel)
        self._failed(child, f"The {child.role} process gave no sign of life for {limit:.0f} s.")

    def _failed(self, child: Child, reason: str) -> None:
        child.fail(reason)
        if self._drain_until:
            return
        if not self._been_ready:
            raise WorkerDied(reason, "start again; its last words stand above")
        print(f"trireme: {reason} It is restarted in {backoff(child.failures):.1f} s.", file=sys.stderr, flush=True)
        if child is self._engine[0]:
            self._standing = Standing("starting", "restarting router", 0.0, reason, self._standing.ready)

    # ---- standing

    def standing(self) -> Standing:
        """The state of the whole server: the engine's as the router reports it, unless one of its processes is down."""
        now = time.monotonic()
        up = [child for child in self.children if child.is_up]
        ages = {child.role: child.silence(now) for child in up}
        # A hung HTTP process is replaced too, but does not affect the others.
        hung = any(child.silence(now) > self.options.heartbeat_timeout for child in self._engine if child.is_up)
        down = next((child for child in self._engine if not child.is_up), None)
        name, phase, share, reason = self._standing.name, self._standing.phase, self._standing.share, self._standing.reason
        if self._drain_until:
            name = "draining"
        elif hung:
            name, phase, reason = "failed", "", "A process gives no sign of life."
        elif down is not None and self._been_ready:
            name = "failed" if down.failures >= FAILURES_TO_TELL else "starting"
            phase, reason = f"restarting {down.role}", down.reason
        elif down is not None or not self._https_up():
            name = "starting" if name == "ready" else name
        ages |= {rank: age + child.silence(now) for child in up for rank, age in child.said.ages.items()}
        return Standing(name, phase, share, reason, self._standing.ready, ages, hung)

    def _https_up(self) -> bool:
        return self._been_ready or all(child.is_up for child in self._https)

    def _tell(self) -> None:
        """Sends the HTTP processes the server's state: at once when it changes, otherwise with every heartbeat."""
        standing, now = self.standing(), time.monotonic()
        before, self._told = self._told, standing
        same = before is not None and _says_the_same(before, standing)
        if same and now - self._told_at < 2 * TURN_SECONDS:
            return
        self._told_at = now
        for child in self._https:
            if child.channel is not None:
                self.board.post(child.channel, standing)
        if not same:
            self._show(standing)
        if before is None or before.name != standing.name:
            self._record.state = standing.name
            with contextlib.suppress(OSError):  # a full disk is no reason to end
                write_record(self.orders.folder, self._record)

    def _show(self, standing: Standing) -> None:
        if standing.name == "starting" and not self._been_ready:
            self.display.phase(standing.phase or "processes", standing.share)
        elif standing.name == "ready" and not self._been_ready:
            self._been_ready = True
            ready = standing.ready
            if ready is not None:
                self.display.phase("")
                self.display.line(f"{'model':>12}  {self.orders.model}: {_numbers(ready)}")
            self.display.done(self._ready_line())
            notify("READY=1", f"STATUS=serving {self.orders.model}")

    def _ready_line(self) -> str:
        if "://" not in self._url:
            return f"Ready at {self._url}"
        root = f"{self._url}{self.options.root_path}"
        key = "needed" if self.options.api_key or self.options.api_key_file else "not needed"
        return f"Ready at {self._url}: chat page {root}/, API {root}/v1, key {key}"

    # ---- the end

    def _catch_signals(self) -> Callable[[], None]:
        """Makes SIGTERM and SIGINT be noted and wake the loop."""
        ours, theirs = pair()
        for end in (ours, theirs):
            end.setblocking(False)
        self.board.watch(ours, lambda: _discard(ours))
        wanted = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lambda n, frame: self._signals.append((n, time.monotonic()))) for number in wanted}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            ours.close()
            theirs.close()

        return restore

    def _ending(self) -> int | None:
        """The first signal drains, the second ends at once; the exit code when it is over."""
        if self._signalled_again() or not self._been_ready:
            print("trireme: ended at once.", file=sys.stderr)
            return 128 + self._signals[-1][0]
        if not self._drain_until:
            self._begin_drain()
        active = sum(child.said.active for child in self._https)
        waiting = any(child.process is not None and not child.said.drains for child in self._https)
        if (active or waiting) and time.monotonic() < self._drain_until:
            return None
        if active:
            print(f"trireme: {active} requests were cut after {self.options.drain_timeout:.0f} s.", file=sys.stderr)
        self._stop(self._https)
        self._stop(self._engine)
        return 0

    def _signalled_again(self) -> bool:
        """Whether a second signal has come. Programs like `timeout` send a signal twice at once; this counts as one."""
        return self._signals[-1][1] - self._signals[0][1] > ECHO_SECONDS

    def _begin_drain(self) -> None:
        self._drain_until = time.monotonic() + self.options.drain_timeout
        notify("STOPPING=1")
        print("trireme: finishing what runs; a second signal ends at once.", file=sys.stderr, flush=True)
        self._tell()
        for child in self._engine:
            if child.channel is not None:
                self.board.post(child.channel, Drain())

    def _stop(self, children: list[Child]) -> None:
        """Lets children end by themselves, for a while."""
        for child in children:
            if child.channel is not None:
                self.board.post(child.channel, Stop())
        deadline = time.monotonic() + STOP_SECONDS
        while any(child.process is not None for child in children) and time.monotonic() < deadline and not self._signalled_again():
            self.board.turn(TURN_SECONDS)


def _says_the_same(one: Standing, other: Standing) -> bool:
    """Whether two standings are equal, except for the ages, which always change."""
    return msgspec.structs.replace(one, ages={}) == msgspec.structs.replace(other, ages={})


def _discard(sock: socket.socket) -> None:
    sock.recv(64)


def _numbers(ready: Ready) -> str:
    """What a worker took, in one line."""
    sizes = (ready.weight_bytes, ready.kv_bytes, ready.workspace_bytes, ready.taken_bytes)
    weights, kv, workspace, taken = (size / 2**20 for size in sizes)
    slots = ready.num_pages * ready.page_size
    windows = "".join(f", {band.num_pages * band.page_size} of windows of {band.keep}" for band in ready.bands if band.keep > 0)
    room = f", {workspace:.0f} MiB left for activations and graphs ({taken:.0f} taken so far)" if workspace else ""
    held = f" ({ready.weights})" if ready.weights else ""
    cache = f"KV {slots} tokens{windows} in {kv:.0f} MiB{f' ({ready.kv})' if ready.kv else ''}"
    return f"{ready.backend}, {ready.dtype}, weights {weights:.0f} MiB{held}, {cache}{room}"
