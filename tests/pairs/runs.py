"""Makes a row of the table happen: an engine with its settings, a request with its parameters, and others beside it.

Knows engines and requests; what is right the plain body says.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tiny_models
from drive import ThreadGroup

from trireme.config import Config
from trireme.llm import LLM
from trireme.types import Output, Progress, SamplingParams

from .cover import Row
from .models import LENGTH, Forms
from .plain import Bodies, check
from .table import ENGINE, REQUEST, form_of, given, tolerance_of

PROMPT = [1 + token for token in tiny_models.prompt(36, seed=3)]
EARLIER = [*PROMPT[:17], 7, 8, 9], [*PROMPT[:17], 9, 8, 7]  # begin as the prompt does
MAX_TOKENS = 14
Asked = tuple[list[int], SamplingParams]


def request_of(row: Row) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, seed=11, **given(row, REQUEST))


def neighbours(row: Row) -> list[Asked]:
    """Two that came before, and go on for long where memory is short: the row's own request is then paused for them."""
    most = 40 if row["memory"] == "short" else 10
    plain = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    other = SamplingParams(max_tokens=most, temperature=0.9, min_p=0.1, seed=5, ignore_eos=True)
    return [([1 + token for token in tiny_models.prompt(8, seed)], sampling) for seed, sampling in ((1, plain), (2, other))]


def run(row: Row, forms: Forms, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Output, SamplingParams]]:
    """What the row's engine answers to its request and to those beside it."""

    def ranks(config: Config, path: pathlib.Path, report: Any) -> ThreadGroup:
        return ThreadGroup(config, path, monkeypatch)

    monkeypatch.setattr("trireme.llm.open_ranks", ranks)
    settings, windowed = given(row, ENGINE), row["windows"] != "no"
    path = str(forms.stored(form_of(row)))
    with LLM(path, threads=1, max_model_len=LENGTH, max_running=8, pack_cache="off", **settings) as llm:
        _check_steps(llm)
        if row["prefixes"] == "hit":
            for earlier in EARLIER[: 1 + windowed]:  # windows can be resumed where two prompts were seen to part
                llm.generate(earlier, SamplingParams(max_tokens=2, temperature=0.0))
        asked = [*neighbours(row), (PROMPT, request_of(row))]
        found = llm.generate([tokens for tokens, _ in asked], [sampling for _, sampling in asked])
        assert row["prefixes"] != "hit" or found[-1].cached_tokens >= 16
        assert row["memory"] != "short" or llm.scheduler.stats().preemptions > 0
        return list(zip(found, [sampling for _, sampling in asked], strict=True))


def check_row(row: Row, bodies: Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row's request, and those beside it, are answered as the plain body answers them, or as near as its values allow."""
    for output, sampling in run(row, bodies.forms, monkeypatch):
        check(output, sampling, bodies.of(row), tolerance_of(row))


def _check_steps(llm: LLM) -> None:
    """Has the scheduler look through its books after every step."""
    engine = llm._loop.engine
    step = engine.step

    def checked() -> list[Progress]:
        progress = step()
        llm.scheduler.check()
        return progress

    engine.step = checked  # type: ignore[method-assign]
