"""The engine's loop in a thread of its own: requests go in, progress comes out. The same sentence as the router's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from trireme.errors import TriremeError, WorkerDied
from trireme.sched.engine import Engine
from trireme.types import FinishReason, Progress, Request

Deliver = Callable[[Progress | TriremeError], Any]


class EngineLoop:
    """Runs steps while there is work. `deliver` is called in the loop's thread: it must be quick and not raise."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._deliver: dict[str, Deliver] = {}
        self._closed: TriremeError | None = None
        self._thread = threading.Thread(target=self._run, name="trireme-engine", daemon=True)
        self._thread.start()

    def submit(self, *orders: tuple[list[Request], Deliver]) -> None:
        """Queues requests, all before the next step; a refusal is delivered as an error to whom the request was for."""
        if self._closed is not None:
            raise self._closed

        def add() -> None:
            for requests, deliver in orders:
                self._add(requests, deliver)

        self._command(add)

    def abort(self, id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request. Nothing more is delivered for it."""
        self._command(lambda: self._drop(id, reason))

    def call(self, action: Callable[[], Any]) -> None:
        """Runs an action between two steps and waits for it."""
        done = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                action()
            except BaseException as error:
                failure.append(error)
            finally:
                done.set()

        self._command(run)
        done.wait()
        if failure:
            raise failure[0]

    def close(self) -> None:
        """Ends the loop; requests still running get an error."""
        self._command(self._stop)
        self._thread.join(timeout=60)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _stop(self) -> None:
        self._closed = self._closed or WorkerDied("The engine has been closed.", "make a new LLM")

    def _add(self, requests: list[Request], deliver: Deliver) -> None:
        added = []
        try:
            for request in requests:
                self._deliver[request.id] = deliver
                added.append(request.id)
                self.engine.scheduler.add(request)
        except TriremeError as error:
            for id in added:
                self._drop(id, FinishReason.ABORT)
            deliver(error)

    def _drop(self, id: str, reason: FinishReason) -> None:
        self._deliver.pop(id, None)
        self.engine.scheduler.abort(id, reason)

    def _run(self) -> None:
        while self._closed is None:
            while self._commands:
                self._commands.popleft()()
            if self._closed is not None:
                break
            if not self.engine.has_work():
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                progress = self.engine.step()
            except Exception as error:
                self._closed = (
                    error if isinstance(error, TriremeError) else WorkerDied(f"The engine failed: {error!r}.", "see above")
                )
                self._closed.__cause__ = error
                break
            self._hand_out(progress)
        for deliver in set(self._deliver.values()):
            deliver(self._closed or WorkerDied("The engine has been closed."))
        while self._commands:  # whoever waits for a call must not wait for ever
            self._commands.popleft()()

    def _hand_out(self, steps: list[Progress]) -> None:
        for progress in steps:
            deliver = self._deliver.get(progress.id)
            if deliver is not None:
                if progress.finish is not None:
                    del self._deliver[progress.id]
                deliver(progress)
