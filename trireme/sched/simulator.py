"""The simulator: runs the real scheduler with a cost model and a trace, in virtual time. Knows no model, and no meaning of tokens.

A step takes  base + per_token * tokens + per_context * context  seconds, where context is the cached tokens its rows attend to.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trireme.config import ScheduleOptions
from trireme.errors import BadConfig
from trireme.ipc.messages import Plan, Sampled
from trireme.sched.capacity import Capacity
from trireme.sched.scheduler import Scheduler
from trireme.sched.traces import Arrival
from trireme.types import Progress, Request, SamplingParams

END = 1  # the token that ends an answer; every other sampled token is 0


@dataclass(frozen=True)
class Machine:
    """What a step costs. The defaults are the arithmetic of a 7B model in fp16 on one 80 GB card:

    weights 13.5 GB read once at 1.6 TB/s and 1.5 ms of launches; 13.5 GFLOP a token at 170 TFLOP/s; 0.5 MB of KV per
    token read at 1.6 TB/s. Memory for KV: 0.9 * 80 GB less the weights, at 0.5 MB a token.
    """

    base: float = 0.010
    per_token: float = 80e-6
    per_context: float = 0.33e-6
    kv_tokens: int = 112_000

    def seconds(self, tokens: int, context: int) -> float:
        return self.base + self.per_token * tokens + self.per_context * context


@dataclass(frozen=True)
class Bound:
    """A latency bound: seconds to the first token, and between any two tokens after it."""

    first: float = 10.0
    between: float = 1.5


@dataclass(frozen=True)
class Load:
    """How requests arrive: at a rate (per second), from clients that each wait for their answer, at the trace's own times, or, by
    default, all at once."""

    rate: float = 0.0
    clients: int = 0
    recorded: bool = False

    @property
    def name(self) -> str:
        if self.recorded:
            return "as recorded"
        return f"{self.rate:g}/s" if self.rate else f"{self.clients} clients" if self.clients else "all at once"


@dataclass(frozen=True)
class Setup:
    """The settings of a simulation, except the policy and the load."""

    machine: Machine = Machine()
    bound: Bound = Bound()
    page_size: int = 16
    max_running: int = 1000
    max_step_tokens: int = 2048
    max_tokens: int = 2048  # of every request
    prefix_cache: bool = True
    warm_up: float = 0.4  # share of the requests that arrive before the measured time
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """The results of one policy under one load, over the requests that ended in the measured time. Rates are per virtual second.

    The measured time begins when the first request after the warm-up arrives and ends when the last one arrives, so filling and
    emptying the system do not count. If all requests arrive at once, or as recorded, the whole run is measured.
    """

    policy: str
    load: str
    requests: int
    seconds: float  # measured
    throughput: float  # output tokens
    goodput: float  # output tokens of requests that met the bound
    within_bound: float  # share of requests that met it
    first_token_p50: float
    first_token_p99: float
    gap_p99: float  # of each request's longest wait between two tokens
    evictions: int
    memory_use: float  # mean share of the KV memory held by running requests, over the steps
    running: float  # mean
    scheduler_ms: float  # real time of schedule + update per step, mean
    scheduler_ms_p99: float
    first_token_p99_of: dict[int, float] = field(default_factory=dict)  # by priority


@dataclass
class Life:
    """The measurements of one request."""

    arrival: Arrival
    came: float
    first: float = -1.0
    last: float = 0.0  # when the latest token came
    longest_gap: float = 0.0
    tokens: int = 0

    def advance(self, now: float) -> None:
        if self.tokens:
            self.longest_gap = max(self.longest_gap, now - self.last)
        else:
            self.first = now - self.came
        self.last = now
        self.tokens += 1

    def meets(self, bound: Bound) -> bool:
        return self.first <= bound.first and self.longest_gap <= bound.between


class PretendWorker:
    """A worker that computes nothing: it answers plans so that answers end where the trace says."""

    def __init__(self, machine: Machine, trace: list[Arrival]):
        self._machine, self._trace = machine, trace
        self._last: dict[int, int] = {}  # row: the position after which the end token is sampled

    def run(self, plan: Plan) -> tuple[Sampled, float]:
        """The answer, and the seconds it took."""
        for admit in plan.admit:
            self._last[admit.row] = admit.num_prompt + self._trace[admit.seed].output - 1
        tokens, context = [], 0
        for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
            context += start + count
            if samples:
                tokens.append(END if start + count == self._last[row] else 0)
        return Sampled(plan.step, tokens), self._machine.seconds(sum(plan.counts), context)


@dataclass
class Measures:
    """The measurements of every step."""

    running: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)

    def note(self, scheduler: Scheduler, cost: float) -> None:
        self.running.append(len(scheduler.rows))
        self.memory.append(1.0 - scheduler.memory.available / scheduler.memory.num_pages)
        self.cost.append(cost)


class Simulation:
    """One run: one policy under one load on one trace."""

    def __init__(self, policy: str, load: Load, trace: list[Arrival], setup: Setup):
        self.policy, self.load, self.trace, self.setup = policy, load, trace, setup
        page = setup.page_size
        longest = max(arrival.prompt for arrival in trace) + setup.max_tokens
        options = ScheduleOptions(policy, setup.max_running, setup.max_step_tokens, max_waiting=len(trace) + 1)
        self.scheduler = Scheduler(
            options,
            Capacity(setup.machine.kv_tokens // (page or longest), page, longest, setup.prefix_cache),
            clock=lambda: self.now,
            seed=setup.seed,
        )
        self.worker = PretendWorker(setup.machine, trace)
        self.now = 0.0
        self.lives: dict[str, Life] = {}
        self.measures = Measures()
        self._to_come = deque(self._times())
        self._ended = 0
        self._progress: Callable[[int], None] = lambda ended: None

    def run(self, progress: Callable[[int], None] = lambda ended: None) -> Report:
        """Runs the whole trace and returns the results. `progress` is told how many requests have ended."""
        self._progress = progress
        while self._to_come or self.scheduler.has_work():
            self._arrive()
            if not self._step():
                self.now = max(self.now, self._to_come[0][0])
        return self._report()

    def _times(self) -> list[tuple[float, int]]:
        """When each request of the trace arrives. Waiting clients send their later requests when answers end."""
        count = len(self.trace)
        if self.load.rate:
            gaps = np.random.default_rng(self.setup.seed).exponential(1.0 / self.load.rate, count)
            return list(zip(np.cumsum(gaps).tolist(), range(count), strict=True))
        if self.load.recorded:
            return [(arrival.at or 0.0, number) for number, arrival in enumerate(self.trace)]
        return [(0.0, number) for number in range(min(count, self.load.clients or count))]

    def _arrive(self) -> None:
        while self._to_come and self._to_come[0][0] <= self.now:
            came, number = self._to_come.popleft()
            arrival = self.trace[number]
            sampling = SamplingParams(max_tokens=self.setup.max_tokens, seed=number)
            # Each request's prompt has a token of its own, so that no prompts share a prefix.
            prompt = [number + 2] * arrival.prompt
            self.lives[str(number)] = Life(arrival, came)
            self.scheduler.add(
                Request(
                    id=str(number),
                    tokens=prompt,
                    sampling=sampling,
                    eos_token_ids=[END],
                    arrival=came,
                    priority=arrival.priority,
                )
            )

    def _step(self) -> bool:
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        cost = time.perf_counter() - began
        if plan is None:
            return False
        sampled, seconds = self.worker.run(plan)
        self.now += seconds
        began = time.perf_counter()
        progress = self.scheduler.update(sampled)
        self.measures.note(self.scheduler, cost + time.perf_counter() - began)
        self._record(progress)
        return True

    def _record(self, progress: list[Progress]) -> None:
        for item in progress:
            self.lives[item.id].advance(self.now)
            if item.finish is not None:
                self._ended += 1
                self._progress(self._ended)
            if item.finish is not None and self.load.clients and not self.load.rate:
                following = len(self.lives) + len(self._to_come)
                if following < len(self.trace):
                    self._to_come.append((self.now, following))

    def _span(self) -> tuple[float, float]:
        """The measured time."""
        if not self.load.rate and not self.load.clients:
            return 0.0, self.now
        came = [life.came for life in self.lives.values()]
        return came[int(self.setup.warm_up * len(came))], came[-1]

    def _report(self) -> Report:
        begin, end = self._span()
        lives = [life for life in self.lives.values() if begin <= life.last <= end]
        if not lives:
            raise BadConfig("No request ended in the measured time.", "simulate more requests, or fewer clients")
        good = [life for life in lives if life.meets(self.setup.bound)]
        first = np.percentile([life.first for life in lives], [50, 99])
        seen, seconds = self.measures, end - begin
        return Report(
            policy=self.policy,
            load=self.load.name,
            requests=len(lives),
            seconds=seconds,
            throughput=sum(life.tokens for life in lives) / seconds,
            goodput=sum(life.tokens for life in good) / seconds,
            within_bound=len(good) / len(lives),
            first_token_p50=float(first[0]),
            first_token_p99=float(first[1]),
            gap_p99=float(np.percentile([life.longest_gap for life in lives], 99)),
            evictions=self.scheduler.stats().preemptions,
            memory_use=float(np.mean(seen.memory)),
            running=float(np.mean(seen.running)),
            scheduler_ms=float(np.mean(seen.cost)) * 1e3,
            scheduler_ms_p99=float(np.percentile(seen.cost, 99)) * 1e3,
            first_token_p99_of=_first_by_priority(lives),
        )


def _first_by_priority(lives: list[Life]) -> dict[int, float]:
    """The 99th percentile of the seconds to the first token, for each priority of the trace."""
    firsts: dict[int, list[float]] = {}
    for life in lives:
        firsts.setdefault(life.arrival.priority, []).append(life.first)
    return {priority: float(np.percentile(values, 99)) for priority, values in sorted(firsts.items())}


Told = Callable[[str, str, int], None]  # policy, load, requests that have ended


def simulate(
    policies: list[str], loads: list[Load], trace: list[Arrival], setup: Setup, told: Told = lambda policy, load, ended: None
) -> list[Report]:
    """Every policy under every load."""
    return [
        Simulation(policy, load, trace, setup).run(functools.partial(told, policy, load.name))
        for policy in policies
        for load in loads
    ]
