"""How cases of kernels are timed: on the device, in recorded graphs, after side processes have compiled them.
Knows clocks and cases; nothing of tables."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from trireme import kernels
from trireme.bench.kernel_cases import Case
from trireme.kernels import chips

_TARGET_SECONDS = 0.012  # device time of one measurement
TURNS = 4  # turns in which both sides are timed, one after the other
_CALLS = 10  # calls in one recorded graph
_SHORT_US, _SHORT_CALLS = 30.0, 60  # short calls are recorded more often, so that starting the graph does not count
_SLOW_US = 20_000.0  # from which on one call at a time is enough: torch takes seconds for some that others do in microseconds


class Clock:
    """The device time of one call, sampled whenever asked; unrecorded calls run back to back between two events."""

    def __init__(self, call: Callable[[], Any], recorded: bool):
        self.samples = list[float]()
        for _ in range(2):
            call()  # a new call, which is noted
        if chips.elapsed(call) > _SLOW_US:
            self.calls, self.repeats = 1, 1
            self.step: Callable[[], Any] = call
            return
        self.calls = _CALLS
        self.step = chips.record(call, _CALLS) if recorded else lambda: [call() for _ in range(_CALLS)]
        self.step()
        once = chips.elapsed(self.step)
        if recorded and once < _SHORT_US * _CALLS:
            self.calls, self.step = _SHORT_CALLS, chips.record(call, _SHORT_CALLS)
            self.step()
            once = chips.elapsed(self.step)
        self.repeats = max(1, min(10, int(_TARGET_SECONDS / TURNS / max(once * 1e-6, 1e-7))))

    def turn(self) -> None:
        self.samples += [chips.elapsed(self.step) for _ in range(self.repeats)]

    @property
    def median(self) -> float:
        """The median time of one call in microseconds."""
        return statistics.median(self.samples) / self.calls


def device_time(call: Callable[[], Any], recorded: bool) -> float:
    """The median device time of one call in microseconds."""
    clock = Clock(call, recorded)
    for _ in range(TURNS):
        clock.turn()
    return clock.median


def rehearse(case: Case) -> None:
    """Runs the case once and ignores any error."""
    with contextlib.suppress(Exception), kernels.use(include=case.enables):
        case.ours(*case.make())


def picked(only: str, cases: Sequence[Case]) -> list[int]:
    """The cases of the named operators, with or without an overload. All cases if no name is given."""
    wanted = {name for name in only.split(",") if name}
    return [i for i, case in enumerate(cases) if not wanted or case.op in wanted or case.op.partition(".")[0] in wanted]


def compile_ahead(function: Callable[[Any], None], jobs: Sequence[Any], seconds: float = 120.0) -> None:
    """Lets side processes run each job once, so that the compiled kernels are in Triton's cache on disk. The time is bounded."""
    deadline = time.monotonic() + seconds
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for future in [pool.submit(function, job) for job in jobs]:
            with contextlib.suppress(Exception):
                future.result(timeout=max(0.0, deadline - time.monotonic()))
        pool.shutdown(wait=False, cancel_futures=True)
