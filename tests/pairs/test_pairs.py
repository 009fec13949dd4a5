"""Every pair of options meets in some run of a tiny model, and every answer is the plain body's, or as near as its kind allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trireme.backends import reason_against

from .cover import Row
from .plain import Bodies
from .runs import PROMPT, check_row, request_of
from .table import PLAINEST, REQUEST, alone, exact, family_of, on, rows, short

HERE = on("reference", "cpu")
GPU = on("cuda", wide=True)
ROWS = rows(exact(HERE)) + rows(HERE) + alone(HERE)
GPU_ROWS = rows(exact(GPU)) + rows(GPU) + alone(GPU)
OF_REQUESTS = [(option, value.name) for option, known in REQUEST.items() for value in known[1:]]


@pytest.mark.parametrize("row", ROWS, ids=short)
def test_pairs(row: Row, bodies: Callable[[str], Bodies], monkeypatch: pytest.MonkeyPatch) -> None:
    if row["backend"] != "reference" and reason_against("cpu"):
        pytest.skip(f"cpu: {reason_against('cpu')}")
    check_row(row, bodies(family_of(row)), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("row", GPU_ROWS, ids=short)
def test_pairs_on_a_gpu(row: Row, bodies: Callable[[str], Bodies], monkeypatch: pytest.MonkeyPatch) -> None:
    if reason_against("cuda"):
        pytest.skip(f"cuda: {reason_against('cuda')}")
    check_row(row, bodies(family_of(row)), monkeypatch)


@pytest.mark.parametrize(("option", "value"), OF_REQUESTS)
def test_every_value_changes_the_answer(option: str, value: str, bodies: Callable[[str], Bodies]) -> None:
    """Else the table would say that it was tried, and nothing would have been."""
    plain = bodies("llama").of(PLAINEST)
    usual, changed = (plain.llm.generate(PROMPT, request_of(row))[0] for row in (PLAINEST, PLAINEST | {option: value}))
    assert (changed.completions, changed.prompt_logprobs) != (usual.completions, usual.prompt_logprobs)
