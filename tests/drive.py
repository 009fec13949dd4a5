"""Drives scheduler and worker in this process and keeps the raw logits of every token computed. Knows no model."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from trireme.backends import automatic, backend_class
from trireme.config import Config, resolve
from trireme.ipc.messages import Plan, Sampled
from trireme.sched.capacity import Capacity
from trireme.sched.engine import Engine
from trireme.sched.scheduler import Scheduler
from trireme.types import Progress, Request, SamplingParams
from trireme.worker.tables import Step
from trireme.worker.worker import LocalWorker


@dataclass
class Run:
    """What one request gained, and the logits of each position that was computed for it (the last time it was)."""

    tokens: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)
    cached: int = 0
    progress: list[Progress] = field(default_factory=list)


class Drive:
    """A scheduler and a worker of the given settings. `full` asks logits of every token, not only of those that sample."""

    def __init__(self, path: pathlib.Path, *, full: bool = True, worker: Any = None, **settings: Any):
        settings = {"backend": "reference", "max_running": 8} | settings
        self.config, self.full = resolve(settings, environ={}), full
        self.worker = worker or LocalWorker(self.config, path)
        self.scheduler = Scheduler(self.config.schedule, Capacity.of(self.worker.ready, self.config.cache), seed=0)
        self.runs: dict[str, Run] = {}
        self.engine = Engine(self.scheduler, self)
        self._plan_ids: list[str] = []
        self.runner = runner = self.worker.runner
        self.depth = runner.depth
        self._steps: Any = worker or runner  # what is given in a worker's place launches at every rank
        self._forward = runner._forward
        runner._forward = self._recorded  # type: ignore[method-assign]

    def launch(self, plan: Plan) -> None:
        if self.full:
            plan = msgspec.structs.replace(plan, logits=list(plan.counts))
        self._plan_ids = [task.id for task in (self.scheduler.rows.tasks[row] for row in plan.rows) if task]
        self._steps.launch(plan)

    def collect(self) -> Sampled:
        return self._steps.collect()

    def _recorded(self, step: Step) -> Tensor:
        logits, begin = self._forward(step), 0
        assert len(self._plan_ids) == len(step.rows) or step.padded
        for id, start, count, wanted in zip(self._plan_ids, step.starts, step.counts, step.logits, strict=False):
            first = int(start + count - wanted)
            for i in range(int(wanted)):
                self.runs[id].logits[first + i] = logits[begin + i].float().clone()
            begin += int(wanted)
        return logits

    def add(self, id: str, tokens: list[int], eos: Iterable[int] = (), n: int = 1, **sampling: Any) -> None:
        """One request, or n of one prompt, whose seeds follow each other: `id`, `id/1`, ..."""
        requests = []
        for number in range(n):
            own = {"temperature": 0.0, "max_tokens": 8} | sampling
            own |= {"seed": own.get("seed", 0) + number} if n > 1 else {}
            name = f"{id}/{number}" if number else id
            requests.append(Request(id=name, tokens=tokens, sampling=SamplingParams(**own), eos_token_ids=list(eos)))
        self.runs |= {request.id: Run() for request in requests}
        self.scheduler.add(*requests)

    def finish(self, max_steps: int = 10_000) -> dict[str, Run]:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return self.runs
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.stats()}")

    def step(self) -> None:
        for progress in self.engine.step():
            run = self.runs[progress.id]
            run.tokens += progress.tokens
            run.cached = max(run.cached, progress.cached_tokens)
            run.progress.append(progress)
        self.scheduler.check()

    def run(self, id: str, tokens: list[int], **sampling: Any) -> Run:
        self.add(id, tokens, **sampling)
        return self.finish()[id]


class ThreadComm:
    """Collectives between threads of one process: everybody lays down a tensor, waits, and reads all of them."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier):
        self.rank, self.size, self.board, self.barrier = rank, size, board, barrier

    def _exchange(self, x: Tensor, read: Callable[[list[Tensor]], Tensor]) -> Tensor:
        x.new_zeros(()).item()  # a value on the host: as with collectives of processes, a step that holds one cannot be recorded
        self.board[self.rank] = x
        self.barrier.wait()
        result = read(self.board).clone()
        self.barrier.wait()
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._exchange(x, lambda parts: torch.stack(parts).sum(0))

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        assert x.shape[-1] == sizes[self.rank]
        return self._exchange(x, lambda parts: torch.cat(parts, -1))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return self._exchange(x, lambda parts: parts[source])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._exchange(x, lambda parts: torch.stack(parts).sum(0).chunk(self.size)[self.rank])

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._exchange(x, lambda parts: torch.cat([part.chunk(self.size)[self.rank] for part in parts]))


class ThreadGroup:
    """One worker per rank, each in a thread of its own; the first answers for all, and the others must agree with it."""

    def __init__(self, config: Config, path: pathlib.Path, monkeypatch: Any):
        size = config.device.tp
        board, barrier = [None] * size, threading.Barrier(size, timeout=60)
        name = config.device.backend
        backend = backend_class(automatic() if name == "auto" else name)  # the one that is opened: it may have a way of its own
        monkeypatch.setattr(backend, "comm", lambda self, rank, size, store: ThreadComm(rank, size, board, barrier))
        self.threads = ThreadPoolExecutor(size)
        # together: a worker's first step needs the others
        ranks = [self.threads.submit(LocalWorker, config, path, rank) for rank in range(size)]
        # Also where one is refused: the others need the stand-in above until they end. The true one would wait for other processes.
        wait(ranks)
        self.workers = [rank.result() for rank in ranks]
        first = self.workers[0]
        self.ready, self.depth, self.runner = first.ready, first.runner.depth, first.runner

    def launch(self, plan: Plan) -> None:
        for done in [self.threads.submit(worker.runner.launch, plan) for worker in self.workers]:
            done.result()

    def collect(self) -> Sampled:
        answers = [worker.runner.collect() for worker in self.workers]
        assert all(answer.tokens == answers[0].tokens for answer in answers)
        return answers[0]

    def close(self) -> None:
        self.threads.shutdown()
