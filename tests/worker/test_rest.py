"""Quiet moments: steps recorded before they are wanted change nothing that anybody gets, and no plan waits for long."""

from __future__ import annotations

import math
import pathlib

import pytest
import tiny_models
from drive import Drive
from tiny_models import LENGTH, VOCAB, prompt

from trireme.config import resolve
from trireme.ipc.channel import Channel, pair
from trireme.ipc.messages import Plan, Stop, ToWorker
from trireme.sched.capacity import Capacity
from trireme.sched.engine import Engine
from trireme.sched.scheduler import Scheduler
from trireme.types import Request, SamplingParams
from trireme.worker import rank, worker
from trireme.worker.worker import MOST_REHEARSED, LocalWorker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama3", tmp_path_factory.mktemp("llama3"))


class House:
    """A scheduler and a CPU worker."""

    def __init__(self, folder: pathlib.Path):
        settings = {"backend": "cpu", "max_model_len": LENGTH, "page_size": 4, "kv_tokens": 16 * LENGTH, "max_running": 8}
        config = resolve(settings, environ={})
        self.worker = LocalWorker(config, folder)
        self.scheduler = Scheduler(config.schedule, Capacity.of(self.worker.ready, config.cache))
        self.engine = Engine(self.scheduler, self.worker.runner)

    def ask(self, count: int) -> tuple[dict[str, list[int]], dict[str, int]]:
        """Tokens and cached tokens of prompts that share a beginning, some greedy, some not."""
        shared = prompt(17, VOCAB)
        for i in range(count):
            sampling = SamplingParams(max_tokens=8, temperature=float(i % 2), seed=i, ignore_eos=True)
            self.scheduler.add(Request(id=str(i), tokens=[*shared, i + 1, i + 2], sampling=sampling))
        tokens: dict[str, list[int]] = {str(i): [] for i in range(count)}
        cached = dict.fromkeys(tokens, 0)
        while self.scheduler.has_work():
            for progress in self.engine.step():
                tokens[progress.id] += progress.tokens
                cached[progress.id] = max(cached[progress.id], progress.cached_tokens)
        return tokens, cached


def test_rehearsed_steps_give_the_same_answers_and_leave_the_cache_alone(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LONGEST_REHEARSAL", math.inf)
    plain, rested = House(folder), House(folder)
    assert plain.ask(5) == rested.ask(5)
    while rested.worker.rest():
        pass
    runner = rested.worker.runner
    recorded = {(padding.sequences, mode) for padding, mode in runner.graphs if padding.decode}
    wanted = [size for size in runner.graph_sizes if size <= MOST_REHEARSED]
    assert wanted and recorded >= {(size, mode) for size in wanted for mode in ("greedy", "random")}
    with_prompts = {(padding.sequences, mode) for padding, mode in runner.graphs if not padding.decode}
    assert with_prompts >= {(size, mode) for size in (1, 2, 4, 8) for mode in ("greedy", "random")}
    tokens, cached = rested.ask(8)
    assert (tokens, cached) == plain.ask(8) and min(cached.values()) >= 16


def test_one_recording_serves_steps_with_any_number_of_prompt_tokens(folder: pathlib.Path) -> None:
    """Prompts of many lengths come beside answers, whole and in pieces; every answer is as without recordings."""
    answers = []
    for graphs in (False, True):
        drive = Drive(folder, full=False, backend="cpu", graphs=graphs, max_model_len=LENGTH, max_step_tokens=24)
        for i, length in enumerate((3, 21, 9, 33, 1, 17, 30, 5)):
            drive.add(str(i), prompt(length, i), max_tokens=6 + i % 3, temperature=float(i % 2), seed=i, ignore_eos=True)
            drive.step()
        answers.append({id: run.tokens for id, run in drive.finish().items()})
    assert answers[0] == answers[1]
    assert any(not padding.decode for padding, _ in drive.worker.runner.graphs), "no step with prompts was recorded"


def test_rests_between_plans_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "REST_SECONDS", 0.01)
    ours, theirs = pair()
    router, channel = Channel(ours, ToWorker), Channel(theirs, ToWorker)
    plan = Plan(1, [], [], [], [], [], [], [], [], [])
    left = 3

    def rest() -> bool:
        nonlocal left
        left -= 1
        router.post(plan if left else Stop())  # something comes after each piece
        return left > 0

    assert [order.step for order in rank._orders(channel, rest) if isinstance(order, Plan)] == [1, 1] and left == 0
