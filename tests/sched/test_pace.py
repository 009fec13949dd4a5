"""Prompts are cut to the time that readers of other answers are willing to wait, once the machine's speed is known."""

from __future__ import annotations

import pytest

from trireme.config import ScheduleOptions
from trireme.ipc.messages import Plan, Sampled
from trireme.sched.capacity import Capacity
from trireme.sched.pace import LEAST, Pace
from trireme.sched.scheduler import Scheduler
from trireme.types import Request, SamplingParams


class Machine:
    """A scheduler on a machine whose clock moves by `per_token` for every token of a step."""

    def __init__(self, step_seconds: float, per_token: float):
        self.now, self.per_token = 100.0, per_token
        self.scheduler = Scheduler(
            ScheduleOptions(),
            Capacity(num_pages=4096, page_size=16, max_model_len=8192),
            step_seconds=step_seconds,
            clock=lambda: self.now,
        )

    def add(self, id: str, length: int, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add(Request(id=id, tokens=[len(id) + i % 97 for i in range(length)], sampling=sampling))

    def step(self) -> Plan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.now += self.per_token * sum(plan.counts)
            self.scheduler.update(Sampled(plan.step, [5] * sum(plan.samples)))
            self.scheduler.check()
        return plan


@pytest.mark.parametrize("per_token", [1e-3, 2e-3])
def test_beside_answers_a_step_takes_about_as_long_as_it_may(per_token: float) -> None:
    machine = Machine(0.6, per_token)
    machine.add("a", 200, 400)
    machine.step()
    machine.add("long", 1500, 4)
    seconds, computed = [], 0
    while computed < 1500:
        plan = machine.step()
        assert plan is not None and 1 in plan.counts, "the running answer takes part in every step"
        seconds.append(sum(plan.counts) * per_token)
        computed += sum(plan.counts) - 1
    assert max(seconds) <= 0.6 + per_token
    assert len(seconds) == -(-1500 // (round(0.6 / per_token) - 1)), "and no step is smaller than it need be"


def test_alone_a_prompt_is_not_cut() -> None:
    machine = Machine(0.2, 1e-2)
    for name in ("first", "second"):  # the second when the speed is known
        machine.add(name, 1500, 1)
        plan = machine.step()
        assert plan is not None and plan.counts == [1500]
        while machine.step():
            pass


def test_without_a_bound_prompts_are_not_cut() -> None:
    machine = Machine(0.0, 1e-2)
    machine.add("a", 200, 400)
    machine.step()
    machine.add("long", 1500, 4)
    plan = machine.step()
    assert plan is not None and plan.counts == [1, 1500]


def test_however_slow_prompts_go_on() -> None:
    machine = Machine(0.2, 5.0)
    machine.add("a", 200, 400)
    machine.step()
    machine.add("long", 3 * LEAST + 4, 4)
    plans = [machine.step() for _ in range(4)]
    assert [plan.counts for plan in plans if plan] == [[1, LEAST], [1, LEAST], [1, LEAST], [1, 4]]


@pytest.mark.parametrize(("per_token", "together"), [(1e-3, True), (1e-5, False)])
def test_whoever_comes_during_a_long_step_takes_part_in_the_next(per_token: float, together: bool) -> None:
    machine = Machine(0.4, per_token)
    machine.add("teaches", 200, 1)
    machine.step()
    machine.add("a", 210, 8)
    first = machine.scheduler.schedule()
    second = machine.scheduler.schedule()  # a worker of depth 2 asks for one more
    assert first is not None and (second is None) == together
    machine.add("later", 220, 8)
    machine.now += per_token * 210
    machine.scheduler.update(Sampled(first.step, [5]))
    following = machine.scheduler.schedule()
    assert following is not None and following.counts == [1, 220]


def test_small_steps_and_waiting_teach_nothing() -> None:
    pace = Pace(0.2)
    pace.learn(0.0, 5.0, 8, 0)  # answers alone: their tokens cost more than a prompt's
    assert pace.prompt_tokens(8, 2048) == 2048
    pace.learn(0.0, 6.0, 1000, 1000)  # handed out early, but it ran only from 5.0 on
    assert pace.prompt_tokens(8, 2048) == 200 - 8
