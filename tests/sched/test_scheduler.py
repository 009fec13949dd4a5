"""The scheduler against a fake worker: whatever the traffic, each request gets the tokens it would get alone; no page leaks."""

from __future__ import annotations

import functools
import gc
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sched.fake_worker import FakeWorker, solo
from trireme.config import ScheduleOptions
from trireme.errors import BadRequest, Overloaded
from trireme.ipc.messages import ALL, NO_PARENT, ONE_STATE, BandSize, Sampled
from trireme.sched.capacity import Capacity
from trireme.sched.engine import Engine
from trireme.sched.plan import Draft
from trireme.sched.policy import Load, Policy
from trireme.sched.scheduler import Scheduler
from trireme.types import FinishReason, Progress, Request, SamplingParams

MAX_MODEL_LEN = 48
EOS = 7
SLOTS = {0: 3 * MAX_MODEL_LEN, 1: 64, 4: 64, 16: 96}  # by page size: tight enough that memory runs out


@dataclass
class House:
    """A scheduler, a fake worker, and everything that came out."""

    page_size: int = 4
    depth: int = 1
    policy: str = "aggressive"
    prefix_cache: bool = True
    max_running: int = 6
    max_step_tokens: int = 16
    slots: int = 0
    max_waiting: int = 4096
    fails: set[int] = field(default_factory=set)
    drafts: int = 0  # at most, in any step
    likeness: float = 0.5
    tells: bool = False
    windows: tuple[tuple[int, int], ...] = ()  # of the bands behind the first: tokens kept, and slots for all
    chunked: bool = False  # whether these bands keep chunks
    states: int | None = None  # kept places; None: no layer keeps a state
    spacing: int = 8  # of kept states

    def __post_init__(self) -> None:
        size = self.page_size or MAX_MODEL_LEN
        num_pages = (self.slots or SLOTS[self.page_size]) // size
        windows = tuple(BandSize(keep, slots // size, size, self.chunked) for keep, slots in self.windows if self.page_size)
        states = () if self.states is None else (BandSize(ONE_STATE, self.states, 1),)
        bands = (BandSize(ALL, num_pages, size), *windows, *states)
        options = ScheduleOptions(self.policy, self.max_running, self.max_step_tokens, self.max_waiting)
        kinds = {"tells": self.tells, "bands": bands, "checkpoint_tokens": self.spacing}
        capacity = Capacity(num_pages, self.page_size, MAX_MODEL_LEN, self.prefix_cache, **kinds)
        self.scheduler = Scheduler(options, capacity, clock=lambda: 0.0, seed=0)
        self.worker = FakeWorker(num_pages, size, self.depth, self.fails, self.tells, self.likeness, windows, self.states)
        self.dice = random.Random(1)
        self.engine = Engine(self.scheduler, self.worker)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Progress] = {}
        self.all: list[Progress] = []

    def add(self, id: str, prompt: list[int], *, n: int = 1, salt: str = "", priority: int = 0, **how) -> None:
        """One request, or n of one prompt, whose seeds follow each other: `id`, `id/1`, ..."""
        sampling = SamplingParams(**{"seed": 0, **how})
        requests = []
        for number in range(n):
            own = msgspec.structs.replace(sampling, seed=sampling.seed + number)
            own = msgspec.structs.replace(own, prompt_logprobs=None) if number else own
            where = {"salt": salt, "priority": priority}
            name = f"{id}/{number}" if number else id
            requests.append(Request(id=name, tokens=prompt, sampling=own, eos_token_ids=[EOS], **where))
        self.scheduler.add(*requests)
        self.tokens.update({request.id: [] for request in requests})

    def step(self) -> list[Progress]:
        self.scheduler.num_drafts = self.dice.randint(0, self.drafts)
        progress = self.engine.step()
        self.scheduler.check()
        for item in progress:
            assert item.id not in self.ends, "progress after the end"
            self.tokens[item.id] += item.tokens
            if item.finish is not None:
                self.ends[item.id] = item
        self.all += progress
        return progress

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work(), f"no end in sight: {self.scheduler.stats()}"
        stats = self.scheduler.stats()
        assert stats.pages_owned == stats.pages_locked == stats.running == stats.waiting == 0


def limit_of(house: House, prompt: list[int], max_tokens: int | None) -> int:
    room = house.scheduler.capacity.longest - len(prompt)
    return room if max_tokens is None else min(room, max_tokens)


# Few different tokens and a few stems, so that prefixes are often shared.
STEMS = [[1] * 12, [1] * 6 + [2] * 10, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]
PROMPTS = st.builds(
    lambda stem, cut, tail: (stem[:cut] + tail) or [0],
    st.sampled_from(STEMS),
    st.integers(0, 20),
    st.lists(st.integers(0, 3), max_size=14),
)
ARRIVALS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.one_of(st.none(), st.integers(1, 30)),
        "min_tokens": st.integers(0, 1),
        "salt": st.sampled_from(["", "", "other"]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "n": st.sampled_from([1, 1, 2, 5, 9]),
        "wait": st.integers(0, 6),  # steps before it arrives
        "abort": st.one_of(st.none(), st.none(), st.integers(0, 20)),  # steps after which its client is gone
    }
)
HOUSES = st.builds(
    House,
    page_size=st.sampled_from([0, 1, 4, 16]),
    depth=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["past_future", "aggressive", "aggressive", "conservative", "batch_decode", "batch_decode:2"]),
    prefix_cache=st.booleans(),
    max_running=st.integers(1, 8),
    max_step_tokens=st.sampled_from([1, 3, 8, 64]),
    drafts=st.sampled_from([0, 0, 1, 3, 7]),
    likeness=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    tells=st.sampled_from([False, False, True]),
    windows=st.sampled_from([(), (), ((5, 96),), ((1, 64), (17, 128))]),
    chunked=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(house=HOUSES, arrivals=st.lists(ARRIVALS, min_size=1, max_size=10))
def test_random_traffic_gives_each_request_its_solo_tokens(house: House, arrivals: list[dict]) -> None:
    expected, least, aborts, gone = {}, {}, {}, set()
    clock = 0
    for number, arrival in enumerate(arrivals):
        for _ in range(arrival["wait"]):
            house.step()
            clock += 1
            for id in [id for id, when in aborts.items() if when <= clock]:
                del aborts[id]
                if house.scheduler.abort(id):
                    gone.add(id)
                    house.scheduler.check()
        id, prompt, n = str(number), arrival["prompt"], arrival["n"]
        how = {name: arrival[name] for name in ("max_tokens", "min_tokens", "salt", "priority", "prompt_logprobs")}
        house.add(id, prompt, n=n, seed=number % 3, **how)
        limit = limit_of(house, prompt, arrival["max_tokens"])
        for other in range(n):
            name = f"{id}/{other}" if other else id
            expected[name] = solo(prompt, number % 3 + other, {EOS}, limit, arrival["min_tokens"])
            least[name] = arrival["min_tokens"]
            if arrival["abort"] is not None and other % 2 == 0:
                aborts[name] = clock + arrival["abort"]
    for id in aborts:
        if house.scheduler.abort(id):
            gone.add(id)
            assert not house.scheduler.abort(id)
    house.run()
    for id, tokens in expected.items():
        got = house.tokens[id]
        assert got == (tokens[: len(got)] if id in gone else tokens)
        assert (id in gone) == (id not in house.ends)
        if id in house.ends:
            stopped = tokens[-1] == EOS and len(tokens) > least[id]
            assert house.ends[id].finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    for id, arrival in ((str(n), a) for n, a in enumerate(arrivals)):
        scores = [item.prompt_logprobs for item in house.all if item.id == id and item.prompt_logprobs is not None]
        if arrival["prompt_logprobs"] is not None and id in house.ends:
            assert len(scores) == 1 and scores[0][0] is None
            assert [score.token for score in scores[0][1:]] == arrival["prompt"][1:]
            assert [-score.logprob for score in scores[0][1:]] == list(range(1, len(arrival["prompt"])))
    for plan in house.worker.plans:
        assert sum(plan.counts) <= house.max_step_tokens


@settings(max_examples=60, deadline=None)
@given(
    depth=st.sampled_from([1, 2, 3]),
    page_size=st.sampled_from([0, 1, 4, 16]),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 24), st.integers(0, 12)), min_size=1, max_size=6),
)
def test_a_repeated_step_is_the_step_that_planning_anew_would_give(
    depth: int, page_size: int, lengths: list[tuple[int, int, int]]
) -> None:
    houses = [House(page_size=page_size, depth=depth), House(page_size=page_size, depth=depth)]
    anew = houses[1].scheduler.schedule

    def forgetful() -> object:
        houses[1].scheduler._flights.last = None
        return anew()

    houses[1].scheduler.schedule = forgetful  # type: ignore[method-assign,assignment]
    for number, (prompt, max_tokens, wait) in enumerate(lengths):
        for house in houses:
            for _ in range(wait):
                house.step()
            house.add(str(number), [number % 3] * prompt, seed=number, max_tokens=max_tokens)
    for house in houses:
        house.run()
    assert houses[0].worker.plans == houses[1].worker.plans


def test_a_lone_answer_is_planned_by_repetition_between_pages() -> None:
    house = House(page_size=16, depth=2)
    house.add("a", [1], seed=1, max_tokens=33, ignore_eos=True)
    repeated = []
    while house.engine.has_work():
        house.step()
        repeated += [flight.is_repeat for flight in house.scheduler._flights]
    assert sum(repeated) > 0.7 * len(repeated), "only steps that take a page are planned anew"


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 5),
    page_size=st.sampled_from([1, 2, 4]),
    slots=st.integers(12, 20),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 24)), min_size=3, max_size=10),
)
def test_tiny_memory_and_deep_overlap(depth: int, page_size: int, slots: int, lengths: list[tuple[int, int]]) -> None:
    """Pauses at every turn, with several steps in flight; no admission in a step that had to pause somebody."""
    house = House(page_size=page_size, depth=depth, slots=slots * 2, max_step_tokens=64)
    for number, (prompt, output) in enumerate(lengths):
        house.add(str(number), [number % 2] * min(prompt, slots), seed=number, max_tokens=output, ignore_eos=True)
    pauses = 0
    while house.engine.has_work():
        planned = len(house.worker.plans)
        house.step()
        paused = house.scheduler.stats().preemptions > pauses
        pauses = house.scheduler.stats().preemptions
        assert not (paused and any(plan.admit for plan in house.worker.plans[planned:]))
    for number, (prompt, output) in enumerate(lengths):
        tokens = [number % 2] * min(prompt, slots)
        assert house.tokens[str(number)] == solo(tokens, number, set(), limit_of(house, tokens, output))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_exhausted_memory_pauses_and_recovers_without_changing_the_text(page_size: int, depth: int) -> None:
    house = House(page_size=page_size, depth=depth, max_running=8, max_step_tokens=64, slots=112)
    for number in range(8):
        house.add(str(number), [number] * 10, seed=number, max_tokens=36, ignore_eos=True)
    house.run()
    assert house.scheduler.stats().preemptions > 0
    for number in range(8):
        assert house.tokens[str(number)] == solo([number] * 10, number, set(), 36)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 5, None])
def test_no_token_is_planned_that_certainly_is_not_needed(depth: int, max_tokens: int | None) -> None:
    house = House(depth=depth, slots=400)
    prompt = [5] * 9
    house.add("a", prompt, max_tokens=max_tokens, ignore_eos=True)
    house.run()
    made = limit_of(house, prompt, max_tokens)
    assert len(house.tokens["a"]) == made
    assert sum(sum(plan.counts) for plan in house.worker.plans) == len(prompt) + made - 1
    assert house.scheduler.stats().masked_rows == 0


def test_overlap_masks_only_the_row_of_a_request_that_ended_meanwhile() -> None:
    prompt = next([n] * 5 for n in range(99) if 1 < len(solo([n] * 5, 0, {EOS}, 30)) < 30)
    house = House(depth=2)
    house.add("a", prompt, max_tokens=30)
    house.run()
    assert house.ends["a"].finish is FinishReason.STOP
    assert house.scheduler.stats().masked_rows == 1


def test_long_prompts_are_chunked_and_mixed_with_decodes() -> None:
    house = House(max_step_tokens=8, slots=400)
    house.add("short", [1, 2], max_tokens=20, ignore_eos=True)
    house.step()
    house.add("long", [3] * 30, max_tokens=4, ignore_eos=True)
    for _ in range(4):
        house.step()
    mixed = house.worker.plans[1:5]
    assert [plan.counts for plan in mixed] == [[1, 7]] * 4
    assert [plan.samples for plan in mixed] == [[True, False]] * 4
    house.run()


def test_a_full_prefix_hit_still_computes_a_token_and_is_reported_once() -> None:
    house = House(page_size=4, slots=400)
    prompt = list(range(10, 22))
    house.add("first", prompt, max_tokens=3, ignore_eos=True)
    house.run()
    house.add("second", prompt, max_tokens=3, ignore_eos=True)
    house.run()
    assert [item.cached_tokens for item in house.all if item.id == "first"] == [0, 0, 0]
    assert [item.cached_tokens for item in house.all if item.id == "second"] == [8, 0, 0]
    house.add("third", [*prompt, 1], max_tokens=3, ignore_eos=True)
    house.run()
    assert house.all[-3].cached_tokens == 12
    assert house.scheduler.stats().cache_hits == 20


def test_tenants_with_different_salts_share_nothing() -> None:
    house = House(slots=400)
    for id, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        house.add(id, [1] * 20, salt=salt, max_tokens=2, ignore_eos=True)
        house.run()
    first = {item.id: item.cached_tokens for item in reversed(house.all)}
    assert first == {"a": 0, "b": 0, "c": 16}


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [0, 1, 4, 16])
@pytest.mark.parametrize("gone", [False, True])
def test_a_group_waits_for_its_leader_and_goes_on_from_its_prompt(gone: bool, page_size: int, prefix_cache: bool) -> None:
    house = House(page_size=page_size, prefix_cache=prefix_cache, max_step_tokens=8, max_running=8, slots=400)
    house.add("0", [2] * 20, n=4, max_tokens=4, ignore_eos=True)
    house.step()
    assert house.scheduler.stats().running == 1
    if gone:
        house.scheduler.abort("0")
        house.scheduler.check()
    house.run()
    names = ["0/1", "0/2", "0/3"] if gone else ["0", "0/1", "0/2", "0/3"]
    for name in names:
        assert house.tokens[name] == solo([2] * 20, int(name[2:] or 0), set(), 4)
    computed = sum(sum(plan.counts) for plan in house.worker.plans)
    forks = [fork for plan in house.worker.plans for fork in plan.forks]
    assert len(forks) == len(names) - 1 and all(fork.length == 19 and fork.parent != NO_PARENT for fork in forks)
    if not gone:
        assert computed == 20 + 3 + 4 * 3  # one prompt, its last token for three more, and what each generates but the last
        assert not any(progress.cached_tokens for progress in house.all)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [0, 1, 4, 16])
def test_a_group_with_fewer_rows_than_requests_computes_its_prompt_once(page_size: int, prefix_cache: bool) -> None:
    """Those that find no row at once go on from what is leased, when their leader has long gone."""
    house = House(page_size=page_size, prefix_cache=prefix_cache, max_step_tokens=64, max_running=3, slots=400)
    prompt = list(range(10, 31))
    house.add("0", prompt, n=128, max_tokens=5, ignore_eos=True)
    house.run()
    for number in range(128):
        assert house.tokens[f"0/{number}" if number else "0"] == solo(prompt, number, set(), 5)
    computed = sum(sum(plan.counts) for plan in house.worker.plans)
    assert computed == 21 + 127 + 128 * 4
    forks = [fork for plan in house.worker.plans for fork in plan.forks]
    assert len(forks) == 127 and {fork.parent == NO_PARENT for fork in forks} == {True, False}


@pytest.mark.parametrize("page_size", [0, 1, 4])
def test_a_lease_gives_way_to_a_row_that_needs_its_memory(page_size: int) -> None:
    """The prompt is held for one who finds no row, while two that generate outgrow the memory."""
    house = House(page_size=page_size, prefix_cache=False, max_step_tokens=64, max_running=2, slots=max(2 * page_size, 1) * 24)
    if not page_size:
        house = House(page_size=0, max_step_tokens=64, max_running=2, slots=MAX_MODEL_LEN)
    house.add("0", [3] * 20, n=5, max_tokens=20, ignore_eos=True)
    house.run(6000)
    for number in range(5):
        assert house.tokens[f"0/{number}" if number else "0"] == solo([3] * 20, number, set(), limit_of(house, [3] * 20, 20))


def test_prompt_logprobs_without_any_token() -> None:
    house = House(max_step_tokens=6, slots=400)
    house.add("a", [4, 5, 6, 7, 8, 9, 10, 11], max_tokens=0, prompt_logprobs=2)
    house.run()
    [only] = house.all
    assert only.finish is FinishReason.LENGTH and only.tokens == []
    assert only.prompt_logprobs[0] is None and [score.token for score in only.prompt_logprobs[1:]] == [5, 6, 7, 8, 9, 10, 11]
    assert [plan.logits for plan in house.worker.plans] == [[6], [2]]


def test_logprobs_come_with_their_tokens() -> None:
    house = House(slots=400)
    house.add("a", [1, 2, 3], max_tokens=4, ignore_eos=True, logprobs=0)
    house.add("b", [1, 2, 3], max_tokens=4, ignore_eos=True)
    house.run()
    for item in house.all:
        assert [score.token for score in item.logprobs or []] == (item.tokens if item.id == "a" else [])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_fails_fails_alone_and_leaves_nothing_in_the_cache(depth: int) -> None:
    house = House(depth=depth, fails={13}, slots=400)
    house.add("good", [1] * 9, seed=1, max_tokens=6, ignore_eos=True)
    house.add("bad", [2] * 9, seed=13, max_tokens=6, ignore_eos=True)
    house.run()
    assert house.ends["bad"].finish is FinishReason.ERROR and "finite" in house.ends["bad"].error
    assert house.tokens["good"] == solo([1] * 9, 1, set(), 6)
    house.add("again", [2] * 9, seed=2, max_tokens=1, ignore_eos=True)
    house.run()
    assert house.all[-1].cached_tokens == 0


def test_stops_wait_for_min_tokens() -> None:
    stop = solo([6] * 4, 0, set(), 8)[2]
    for least, expected in ((0, 3), (2, 3), (3, None)):
        house = House(slots=400)
        house.add("a", [6] * 4, max_tokens=8, min_tokens=least, stop_token_ids=[stop], ignore_eos=True)
        house.run()
        assert house.tokens["a"] == solo([6] * 4, 0, {stop}, 8, least)
        assert expected is None or len(house.tokens["a"]) == expected


def test_priority_goes_first_and_is_paused_last() -> None:
    house = House(max_running=1, slots=400)
    for id, priority in (("low", 5), ("middle", 0), ("high", -5)):
        house.add(id, [1, 2, 3], priority=priority, max_tokens=2, ignore_eos=True)
    house.run()
    assert list(house.ends) == ["high", "middle", "low"]


def test_nobody_overtakes_the_first_in_the_queue() -> None:
    """A long prompt that does not fit yet is not starved by short ones that would."""
    house = House(policy="conservative", slots=64, max_running=8)
    house.add("running", [1] * 8, max_tokens=30, ignore_eos=True)
    house.step()
    house.add("long", [2] * 30, max_tokens=10, ignore_eos=True)
    for number in range(6):
        house.add(f"short{number}", [3, number], max_tokens=2, ignore_eos=True)
    house.run()
    assert next(iter(house.ends)) == "running" and "long" in house.ends
    admitted = [admit.num_prompt for plan in house.worker.plans for admit in plan.admit]
    assert admitted[:2] == [8, 30]


def test_static_memory_takes_one_page_per_request() -> None:
    house = House(page_size=0, max_running=8)
    for number in range(5):
        house.add(str(number), [number] * 20, max_tokens=5, ignore_eos=True)
    house.step()
    assert len(house.worker.plans[0].page_ids) == 1
    most = 0
    while house.engine.has_work():
        house.step()
        most = max(most, house.scheduler.stats().running)
    assert most == 3
    assert all(len(set(plan.page_rows)) == len(plan.page_rows) for plan in house.worker.plans)


def test_requests_that_can_never_be_served_are_refused() -> None:
    house = House(slots=32, max_waiting=1)
    for prompt in ([], [1] * 32, [1] * 100):
        with pytest.raises(BadRequest):
            house.add("a", prompt)
    house.add("a", [1] * 31)
    with pytest.raises(BadRequest, match="already"):
        house.add("a", [1])
    with pytest.raises(Overloaded):
        house.add("b", [1])
    house.run()
    assert len(house.tokens["a"]) == 1


def test_abort_while_paused_with_a_token_in_flight() -> None:
    house = House(page_size=1, depth=2, max_running=4, slots=50, max_step_tokens=64)
    house.add("old", [1] * 10, max_tokens=30, ignore_eos=True)
    house.add("new", [2] * 10, max_tokens=30, ignore_eos=True)
    while not house.scheduler.stats().preemptions:
        house.step()
    assert house.scheduler.abort("new", FinishReason.STOP)
    house.scheduler.check()
    house.run()
    assert house.tokens["old"] == solo([1] * 10, 0, set(), 30)
    assert house.tokens["new"] == solo([2] * 10, 0, set(), 30)[: len(house.tokens["new"])]


def test_prompt_logprobs_begin_anew_when_their_prompt_was_paused_halfway() -> None:
    house = House(page_size=1, slots=32, max_step_tokens=4)
    house.add("old", [1] * 4, max_tokens=24, ignore_eos=True)
    house.step()
    prompt = list(range(100, 124))
    house.add("young", prompt, max_tokens=1, prompt_logprobs=0)
    house.run()
    assert house.scheduler.stats().preemptions == 1
    [scores] = [item.prompt_logprobs for item in house.all if item.id == "young"]
    assert [score.token for score in scores[1:]] == prompt[1:]


class Welcoming(Policy):
    """Lets everybody in, so that only the door's own count of memory is left."""

    def admit(self, load: Load) -> bool:
        return True


@pytest.mark.parametrize("cached", [False, True])
def test_the_door_admits_only_what_fits_now(cached: bool) -> None:
    """Cached pages that a newcomer would lock are no longer there to be evicted for its other tokens."""
    house = House(page_size=4, slots=64, max_step_tokens=64)
    house.scheduler.policy = Welcoming()
    if cached:
        house.add("before", [1] * 32, max_tokens=1, ignore_eos=True)
        house.run()
    house.add("running", [2] * 30, max_tokens=6, ignore_eos=True)
    house.step()
    house.add("next", [1] * 32 + [3] * 12, max_tokens=2, ignore_eos=True)
    house.step()
    assert house.scheduler.stats().running == 1
    house.run()
    assert house.tokens["next"] == solo([1] * 32 + [3] * 12, 0, set(), 2)


def test_only_so_many_prompt_logprobs_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logits take memory by the token; a prompt beside them goes on as ever."""
    monkeypatch.setattr("trireme.sched.scheduler.Draft", functools.partial(Draft, scores=6))
    house = House(max_step_tokens=40, slots=400)
    prompts = {name: [4 + (7 * i + n) % 40 for i in range(n)] for name, n in (("a", 13), ("b", 7), ("c", 19))}
    house.add("a", prompts["a"], max_tokens=2, prompt_logprobs=0)
    house.add("b", prompts["b"], max_tokens=2, prompt_logprobs=1)
    house.add("c", prompts["c"], max_tokens=2)
    house.run()
    first = house.worker.plans[0]
    assert first.counts == [6, 19] and first.logits == [6, 1]
    assert all(sum(plan.logits) <= 6 + 3 for plan in house.worker.plans)
    for name in ("a", "b"):
        [scores] = [item.prompt_logprobs for item in house.all if item.id == name and item.prompt_logprobs is not None]
        assert [score.token for score in scores[1:]] == prompts[name][1:]


@pytest.mark.wide
def test_salts_of_their_own_leave_nothing_behind() -> None:
    """20,000 requests, each with a salt of its own: a prompt that fills no page, or whose pages went, leaves no trace."""
    scheduler = Scheduler(ScheduleOptions(), Capacity(num_pages=64, page_size=16, max_model_len=512))
    sampling = SamplingParams(max_tokens=1)

    def answer(numbers: range) -> int:
        for number in numbers:
            tokens = list(range(3 + number % 40))
            scheduler.add(Request(id=str(number), tokens=tokens, sampling=sampling, salt=f"user-{number}"))
            while scheduler.num_waiting > 20 and (plan := scheduler.schedule()):
                scheduler.update(Sampled(plan.step, [5] * sum(plan.samples)))
        while scheduler.has_work():
            plan = scheduler.schedule()
            assert plan is not None
            scheduler.update(Sampled(plan.step, [5] * sum(plan.samples)))
        scheduler.check()
        gc.collect()
        return len(gc.get_objects())

    early = answer(range(4000))
    assert answer(range(4000, 20_000)) - early < 1000
