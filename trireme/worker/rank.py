"""The main of a rank's process: load, then step by step what the plans say. Started by worker/group.py, never by hand.

Speaks over one inherited socket. A thread beside the steps says that this process lives, and how long the step in hand has taken.
"""

from __future__ import annotations

import gc
import os
import pathlib
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from trireme.config import from_groups
from trireme.errors import TriremeError, WorkerDied
from trireme.ipc.channel import Channel, ChannelClosed
from trireme.ipc.lifeline import prepare_child, tie_to_parent
from trireme.ipc.messages import Beat, Failed, Phase, Plan, Reload, Reloaded, Start, Stop, ToWorker
from trireme.worker.runner import Runner
from trireme.worker.worker import LocalWorker

BEAT_SECONDS = 0.5
REST_SECONDS = 1.0
PIECE_SECONDS = 0.02  # between two pieces of idle work


class Pulse:
    """Sends a beat every half second, from a thread: a stopped process sends none, a hung step shows in its age.

    Steps begin in one thread and may end in another, so they are counted.
    """

    def __init__(self, send: Any):
        self.send, self._lock = send, threading.Lock()
        self._in_hand, self._since = 0, 0.0  # steps begun and not ended, and when the oldest of them had the device to itself
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def begin(self) -> None:
        """A step is about to be launched."""
        with self._lock:
            if not self._in_hand:
                self._since = time.monotonic()
            self._in_hand += 1

    def end(self) -> None:
        """The oldest step has been collected; if there is another, it is that one's turn."""
        with self._lock:
            self._in_hand, self._since = self._in_hand - 1, time.monotonic()

    @property
    def busy_seconds(self) -> float:
        """How long the oldest step in hand has taken; 0 when there is none."""
        with self._lock:
            return time.monotonic() - self._since if self._in_hand else 0.0

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.send(Beat(self.busy_seconds))
            except ChannelClosed:
                os._exit(0)  # the parent has ended


def main() -> None:
    prepare_child()
    if len(sys.argv) > 2:
        tie_to_parent(int(sys.argv[2]))
    channel: Channel = Channel(socket.socket(fileno=int(sys.argv[1])), ToWorker)
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            channel.send(message)

    try:
        start = channel.receive(timeout=60)
        assert isinstance(start, Start), f"expected Start, got {start!r}"
        _serve(start, channel, send)
    except ChannelClosed:
        pass
    except TriremeError as error:
        send(Failed(str(error), error.exit_code))
        sys.exit(error.exit_code)
    except MemoryError:
        send(Failed("Out of memory while working. Fix: lower --kv-tokens or --max-running.", 9))
        sys.exit(9)
    except BaseException as error:
        send(Failed(f"A worker failed: {type(error).__name__}: {error}", WorkerDied.exit_code, traceback.format_exc()))
        sys.exit(WorkerDied.exit_code)


def _serve(start: Start, channel: Channel, send: Any) -> None:
    config = from_groups(start.config)
    pulse = Pulse(send)
    said: dict[str, float] = {}

    def report(name: str, share: float) -> None:
        if share >= 1.0 or share - said.get(name, -1.0) >= 0.02:
            said[name] = share
            send(Phase(name, share))

    worker = LocalWorker(config, pathlib.Path(start.path), start.rank, start.store, report)
    gc.freeze()  # otherwise a full collection visits all imported objects and delays a token by 90 ms
    send(worker.ready)
    answer = _Answering(worker.runner, pulse, send if start.rank == 0 else lambda sampled: None)
    for order in _orders(channel, worker.rest):
        if isinstance(order, Reload):
            send(Reloaded(worker.reload(pathlib.Path(order.path))))
            continue
        pulse.begin()
        worker.runner.launch(order)
        answer.due()


def _orders(channel: Channel, rest: Callable[[], bool]) -> Iterator[Plan | Reload]:
    """The messages until the last one. When none comes for a while, `rest` is called until it has no more work."""
    patience: float | None = REST_SECONDS
    while not isinstance(message := channel.receive(patience), Stop):
        if message is None:
            patience = PIECE_SECONDS if rest() else None
        else:
            assert isinstance(message, Plan | Reload)
            yield message
            patience = REST_SECONDS if patience is not None else None


class _Answering:
    """Collects and sends answers: at once where launching waits for the device, else in a thread, so that the next plan is
    launched while this one runs."""

    def __init__(self, runner: Runner, pulse: Pulse, send: Any):
        self.runner, self.pulse, self.send = runner, pulse, send
        self.owed: queue.SimpleQueue = queue.SimpleQueue()
        if runner.depth > 1:
            threading.Thread(target=self._run, name="answers", daemon=True).start()

    def due(self) -> None:
        """Notes that one more launched plan is to be answered."""
        if self.runner.depth > 1:
            self.owed.put(None)
        else:
            self._answer()

    def _answer(self) -> None:
        sampled = self.runner.collect()
        self.pulse.end()
        self.send(sampled)

    def _run(self) -> None:
        try:
            while True:
                self.owed.get()
                self._answer()
        except ChannelClosed:
            os._exit(0)
        except BaseException as error:
            self.send(Failed(f"A worker failed: {type(error).__name__}: {error}", WorkerDied.exit_code, traceback.format_exc()))
            os._exit(WorkerDied.exit_code)


if __name__ == "__main__":
    main()
