"""The engine's loop in a thread of its own: requests go in, progress comes out. The router runs the same loop."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from trireme.errors import TriremeError, WorkerDied
from trireme.sched.engine import Engine
from trireme.types import FinishReason, Progress, Request

Deliver = Callable[[Progress | TriremeError], Any]


class _Command(NamedTuple):
    """An action to run between two steps, and what to call if the loop ends before that."""

    run: Callable[[], None]
    refuse: Callable[[TriremeError], None]


class EngineLoop:
    """Runs steps while there is work.

    `deliver` is called in the loop's thread and must be quick. One that raises loses its request, and no other. When the loop ends,
    for whatever reason, all waiting callers get the error at once, and later calls are refused.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._lock = threading.Lock()  # guards the three attributes below; never held while a callback runs
        self._closed: TriremeError | None = None
        self._commands: deque[_Command] = deque()
        self._deliver: dict[str, Deliver] = {}
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trireme-engine", daemon=True)
        self._thread.start()

    def submit(self, *orders: tuple[list[Request], Deliver]) -> None:
        """Queues requests, all before the next step. A refusal is delivered as an error through the request's `deliver`."""

        def add() -> None:
            for requests, deliver in orders:
                self._add(requests, deliver)

        def refuse(error: TriremeError) -> None:
            for _, deliver in orders:
                _tell(deliver, error)

        self._command(_Command(add, refuse))

    def abort(self, id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request. Nothing more is delivered for it."""
        with contextlib.suppress(TriremeError):  # a loop that has ended runs no request
            self._command(_Command(lambda: self._drop(id, reason), lambda error: None))

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

        def refuse(error: TriremeError) -> None:
            failure.append(error)
            done.set()

        self._command(_Command(run, refuse))
        done.wait()
        if failure:
            raise failure[0]

    def close(self) -> None:
        """Ends the loop; requests still running get an error."""
        self._end(WorkerDied("The engine has been closed.", "make a new LLM"))
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=60)

    def _command(self, command: _Command) -> None:
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._commands.append(command)
        self._wake.set()

    def _end(self, error: TriremeError) -> None:
        """Refuses all later calls and gives the error to all waiting callers. Only the first reason is kept."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
            commands, self._commands = self._commands, deque()
            delivers, self._deliver = set(self._deliver.values()), {}
        self._wake.set()
        for command in commands:
            command.refuse(error)
        for deliver in delivers:
            _tell(deliver, error)

    # --- in the loop's thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._closed is None:
                while command := self._next_command():
                    self._obey(command)
                if self.engine.has_work():
                    self._hand_out(self.engine.step())
                else:
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            self._end(_failed(error))

    def _next_command(self) -> _Command | None:
        with self._lock:
            return self._commands.popleft() if self._commands else None

    def _obey(self, command: _Command) -> None:
        """Runs a command. If this raises, the loop ends, and those whose requests the command had not come to are told as well."""
        try:
            command.run()
        except BaseException as error:
            command.refuse(_failed(error))
            raise

    def _add(self, requests: list[Request], deliver: Deliver) -> None:
        with self._lock:
            closed = self._closed
            if closed is None:
                self._deliver.update((request.id, deliver) for request in requests)
        if closed is not None:
            return _tell(deliver, closed)
        try:
            self.engine.scheduler.add(*requests)
        except TriremeError as error:
            with self._lock:
                for request in requests:
                    self._deliver.pop(request.id, None)
            _tell(deliver, error)

    def _drop(self, id: str, reason: FinishReason) -> None:
        with self._lock:
            self._deliver.pop(id, None)
        self.engine.scheduler.abort(id, reason)

    def _hand_out(self, steps: list[Progress]) -> None:
        with self._lock:
            found = [(self._deliver.get(progress.id), progress) for progress in steps]
            for progress in steps:
                if progress.finish is not None:
                    self._deliver.pop(progress.id, None)
        for deliver, progress in found:
            if deliver is not None:
                self._give(deliver, progress)

    def _give(self, deliver: Deliver, progress: Progress) -> None:
        """Delivers an item. If this raises, the error is delivered if possible, and the request ends."""
        try:
            deliver(progress)
        except Exception as error:
            self._drop(progress.id, FinishReason.ABORT)
            failure = TriremeError(f"What the engine made could not be delivered: {error!r}.")
            failure.__cause__ = error
            _tell(deliver, failure)


def _failed(error: BaseException) -> TriremeError:
    """What callers are told of an error that ends the loop."""
    if isinstance(error, TriremeError):
        error.__cause__ = None
        return error
    failure = WorkerDied(f"The engine failed: {error!r}.", "its traceback names the place")
    failure.__cause__ = error
    return failure


def _tell(deliver: Deliver, error: TriremeError) -> None:
    """Delivers an error, to a caller who may be gone."""
    with contextlib.suppress(Exception):
        deliver(error)
