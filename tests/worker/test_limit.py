"""A slow rank is not a hung one: a step may take what its tokens are expected to take, and many times that."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import tiny_models

from trireme.config import resolve
from trireme.errors import WorkerDied
from trireme.ipc.messages import Beat
from trireme.sched.capacity import Capacity
from trireme.sched.engine import Engine
from trireme.sched.scheduler import Scheduler
from trireme.types import FinishReason, Request, SamplingParams
from trireme.worker import rank
from trireme.worker.group import RankGroup, open_ranks
from trireme.worker.limit import SLACK, StepLimit

TIMEOUT = 0.4
LENGTH = 2000


def test_a_limit_follows_what_tokens_cost() -> None:
    now = 100.0
    limit = StepLimit(60.0, lambda: now)
    assert limit.seconds == 60.0
    limit.believe(0.2)  # a token alone took so long: a prompt of 2,048 may take minutes before any was seen
    limit.begin(2048)
    assert limit.seconds == pytest.approx(60.0 + SLACK * 0.2 * 2048)
    now += 100.0
    limit.begin(1)
    limit.end()
    assert limit.seconds < 60.0 + SLACK * 0.2 * 2, "one token is left"
    for _ in range(20):
        now += 0.02
        limit.begin(1)
        limit.end()
    limit.end()
    limit.begin(2048)
    assert 60.0 + 2048 * 0.02 < limit.seconds < 60.0 + SLACK * 2048 * 0.03, "a machine that turns out fast is not given long"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tiny_models.save("llama2", tmp_path_factory.mktemp("llama2"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LENGTH}))
    settings = {"model": str(path), "backend": "reference", "threads": 1, "collective_timeout": TIMEOUT}
    group = open_ranks(resolve({**settings, "kv_tokens": 8192, "max_step_tokens": 8192}, environ={}), path)
    yield group
    group.kill()


def test_a_step_far_beyond_the_timeout_is_answered(group: RankGroup) -> None:
    ready = group.ready
    assert 0.0 < ready.token_seconds < 10.0
    schedule = group.config.schedule
    scheduler = Scheduler(schedule, Capacity(ready.num_pages, ready.page_size, ready.max_model_len))
    engine = Engine(scheduler, group)
    scheduler.add(Request(id="a", tokens=[i % 100 for i in range(LENGTH)], sampling=SamplingParams(max_tokens=1)))
    begun, longest, finished = time.monotonic(), 0.0, []
    while engine.has_work():
        finished += engine.step()
        longest, begun = max(longest, time.monotonic() - begun), time.monotonic()
    assert finished[-1].finish is FinishReason.LENGTH
    assert longest > 2 * TIMEOUT, f"the step took {longest:.2f} s: too few to show anything"


def test_a_step_that_takes_longer_than_anything_expected_ends_the_group(group: RankGroup) -> None:
    """As the beats of a rank whose main thread hangs say; nothing is under way, so the timeout alone counts."""
    group.ranks[0].busy = TIMEOUT + 0.1
    group._look_after(group.ranks[0], group._limit.answered_at + 0.9 * TIMEOUT)  # of a step that was answered meanwhile
    with pytest.raises(WorkerDied, match="in one step"):
        group._look_after(group.ranks[0], group._limit.answered_at + TIMEOUT + 0.2)


def test_a_step_that_begins_while_one_ends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which two threads say so."""
    monkeypatch.setattr(rank, "BEAT_SECONDS", 0.01)
    beats: list[Beat] = []
    pulse = rank.Pulse(beats.append)
    for _ in range(300):
        pulse.begin()
        threads = [threading.Thread(target=act) for act in (pulse.begin, pulse.end)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.0002)
        assert pulse.busy_seconds > 0.0, "a step is in hand"
        pulse.end()
        assert pulse.busy_seconds == 0.0
    pulse.begin()
    time.sleep(0.1)
    assert beats and beats[-1].busy_seconds > 0.0
