"""The engine's thread: one caller's trouble is nobody else's, and when the loop ends nobody waits any longer."""

from __future__ import annotations

import asyncio
import pathlib
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from tiny_server_model import write_tiny

from trireme import LLM, SamplingParams
from trireme.config import ScheduleOptions
from trireme.errors import TriremeError, WorkerDied
from trireme.ipc.messages import Plan, Sampled
from trireme.sched.capacity import Capacity
from trireme.sched.engine import Engine
from trireme.sched.scheduler import Scheduler
from trireme.serve.loop import EngineLoop
from trireme.types import Progress, Request

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


class SlowWorker:
    """A step takes `seconds`; with `failing`, the first one raises when it is over."""

    depth = 1

    def __init__(self, seconds: float = 0.002, failing: bool = False):
        self.seconds, self.failing, self.plans = seconds, failing, deque[Plan]()

    def launch(self, plan: Plan) -> None:
        self.plans.append(plan)

    def collect(self) -> Sampled:
        time.sleep(self.seconds)
        if self.failing:
            raise ValueError("boom")
        plan = self.plans.popleft()
        return Sampled(plan.step, [5] * sum(plan.samples))


def make_loop(worker: SlowWorker) -> EngineLoop:
    scheduler = Scheduler(ScheduleOptions(), Capacity(num_pages=256, page_size=16, max_model_len=512))
    return EngineLoop(Engine(scheduler, worker))


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    with closing(make_loop(SlowWorker())) as loop:
        yield loop


def ask(loop: EngineLoop, id: str, deliver: Callable[[Any], Any], max_tokens: int = 20) -> None:
    loop.submit(([Request(id=id, tokens=[1, 2, 3], sampling=SamplingParams(max_tokens=max_tokens))], deliver))


def tokens_of(inbox: queue.SimpleQueue, seconds: float = 5.0) -> list[int]:
    tokens: list[int] = []
    while True:
        item: Progress = inbox.get(timeout=seconds)
        tokens += item.tokens
        if item.finish is not None:
            return tokens


def test_a_deliver_that_raises_loses_its_own_request_alone(loop: EngineLoop) -> None:
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    other: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def broken(item: Any) -> None:
        if isinstance(item, Progress):
            raise RuntimeError("Event loop is closed")
        told.put(item)

    ask(loop, "other", other.put)
    ask(loop, "broken", broken)
    assert "Event loop is closed" in str(told.get(timeout=5.0)), "whoever can still be told is told"
    assert len(tokens_of(other)) == 20
    loop.call(lambda: loop.engine.scheduler.check())
    assert not loop.engine.scheduler.stats().running


def test_a_failed_step_tells_those_who_came_meanwhile(capfd: pytest.CaptureFixture) -> None:
    loop = make_loop(SlowWorker(0.2, failing=True))
    first, second, called = (queue.SimpleQueue[Any]() for _ in range(3))
    ask(loop, "first", first.put)
    time.sleep(0.05)
    ask(loop, "second", second.put)  # behind the step that is about to fail

    def call() -> None:
        with pytest.raises(WorkerDied, match="boom"):
            loop.call(lambda: None)
        called.put("refused")

    threading.Thread(target=call, daemon=True).start()
    for inbox in (first, second, called):
        assert inbox.get(timeout=1.0), "somebody waits for a loop that has ended"
    for refused in (lambda: loop.call(lambda: None), lambda: ask(loop, "late", first.put)):
        with pytest.raises(WorkerDied, match="boom"):
            refused()
    loop.abort("first")


def test_a_request_that_ends_the_loop_leaves_nobody_waiting_who_came_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are handed over together: those behind the one that the scheduler fails on are told too."""
    loop = make_loop(SlowWorker())
    add, inboxes = loop.engine.scheduler.add, [queue.SimpleQueue[Any]() for _ in range(3)]

    def failing(request: Request) -> None:
        if request.id == "1":
            raise AssertionError("books do not agree")
        add(request)

    monkeypatch.setattr(loop.engine.scheduler, "add", failing)
    requests = [Request(id=str(number), tokens=[1, 2, 3], sampling=SamplingParams()) for number in range(3)]
    loop.submit(*(([request], inbox.put) for request, inbox in zip(requests, inboxes, strict=True)))
    for inbox in inboxes:
        assert "books do not agree" in str(inbox.get(timeout=1.0))
    with pytest.raises(WorkerDied, match="books do not agree"):
        ask(loop, "late", inboxes[0].put)


def test_closing_does_not_wait_for_a_step_to_tell_those_who_wait() -> None:
    loop, inbox = make_loop(SlowWorker(2.0)), queue.SimpleQueue[Any]()
    ask(loop, "a", inbox.put)
    time.sleep(0.05)
    threading.Thread(target=loop.close, daemon=True).start()
    assert "closed" in str(inbox.get(timeout=1.0))
    for refused in (lambda: loop.call(lambda: None), lambda: ask(loop, "late", inbox.put)):
        with pytest.raises(WorkerDied, match="closed"):
            refused()


def test_an_event_loop_that_is_gone_leaves_the_engine_running(loop: EngineLoop) -> None:
    async def leave() -> None:
        here = asyncio.get_running_loop()
        ask(loop, "a", lambda item: here.call_soon_threadsafe(print), 400)
        await asyncio.sleep(0.02)

    asyncio.run(leave())
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ask(loop, "b", inbox.put)
    assert len(tokens_of(inbox)) == 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny(tmp_path_factory.mktemp("loop") / "tiny", chat_template=TEMPLATE)


class Callers:
    """Threads that ask one LLM in every way there is, and leave at random moments."""

    def __init__(self, llm: LLM, chance: random.Random):
        self.llm, self.chance, self.unexpected = llm, chance, list[BaseException]()
        ways = (self._asyncio, self._generate, self._stream_chat)
        self.threads = [threading.Thread(target=self._run, args=(ways[i % 3],), daemon=True) for i in range(9)]
        for thread in self.threads:
            thread.start()

    def _run(self, way: Callable[[float], None]) -> None:
        for _ in range(2):
            try:
                way(self.chance.random() * 0.03)
            except (WorkerDied, TimeoutError):
                pass
            except BaseException as error:
                self.unexpected.append(error)

    def _asyncio(self, seconds: float) -> None:
        asyncio.run(asyncio.wait_for(self.llm.agenerate([1, 2, 3], LONG), seconds))

    def _generate(self, seconds: float) -> None:
        self.llm.generate([[4, 5], [6]], SamplingParams(max_tokens=int(seconds * 1000), ignore_eos=True))

    def _stream_chat(self, seconds: float) -> None:
        begun = time.monotonic()
        for _ in self.llm.stream_chat([{"role": "user", "content": "hello"}], LONG):
            if time.monotonic() - begun > seconds:
                break


def test_nobody_waits_after_leaving_and_closing_at_random_moments(model: pathlib.Path) -> None:
    """Twelve engines, each closed at a random moment with nine callers about it who leave twice as they like: 228 moments."""
    chance = random.Random(5)
    for _ in range(12):
        llm = LLM(str(model), backend="reference", threads=1, kv_tokens=4096, max_model_len=1024)
        callers = Callers(llm, chance)
        time.sleep(chance.random() * 0.08)
        llm.close()
        deadline = time.monotonic() + 5.0
        for thread in callers.threads:
            thread.join(timeout=max(deadline - time.monotonic(), 0.01))
        assert not any(thread.is_alive() for thread in callers.threads), "somebody waits for an engine that was closed"
        assert not callers.unexpected, callers.unexpected
        with pytest.raises(TriremeError, match="closed"):
            llm.generate([[1]])
