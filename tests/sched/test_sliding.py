"""Layers that do not keep every token, in the scheduler: whatever a row reads of its window and its state is its own, however rows
come and go, and prefixes are found where they can be resumed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sched.fake_worker import solo
from tests.sched.test_scheduler import ARRIVALS, EOS, House, limit_of
from trireme.ipc.messages import AHEAD, NO_PARENT, Plan

# Tight enough that rows wait for windows and places, and that tails are dropped.
HOUSES = st.builds(
    House,
    page_size=st.sampled_from([1, 4]),
    depth=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["past_future", "aggressive", "conservative"]),
    prefix_cache=st.booleans(),
    max_running=st.integers(1, 5),
    max_step_tokens=st.sampled_from([1, 3, 8, 64]),
    slots=st.sampled_from([64, 160]),
    windows=st.sampled_from([(), ((6, 90),), ((3, 56), (11, 100))]),
    chunked=st.booleans(),
    states=st.sampled_from([None, 0, 1, 3, 20]),
    spacing=st.sampled_from([1, 8, 100]),
)


def traffic(house: House, arrivals: list[dict]) -> None:
    expected, aborts, clock = {}, {}, 0
    for number, arrival in enumerate(arrivals):
        for _ in range(arrival["wait"]):
            house.step()
            clock += 1
            for id in [id for id, when in aborts.items() if when <= clock]:
                house.scheduler.abort(id)
                del aborts[id], expected[id]
                house.scheduler.check()
        id, how = str(number), {name: arrival[name] for name in ("max_tokens", "salt", "priority", "prompt_logprobs", "n")}
        house.add(id, arrival["prompt"], seed=number % 3, **how)
        limit = limit_of(house, arrival["prompt"], arrival["max_tokens"])
        for other in range(arrival["n"]):
            expected[f"{id}/{other}" if other else id] = solo(arrival["prompt"], number % 3 + other, {EOS}, limit)
        if arrival["abort"] is not None:
            aborts[id] = clock + arrival["abort"]
    house.run()
    for id, tokens in expected.items():
        assert house.tokens[id] == tokens
    tails = house.scheduler.memory.tails
    tails.forget(list(tails.by_page))
    assert all(len(band.pool) == band.size.num_pages for band in tails.windows.bands)
    assert tails.states is None or len(tails.states.pool) == house.states


@settings(max_examples=15, deadline=None)
@given(house=HOUSES, arrivals=st.lists(ARRIVALS, min_size=1, max_size=10))
def test_every_window_and_state_is_the_rows_own(house: House, arrivals: list[dict]) -> None:
    traffic(house, arrivals)


@pytest.mark.wide
@pytest.mark.timeout(900)
@settings(max_examples=600, deadline=None)
@given(house=HOUSES, arrivals=st.lists(ARRIVALS, min_size=1, max_size=20))
def test_every_window_and_state_is_the_rows_own_in_long_traffic(house: House, arrivals: list[dict]) -> None:
    traffic(house, arrivals)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(max_examples=4000, deadline=None)
@given(house=HOUSES, arrivals=st.lists(ARRIVALS, min_size=1, max_size=20))
def test_every_window_and_state_is_the_rows_own_in_very_long_traffic(house: House, arrivals: list[dict]) -> None:
    traffic(house, arrivals)


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_stay_within_the_pages_of_windows(depth: int) -> None:
    """However many drafts the workers may have: a row has pages of a window for AHEAD tokens behind what is answered."""
    kept = {"windows": ((2, 80),), "page_size": 1, "slots": 400}
    house = House(drafts=100, likeness=0.9, depth=depth, max_step_tokens=256, max_running=2, **kept)
    for number in range(2):
        house.add(str(number), [number + 1] * 3, max_tokens=40, seed=number, ignore_eos=True)
    rows, launch, most = house.scheduler.rows, house.worker.launch, []

    def noted(plan: Plan) -> None:
        most.append(int((rows.scheduled - rows.computed)[rows.order].max()))
        launch(plan)

    house.worker.launch = noted  # type: ignore[method-assign]
    house.run()
    assert AHEAD * 3 // 4 <= max(most) <= AHEAD
    for number in range(2):
        assert house.tokens[str(number)] == solo([number + 1] * 3, number, set(), 40)


WINDOWS = {"windows": ((6, 400),)}
BOUNDED: list[dict] = [WINDOWS, {"chunked": True, **WINDOWS}, {"states": 40}, {"states": 40, **WINDOWS}]


def found(house: House) -> dict[str, int]:
    return {item.id: item.cached_tokens for item in reversed(house.all)}


@pytest.mark.parametrize("kept", BOUNDED)
def test_a_branch_is_resumed_with_a_state_the_second_time_it_is_met(kept: dict) -> None:
    house = House(max_step_tokens=64, slots=400, page_size=4, spacing=100, **kept)
    for id, tail in (("a", [2]), ("b", [3]), ("c", [4])):
        house.add(id, [1] * 21 + tail * 5, max_tokens=3, seed=1, ignore_eos=True)
        house.run()
    house.add("d", [1] * 21 + [4] * 5 + house.tokens["c"], max_tokens=3, seed=1, ignore_eos=True)
    house.run()
    # The end of an answer has a window's tail. A state is kept at the last whole page of the prompt.
    assert found(house) == {"a": 0, "b": 0 if "states" in kept else 20, "c": 20, "d": 24 if "states" in kept else 28}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [0, 1, 4, 16])
@pytest.mark.parametrize("kept", BOUNDED)
def test_a_group_goes_on_from_one_prompt(kept: dict, page_size: int, prefix_cache: bool) -> None:
    """Also those that find no row at once, when the row that computed the prompt has long gone."""
    house = House(page_size=page_size, prefix_cache=prefix_cache, max_step_tokens=64, max_running=3, slots=400, **kept)
    prompt = list(range(10, 31))
    house.add("0", prompt, n=7, max_tokens=5, ignore_eos=True)
    house.run()
    for number in range(7):
        assert house.tokens[f"0/{number}" if number else "0"] == solo(prompt, number, set(), 5)
    assert sum(sum(plan.counts) for plan in house.worker.plans) == 21 + 6 + 7 * 4, "the prompt was computed more than once"
    forks = [fork for plan in house.worker.plans for fork in plan.forks]
    assert len(forks) == 6 and {fork.parent == NO_PARENT for fork in forks} == {True, False}


def test_without_a_place_for_its_state_each_computes_the_prompt() -> None:
    house = House(states=0, max_step_tokens=64, slots=400)
    house.add("0", [2] * 20, n=3, max_tokens=4, ignore_eos=True)
    house.run()
    assert not any(plan.forks or plan.keeps for plan in house.worker.plans)
    assert all(house.tokens[name] == solo([2] * 20, seed, set(), 4) for seed, name in enumerate(("0", "0/1", "0/2")))


def test_states_are_kept_at_a_distance_in_prompts_and_in_answers() -> None:
    """A paused row and a longer prompt go on from the newest; the place of the one longest not used is taken first."""
    house = House(states=40, spacing=8, max_step_tokens=64, slots=400)
    house.add("a", list(range(10, 29)), max_tokens=20, ignore_eos=True)
    house.run()
    ends = [
        start + count for plan in house.worker.plans for start, count in zip(plan.starts, plan.counts, strict=True) if plan.keeps
    ]
    assert ends == [8, 16, 24, 32]  # the last whole page of the prompt ends at 16, too
    whole = list(range(10, 29)) + house.tokens["a"]
    for id, length, cached in (("b", 37, 32), ("c", 30, 24), ("d", 21, 16), ("e", 17, 16), ("f", 16, 8)):
        house.add(id, whole[:length], max_tokens=1)
        house.run()
        assert found(house)[id] == cached, id


def test_the_place_of_the_state_longest_not_used_is_taken() -> None:
    house = House(states=2, spacing=100, max_step_tokens=64, slots=400)
    for id, first in (("a", 1), ("b", 2), ("a again", 1), ("c", 3), ("a once more", 1), ("b again", 2)):
        house.add(id, [first] * 13, max_tokens=1)
        house.run()
    assert found(house) == {"a": 0, "b": 0, "a again": 12, "c": 0, "a once more": 12, "b again": 0}


@pytest.mark.parametrize("kept", [{"states": 0}, {"windows": ((5, 24),)}])
def test_pages_that_were_computed_again_do_not_stand_twice(kept: dict) -> None:
    """A prompt that cannot be resumed is computed again. The cached pages may not stay beside its own: no memory would be
    left for it to go on."""
    house = House(slots=64, max_running=2, max_step_tokens=8, **kept)
    prompt = list(range(10, 50))
    for id, tokens in (("a", prompt), ("other", [1] * 30), ("b", prompt), ("c", [*prompt[:38], 1, 1])):
        house.add(id, tokens, max_tokens=4, ignore_eos=True)
        house.run()
        tree = house.scheduler.memory.tree
        assert tree is not None and tree.num_pages <= 16
        assert house.tokens[id] == solo(tokens, 0, set(), 4)
    assert found(house)["b"] == 0, "b was to be computed again"
