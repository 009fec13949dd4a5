"""Every three values meet, with every family of models; and every pair of the larger table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trireme.backends import reason_against

from .cover import Row
from .models import FAMILIES
from .plain import Bodies
from .runs import check_row
from .table import exact, family_of, form_of, on, rows, short

HERE = on("reference", "cpu")
TRIPLES = rows(exact(HERE), 3) + rows(HERE, 3)
LARGER = rows(on("reference", "cpu", wide=True))


def has(family: str, row: Row) -> bool:
    """Whether a row is about a family: each row about its own, those that are about requests and steps alone about every one. Keys
    of Bloom have no bound, so that kept in few digits the smallest difference shows."""
    if family == "bloom" and row["kv"] in ("int4", "fp8"):
        return False
    return family == family_of(row) or (family_of(row) == "llama" and not form_of(row))


CASES = [(family, row) for family in FAMILIES for row in TRIPLES if has(family, row)] + [(family_of(row), row) for row in LARGER]


@pytest.mark.wide
@pytest.mark.parametrize(("family", "row"), CASES, ids=lambda part: part if isinstance(part, str) else short(part))
def test_rows(family: str, row: Row, bodies: Callable[[str], Bodies], monkeypatch: pytest.MonkeyPatch) -> None:
    if row["backend"] != "reference" and reason_against("cpu"):
        pytest.skip(f"cpu: {reason_against('cpu')}")
    check_row(row, bodies(family), monkeypatch)
