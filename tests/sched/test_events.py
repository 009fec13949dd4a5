"""Long random traffic through every kind of house: the books balance after each event, and every seam is really used."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.sched.fake_worker import solo
from tests.sched.test_scheduler import EOS, STEMS, House, limit_of
from trireme.ipc.messages import NO_PARENT

FEW, MANY = 300, 10_000
TWO_BANDS = ((5, 72), (13, 96))
HOUSES: dict[str, dict] = {
    "plain": {},
    "groups": {"max_running": 4, "slots": 160},
    "groups, no cache": {"max_running": 4, "slots": 160, "prefix_cache": False},
    "groups, static": {"max_running": 4, "page_size": 0},
    "groups, pages of one": {"max_running": 3, "page_size": 1, "depth": 3},
    "drafts": {"drafts": 7, "depth": 2, "likeness": 0.7},
    "drafts, deep and tight": {"drafts": 7, "depth": 3, "likeness": 0.3, "page_size": 1, "slots": 60},
    "drafts, static": {"drafts": 3, "page_size": 0, "depth": 2},
    "windows": {"windows": ((9, 96),), "max_running": 4},
    "windows, pages of one": {"windows": ((6, 40),), "page_size": 1, "depth": 2},
    "windows, two bands": {"windows": ((1, 64), (17, 112)), "max_running": 4, "depth": 2},
    "windows, no cache": {"windows": ((9, 80),), "prefix_cache": False, "slots": 160},
    "windows, drafts": {"windows": ((9, 96),), "drafts": 5, "depth": 2, "likeness": 0.7},
    "windows, told": {"windows": ((9, 96),), "tells": True, "depth": 2},
    "windows, groups": {"windows": TWO_BANDS, "max_running": 4, "slots": 160},
    "windows, groups, no cache": {
        "windows": TWO_BANDS,
        "max_running": 4,
        "slots": 160,
        "prefix_cache": False,
        "depth": 2,
    },
    "windows, chunks": {"windows": ((8, 64), (3, 96)), "chunked": True, "max_running": 4, "depth": 2},
    "windows, chunks, pages of one": {"windows": ((7, 48),), "chunked": True, "page_size": 1, "drafts": 5, "depth": 3},
    "states": {"states": 9},
    "states, one place": {"states": 1, "depth": 2, "slots": 56},
    "states, groups": {"states": 6, "max_running": 4, "slots": 160, "depth": 3},
    "states, groups, no cache": {"states": 4, "max_running": 4, "slots": 160, "prefix_cache": False, "depth": 2},
    "states, groups, static": {"states": 4, "max_running": 4, "page_size": 0},
    "states, tight": {"states": 12, "page_size": 1, "slots": 60, "depth": 2},
    "states and windows, groups": {"states": 12, "windows": TWO_BANDS, "max_running": 4, "slots": 160, "depth": 2},
    "told": {"tells": True, "depth": 2},
    "told, tight": {"tells": True, "depth": 3, "page_size": 1, "slots": 60},
    "told, states and windows, groups": {
        "tells": True,
        "states": 12,
        "windows": TWO_BANDS,
        "max_running": 4,
        "slots": 160,
        "depth": 2,
    },
}
# What must have happened in a house of that name after MANY events, and after FEW in one of them at least.
USED = {
    "groups": {"forks", "orphans"},
    "drafts": {"drafts", "kept", "refused"},
    "drafts, deep and tight": {"trims"},
    "tight": {"pauses", "ended leases"},
    "told": {"told"},
    "windows": {"windowed"},
    "states": {"kept states", "resumed"},
}


def play(house: House, events: int, seed: int) -> Counter[str]:
    """Random arrivals, ends, and steps; at the end every answer is what it would be alone."""
    dice, live, asked, gone = random.Random(seed), [], {}, set()
    groups, ended = house.scheduler._groups, []
    end_leases = groups.end_leases

    def noted() -> None:
        ended.extend(groups._leased)
        end_leases()

    groups.end_leases = noted  # type: ignore[method-assign]
    for number in range(events):
        kind = dice.random()
        if kind < 0.12 and house.scheduler.num_waiting < 20:
            prompt = (dice.choice(STEMS)[: dice.randint(0, 20)] + [dice.randint(0, 3) for _ in range(dice.randint(0, 8))]) or [0]
            n, first, how = dice.choice([1, 1, 2, 6]), dice.randint(0, 5), {"max_tokens": dice.choice([0, 1, 9, 30, None])}
            house.add(str(number), prompt, n=n, seed=first, salt=dice.choice(["", "other"]), priority=dice.choice([0, 0, 1]), **how)
            for other in range(n):
                name = f"{number}/{other}" if other else str(number)
                limit = limit_of(house, prompt, how["max_tokens"])
                asked[name] = solo(prompt, first + other, {EOS}, limit)
                live.append(name)
        elif kind < 0.15 and live:
            name = live.pop(dice.randrange(len(live)))
            if house.scheduler.abort(name):
                gone.add(name)
                house.scheduler.check()
        elif kind < 0.16:
            house.scheduler.version += 1
        else:
            house.step()
    house.run(6000)
    for name, tokens in asked.items():
        assert house.tokens[name] == (tokens[: len(house.tokens[name])] if name in gone else tokens)
        assert (name in house.ends) != (name in gone)
    return _used(house, len(ended))


def _used(house: House, ended: int) -> Counter[str]:
    """How often each thing has happened; `ended` leases were ended to make room."""
    stats = house.scheduler.stats()
    used: Counter[str] = Counter({"pauses": stats.preemptions, "hits": stats.cache_hits, "ended leases": ended})
    for plan in house.worker.plans:
        used["forks"] += sum(fork.parent != NO_PARENT for fork in plan.forks)
        used["orphans"] += sum(fork.parent == NO_PARENT for fork in plan.forks)
        used["copies"] += sum(len(fork.copies) for fork in plan.forks)
        used["told"] += len(plan.told_rows)
        used["trims"] += len(plan.trims)
        used["kept states"] += len(plan.keeps)
        used["resumed"] += len(plan.resumes)
        used["windowed"] += sum(band > 0 for band in plan.page_bands)
        used["drafts"] += sum(plan.drafts)
    used["kept"], used["refused"] = house.worker.kept, used["drafts"] - house.worker.kept
    return used


@pytest.mark.parametrize("name", HOUSES)
def test_a_few_hundred_events(name: str) -> None:
    play(House(**HOUSES[name]), FEW, seed=1)


@pytest.mark.wide
@pytest.mark.parametrize("name", HOUSES)
def test_ten_thousand_events(name: str) -> None:
    used = play(House(**HOUSES[name]), MANY, seed=2)
    for word, kinds in USED.items():
        lacking = {kind for kind in kinds if not used[kind]} if word in name else set()
        assert not lacking, f"{lacking} never happened: {used}"
