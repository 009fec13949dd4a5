"""The crew: ranks that fail are started again, later each time; a sleeping crew wakes on demand."""

from __future__ import annotations

import msgspec
import pytest

from trireme.errors import WorkerDied
from trireme.ipc.messages import Ready
from trireme.serve.crew import FAILURES_TO_TELL, HEALTHY_SECONDS, LONGEST_BACKOFF, Crew, backoff
from trireme.serve.supervisor import _numbers

READY = Ready(8, 16, 128, 100, True, 1, "fake", "float32", 1, 1)


class FakeRanks:
    depth = 2

    def __init__(self) -> None:
        self.is_ready, self.dies, self.killed = False, False, False
        self.ready, self.channels = READY, []

    def attend(self) -> None:
        self.hear()

    def hear(self) -> None:
        if self.dies:
            raise WorkerDied("Worker rank 0 of 1 was killed by SIGKILL.")

    def kill(self) -> None:
        self.killed = True


class Bench:
    """A crew with a clock and ranks in the test's hands."""

    def __init__(self) -> None:
        self.now, self.made = 100.0, []
        self.crew = Crew(self._open, lambda: self.now)  # type: ignore[arg-type]

    def _open(self, report: object) -> FakeRanks:
        self.made.append(FakeRanks())
        return self.made[-1]

    def bring_up(self) -> None:
        self.crew.tend()
        self.made[-1].is_ready = True
        assert self.crew.tend() and self.crew.is_ready and self.crew.standing.ready == READY

    def strike(self) -> None:
        self.made[-1].dies = True
        with pytest.raises(WorkerDied):
            self.crew.tend()


def test_a_dead_group_is_replaced_after_a_while_longer_each_time() -> None:
    bench = Bench()
    bench.bring_up()
    for failures in range(1, 9):
        bench.strike()
        assert bench.crew.standing.name == ("failed" if failures >= FAILURES_TO_TELL else "starting")
        assert "SIGKILL" in bench.crew.standing.reason and not bench.crew.takes_requests
        bench.now += backoff(failures) - 0.01
        bench.crew.tend()
        assert len(bench.made) == failures
        bench.now += 0.02
        bench.bring_up()
        assert len(bench.made) == failures + 1
    assert backoff(50) == LONGEST_BACKOFF


def test_a_healthy_time_forgives() -> None:
    bench = Bench()
    bench.bring_up()
    for _ in range(FAILURES_TO_TELL - 1):
        bench.strike()
        bench.now += LONGEST_BACKOFF
        bench.bring_up()
    bench.now += HEALTHY_SECONDS + 1
    bench.crew.tend()
    bench.strike()
    assert bench.crew.standing.name == "starting"


def test_a_sleeping_crew_stays_asleep_until_woken_and_takes_requests_all_the_while() -> None:
    bench = Bench()
    bench.bring_up()
    bench.crew.sleep()
    assert bench.made[0].killed and bench.crew.standing.name == "sleeping"
    bench.now += 1000
    bench.crew.tend()
    assert len(bench.made) == 1 and bench.crew.takes_requests
    bench.crew.wake()
    bench.crew.wake()
    assert len(bench.made) == 2 and bench.crew.takes_requests and not bench.crew.is_ready
    bench.made[-1].is_ready = True
    assert bench.crew.tend() and bench.crew.is_ready


def test_workers_that_die_while_waking_are_tried_again() -> None:
    bench = Bench()
    bench.bring_up()
    bench.crew.sleep()
    bench.crew.wake()
    bench.strike()
    assert bench.crew.standing.name == "starting" and not bench.crew.takes_requests
    bench.now += LONGEST_BACKOFF
    bench.bring_up()


def test_what_a_worker_took_is_one_line() -> None:
    taken = msgspec.structs.replace(READY, weight_bytes=7 << 20, kv_bytes=5 << 20)
    assert _numbers(taken) == "fake, float32, weights 7 MiB, KV 128 tokens in 5 MiB"
    roomy = msgspec.structs.replace(taken, workspace_bytes=3 << 30, taken_bytes=200 << 20)
    scaled = msgspec.structs.replace(taken, kv="fp8, with the checkpoint's scales")
    assert _numbers(scaled).endswith("KV 128 tokens in 5 MiB (fp8, with the checkpoint's scales)")
    assert _numbers(roomy).endswith("in 5 MiB, 3072 MiB left for activations and graphs (200 taken so far)")
