"""Windows in the scheduler: whatever a row reads of its window is its own, however rows come and go, and prefixes are found."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sched.fake_worker import FakeWorker, Row, solo
from tests.sched.test_scheduler import ARRIVALS, EOS, MAX_MODEL_LEN, House, limit_of
from trireme.config import ScheduleOptions
from trireme.ipc.messages import ALL, BandSize, Plan, RowNote
from trireme.sched.capacity import Capacity
from trireme.sched.engine import Engine
from trireme.sched.scheduler import Scheduler


class WindowWorker(FakeWorker):
    """Keeps a second page table, of a band of which each step reads the window alone."""

    window: BandSize

    def launch(self, plan: Plan) -> None:
        if not hasattr(self, "tables"):
            self.tables: dict[int, dict[int, int]] = {}  # by row: pages by their place
            self.ends: dict[int, int] = {}
            self.kept_slots: dict[int, int] = {}
            self.starts: dict[int, int] = {}
        for admit in plan.admit:
            self.tables[admit.row], self.ends[admit.row] = {}, admit.begins[1]
        for row, band, count in plan.trims:
            if band:
                self.ends[row] = count
        bands = plan.page_bands or [0] * len(plan.page_rows)
        for row, page, band in zip(plan.page_rows, plan.page_ids, bands, strict=True):
            if band:
                assert 0 <= page < self.window.num_pages
                self.tables[row][self.ends[row]] = page
                self.ends[row] += 1
        own = [(row, page) for row, page, band in zip(plan.page_rows, plan.page_ids, bands, strict=True) if not band]
        rows, pages = [row for row, _ in own], [page for _, page in own]
        trims = [trim for trim in plan.trims if trim[1] == 0]
        super().launch(msgspec.structs.replace(plan, page_rows=rows, page_ids=pages, page_bands=[], trims=trims))

    def _place(self, row: Row, position: int) -> int:
        size = self.window.page_size
        return self.tables[row.admit.row][position // size] * size + position % size

    def _compute(
        self, number: int, start: int, count: int, logits: int, samples: bool, drafts: int
    ) -> tuple[Row, list[int], RowNote | None, list[int], int]:
        row, new, note, digests, begun = super()._compute(number, start, count, logits, samples, drafts)
        end = len(row.tokens) if samples else start + count
        begin = end - (count - drafts)
        written = digests + [-1] * (begin + count - len(digests))
        for position in range(begin, begin + count):
            self.kept_slots[self._place(row, position)] = written[position]
        self.starts[number] = begin
        return row, new, note, digests, begun

    def _verify(self, row: Row, digests: list[int], start: int) -> None:
        super()._verify(row, digests, start)
        for position in range(max(self.starts[row.admit.row] - self.window.keep + 1, 0), len(digests)):
            found = self.kept_slots.get(self._place(row, position))
            assert found == digests[position], f"the window's KV at position {position} is another's"


class WindowHouse(House):
    """A house whose model has a band of windows, tight enough that rows wait for it and tails are evicted."""

    keep, window_slots = 6, 90

    def __post_init__(self) -> None:
        self.slots = self.slots or 160
        super().__post_init__()
        pages = self.slots // self.page_size
        window = BandSize(self.keep, self.window_slots // self.page_size, self.page_size)
        capacity = Capacity(
            pages,
            self.page_size,
            MAX_MODEL_LEN,
            self.prefix_cache,
            bands=(BandSize(ALL, pages, self.page_size), window),
            forks=False,
        )
        options = ScheduleOptions(self.policy, self.max_running, self.max_step_tokens, self.max_waiting)
        self.scheduler = Scheduler(options, capacity, clock=lambda: 0.0, seed=0)
        self.worker = WindowWorker(pages, self.page_size, self.depth)
        self.worker.window = window
        self.engine = Engine(self.scheduler, self.worker)


HOUSES = st.builds(
    WindowHouse,
    page_size=st.sampled_from([1, 4]),
    depth=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["past_future", "aggressive", "conservative"]),
    prefix_cache=st.booleans(),
    max_running=st.integers(1, 5),
    max_step_tokens=st.sampled_from([1, 3, 8, 64]),
    slots=st.sampled_from([64, 160]),
)


@settings(max_examples=80, deadline=None)
@given(house=HOUSES, arrivals=st.lists(ARRIVALS, min_size=1, max_size=10))
def test_every_window_is_the_rows_own(house: WindowHouse, arrivals: list[dict]) -> None:
    expected, aborts, clock = {}, {}, 0
    for number, arrival in enumerate(arrivals):
        for _ in range(arrival["wait"]):
            house.step()
            clock += 1
            for id in [id for id, when in aborts.items() if when <= clock]:
                house.scheduler.abort(id)
                del aborts[id], expected[id]
                house.scheduler.check()
        id, how = str(number), {name: arrival[name] for name in ("max_tokens", "salt", "priority", "prompt_logprobs")}
        house.add(id, arrival["prompt"], seed=number % 3, **how)
        expected[id] = solo(arrival["prompt"], number % 3, {EOS}, limit_of(house, arrival["prompt"], arrival["max_tokens"]))
        if arrival["abort"] is not None:
            aborts[id] = clock + arrival["abort"]
    house.run()
    for id, tokens in expected.items():
        assert house.tokens[id] == tokens
    windows = house.scheduler.memory.windows
    windows.forget(list(windows.tails))
    assert all(len(band.pool) == band.size.num_pages for band in windows.bands)


def test_a_branch_is_resumed_the_second_time_it_is_met() -> None:
    house = WindowHouse(max_step_tokens=64, slots=400, page_size=4)
    for id, tail in (("a", [2]), ("b", [3]), ("c", [4])):
        house.add(id, [1] * 21 + tail * 5, max_tokens=3, seed=1, ignore_eos=True)
        house.run()
    house.add("d", [1] * 21 + [4] * 5 + house.tokens["c"], max_tokens=3, seed=1, ignore_eos=True)
    house.run()
    found = {item.id: item.cached_tokens for item in reversed(house.all)}
    assert found == {"a": 0, "b": 0, "c": 20, "d": 28}
