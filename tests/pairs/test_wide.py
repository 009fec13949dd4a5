"""Every three values meet, with every family of models."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trireme.backends import reason_against

from .cover import Row
from .models import FAMILIES
from .plain import Bodies
from .runs import check_row
from .table import exact, form_of, on, rows, short

HERE = on("reference", "cpu")
ROWS = rows(exact(HERE), 3) + rows(HERE, 3)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "row"),
    [(family, row) for family in FAMILIES for row in ROWS if family == "llama" or not form_of(row)],  # other forms are llama's
    ids=lambda part: part if isinstance(part, str) else short(part),
)
def test_triples(family: str, row: Row, bodies: Callable[[str], Bodies], monkeypatch: pytest.MonkeyPatch) -> None:
    if row["backend"] != "reference" and reason_against("cpu"):
        pytest.skip(f"cpu: {reason_against('cpu')}")
    check_row(row, bodies(family), monkeypatch)
