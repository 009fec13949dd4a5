"""The main loop: schedule, run, update. Knows neither tensors nor text; the same for the offline API and the router."""

from __future__ import annotations

from typing import Protocol

from trireme.ipc.messages import Plan, Sampled
from trireme.sched.scheduler import Scheduler
from trireme.types import Progress


class Worker(Protocol):
    """Runs plans, in the order in which they were launched."""

    depth: int  # the most plans in flight: 1 is synchronous; with 2, a step is planned while the one before it runs

    def launch(self, plan: Plan) -> None:
        """Starts the plan's step."""
        ...

    def collect(self) -> Sampled:
        """Waits for the answer to the oldest launched plan and returns it."""
        ...


class Engine:
    def __init__(self, scheduler: Scheduler, worker: Worker):
        self.scheduler, self.worker = scheduler, worker
        self._in_flight = 0

    def step(self) -> list[Progress]:
        """One turn of the loop. With a worker of depth 2 an answer comes back while the next step already runs."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.worker.launch(plan)
            self._in_flight += 1
        if not self._in_flight or (plan is not None and self._in_flight < self.worker.depth):
            return []
        sampled = self.worker.collect()
        self._in_flight -= 1
        return self.scheduler.update(sampled)

    def has_work(self) -> bool:
        return self.scheduler.has_work()
