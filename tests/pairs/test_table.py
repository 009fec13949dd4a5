"""The table is covered: every pair of values meets in some row, but for those that are excluded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from .cover import Row, covering
from .table import ENGINE, EXCLUDED, REQUEST, WAYS, Options, exact, excluded, on, rows, served

KNOWN = ENGINE | REQUEST | {"way": WAYS}


def met(found: list[Row]) -> set[tuple[Any, ...]]:
    return {pair for row in found for pair in itertools.combinations(row.items(), 2)}


OFFLINE = {
    "reference+cpu": on("reference", "cpu"),
    "reference+cpu, the larger table": on("reference", "cpu", wide=True),
    "cuda": on("cuda", wide=True),
}
EXACT = {f"{name}, exact": exact(OFFLINE[name]) for name in ("reference+cpu", "cuda")}


@pytest.mark.parametrize(("name", "options"), (OFFLINE | EXACT | {"a server": served()}).items())
def test_every_pair_meets(name: str, options: Options, record_property: Callable[[str, object], None]) -> None:
    found, wanted, without = rows(options), set(), 0
    for (a, xs), (b, ys) in itertools.combinations(options.items(), 2):
        for x, y in itertools.product(xs, ys):
            if frozenset({(a, x.name), (b, y.name)}) in excluded(options):
                without += 1
            else:
                wanted.add(frozenset({(a, x.name), (b, y.name)}))
    assert {frozenset(pair) for pair in met(found)} == wanted
    assert len(found) < 2 * max(len(xs) * len(ys) for xs, ys in itertools.combinations(options.values(), 2))
    record_property("told", f"pairs on {name}: {len(found)} runs, {len(wanted)} pairs, {without} excluded")


def test_every_triple_meets() -> None:
    options = {"a": list("123"), "b": list("12"), "c": list("123"), "d": list("12")}
    without = [frozenset({("a", "1"), ("b", "2")})]
    found = covering(options, without, 3)
    triples = {frozenset(part) for row in found for part in itertools.combinations(row.items(), 3)}
    every = {
        frozenset(zip(names, chosen, strict=True))
        for names in itertools.combinations(options, 3)
        for chosen in itertools.product(*(options[name] for name in names))
    }
    assert triples == {triple for triple in every if not without[0] <= triple}
    assert len(found) < 3 * 3 * 2 * 2


def test_a_pair_that_can_meet_nowhere_is_named() -> None:
    options = {"a": ["1", "2"], "b": ["1", "2"], "c": ["1"]}
    without = [frozenset({("b", "1"), ("c", "1")}), frozenset({("a", "1"), ("b", "2")})]
    with pytest.raises(ValueError, match="a=1 and b=1 can meet in no row"):
        covering(options, without)


def test_what_is_excluded_exists_and_has_a_reason() -> None:
    for a, x, b, y, why in EXCLUDED:
        assert set(x.split(" or ")) <= {value.name for value in KNOWN[a]} and why
        assert set(y.split(" or ")) <= {value.name for value in KNOWN[b]}
