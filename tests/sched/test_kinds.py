"""Prompts of other kinds: keys beside tokens, new weights, prompts computed whole, models that keep nothing."""

from __future__ import annotations

from array import array

import pytest

from tests.sched.fake_worker import FakeWorker, solo
from tests.sched.test_scheduler import EOS, House, Welcoming
from trireme.config import ScheduleOptions
from trireme.errors import BadRequest
from trireme.sched.capacity import Capacity
from trireme.sched.engine import Engine
from trireme.sched.scheduler import Scheduler
from trireme.types import Progress, Request, SamplingParams


class Whole:
    """A scheduler for a model of a certain kind, and its fake worker."""

    def __init__(self, capacity: Capacity, max_step_tokens: int = 20, depth: int = 1):
        options = ScheduleOptions("aggressive", 6, max_step_tokens)
        self.scheduler = Scheduler(options, capacity, clock=lambda: 0.0, seed=0)
        self.worker = FakeWorker(capacity.num_pages, capacity.slots_per_page, depth)
        self.engine = Engine(self.scheduler, self.worker)

    def add(self, id: str, length: int, max_tokens: int = 0, **how: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=3, **how)
        self.scheduler.add(Request(id=id, tokens=[9] * length, sampling=sampling, eos_token_ids=[EOS]))

    def run(self) -> list[Progress]:
        progress: list[Progress] = []
        while self.engine.has_work():
            progress += self.engine.step()
            self.scheduler.check()
        return progress


def test_keys_are_compared_in_the_place_of_tokens() -> None:
    """Two prompts of the same tokens stand for different things, as places of pictures do."""
    house = House(slots=400)
    tokens = [5] * 21

    def ask(id: str, keys: list[int] | None) -> int:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
        house.tokens[id] = []
        house.scheduler.add(Request(id=id, tokens=tokens, keys=keys, sampling=sampling))
        house.run()
        assert house.tokens[id] == solo(tokens, 1, set(), 6)
        return next(item.cached_tokens for item in house.all if item.id == id)

    one, other = [-(7 << 40)] * 21, [5] * 8 + [-(9 << 40)] * 13
    assert [ask("a", one), ask("b", other), ask("c", one), ask("d", None), ask("e", other)] == [0, 0, 20, 8, 20]
    for plan in house.worker.plans:
        assert all(array("i", admit.tokens).tolist() == tokens for admit in plan.admit)


def test_what_other_weights_computed_is_not_found() -> None:
    house = House(slots=400)
    for id, version in (("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 0)):
        house.scheduler.version = version
        house.add(id, [1] * 20, max_tokens=2, ignore_eos=True)
        house.run()
    first = {item.id: item.cached_tokens for item in reversed(house.all)}
    assert first == {"a": 0, "b": 16, "c": 0, "d": 16, "e": 16}


def test_a_row_of_old_weights_leaves_its_pages_to_the_old_weights() -> None:
    house = House(slots=400)
    house.add("old", [1] * 20, max_tokens=9, ignore_eos=True)
    house.step()
    house.scheduler.version = 1
    house.run()
    house.add("new", [1] * 20, max_tokens=2, ignore_eos=True)
    house.run()
    assert [item.cached_tokens for item in house.all if item.id == "new"] == [0, 0]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_whole_prompts_are_never_cut(max_tokens: int) -> None:
    house = Whole(Capacity(100, 4, 48, whole_prompts=True), max_step_tokens=20)
    lengths = [12, 12, 20, 3, 19, 20, 1]
    for number, length in enumerate(lengths):
        house.add(str(number), length, max_tokens)
    progress = house.run()
    assert sum(item.finish is not None for item in progress) == len(lengths)
    first = [dict(zip(plan.rows, plan.counts, strict=True))[a.row] for plan in house.worker.plans for a in plan.admit]
    assert first == lengths, "a prompt was cut, or one overtook another"


def test_a_whole_prompt_beside_rows_that_generate_makes_its_step_longer() -> None:
    house = Whole(Capacity(100, 4, 48, whole_prompts=True), max_step_tokens=20)
    house.add("writing", 5, 30)
    house.engine.step()
    house.add("long", 20, 2)
    house.engine.step()
    assert house.worker.plans[-1].counts == [1, 20]
    house.run()


def test_a_prompt_that_no_step_can_hold_is_refused() -> None:
    house = Whole(Capacity(100, 4, 48, whole_prompts=True), max_step_tokens=20)
    with pytest.raises(BadRequest, match="one step"):
        house.add("long", 21)
    house.add("fits", 20)
    house.run()


def test_a_model_that_keeps_nothing_has_no_pages_and_a_length() -> None:
    house = Whole(Capacity(0, 16, 48, whole_prompts=True), max_step_tokens=64)
    assert house.scheduler.capacity.longest == 48
    with pytest.raises(BadRequest, match="writes nothing"):
        house.add("talks", 5, 3)
    with pytest.raises(BadRequest, match="48"):
        house.add("long", 49)
    for number, length in enumerate([48, 16, 30, 2, 9, 48, 1]):
        house.add(str(number), length)
    progress = house.run()
    assert sorted(item.id for item in progress if item.finish is not None) == [str(number) for number in range(7)]
    assert not any(plan.page_ids for plan in house.worker.plans)
    assert [sum(plan.counts) for plan in house.worker.plans] == [64, 41, 49]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_door_counts_a_page_of_several_holders_once(prefix_cache: bool) -> None:
    """Eight answers to a prompt of 40 tokens fit a memory of 96: 40, and for each an open page."""
    house = House(page_size=4, slots=96, max_running=8, max_step_tokens=64, prefix_cache=prefix_cache)
    house.scheduler.policy = Welcoming()
    house.add("0", list(range(10, 51)), n=8, max_tokens=3, ignore_eos=True)
    most = 0
    while house.engine.has_work():
        house.step()
        most = max(most, house.scheduler.stats().running)
    assert most == 8 and house.scheduler.stats().preemptions == 0
    for number in range(8):
        assert house.tokens[f"0/{number}" if number else "0"] == solo(list(range(10, 51)), number, set(), 3)


def test_the_policies_count_it_once_too() -> None:
    house = House(policy="conservative", page_size=4, slots=128, max_running=8, max_step_tokens=64, prefix_cache=False)
    house.add("0", list(range(10, 43)), n=8, max_tokens=4, ignore_eos=True)
    most = 0
    while house.engine.has_work():
        house.step()
        most = max(most, house.scheduler.stats().running)
    assert most == 8
