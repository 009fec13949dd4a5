"""A small set of rows in which every allowed combination of a few values meets. Knows options by name; nothing of their meaning."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

Row = dict[str, str]  # option -> value
Meeting = frozenset[tuple[str, str]]  # values of different options


def meetings(options: Mapping[str, Sequence[str]], excluded: Collection[Meeting], strength: int = 2) -> list[Meeting]:
    """Every allowed combination of values of `strength` options, in the options' order."""
    found = []
    for names in itertools.combinations(options, strength):
        for values in itertools.product(*(options[name] for name in names)):
            meeting = frozenset(zip(names, values, strict=True))
            if not any(pair <= meeting for pair in excluded):
                found.append(meeting)
    return found


def covering(options: Mapping[str, Sequence[str]], excluded: Collection[Meeting], strength: int = 2) -> list[Row]:
    """Rows in which all of them meet, the same each time. Each row begins with one that has not met yet; every further value is
    the one that brings most others together."""
    left, rows = dict.fromkeys(meetings(options, excluded, strength)), list[Row]()
    while left:
        first = next(iter(left))
        row = _filled(dict(first), options, excluded, left, strength)
        if row is None:
            named = " and ".join(f"{option}={value}" for option, value in sorted(first))
            raise ValueError(f"{named} can meet in no row: exclude that pair, with the reason")
        rows.append(row)
        for names in itertools.combinations(options, strength):
            left.pop(frozenset((name, row[name]) for name in names), None)
    return rows


def _filled(
    row: Row, options: Mapping[str, Sequence[str]], excluded: Collection[Meeting], left: Collection[Meeting], strength: int
) -> Row | None:
    """The row with a value for every option; None if what is excluded leaves no way to."""
    option = next((name for name in options if name not in row), None)
    if option is None:
        return row
    partners = list(itertools.combinations(row.items(), strength - 1))

    def gain(value: str) -> int:
        return sum(frozenset({(option, value), *partner}) in left for partner in partners)

    for value in sorted(options[option], key=gain, reverse=True):
        if not any(frozenset({(option, value), other}) in excluded for other in row.items()):
            filled = _filled({**row, option: value}, options, excluded, left, strength)
            if filled is not None:
                return filled
    return None
