"""Rows change hands: nothing of a former request is left in the next one's, and what ended requests kept is given back."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from drive import Drive
from tiny_models import LENGTH, VOCAB, prompt

from trireme.backends import reason_against
from trireme.ipc.messages import Admit
from trireme.worker import sampler
from trireme.worker.logits import NEGATIVE, RULES, Choice, _ByRow

ROWS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama2", tmp_path_factory.mktemp("llama2"))


def make(folder: pathlib.Path, **settings: Any) -> Drive:
    return Drive(folder, full=False, max_model_len=LENGTH, max_running=ROWS, page_size=4, **settings)


def tables(drive: Drive) -> Iterator[tuple[str, Any]]:
    """Everything in the worker that has an entry for each row, by name; a table that is added later is found too."""
    runner = drive.worker.runner
    for owner in (runner.tables, runner.sampler):
        for name, value in vars(owner).items():
            for key, table in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(table, torch.Tensor | np.ndarray) and ROWS + 1 in table.shape[:2]:
                    by_band = [table] if table.shape[0] == ROWS + 1 else table
                    yield from ((f"{name}.{key}{band}", one) for band, one in enumerate(by_band))
    for rule in runner.sampler.rules:
        for name in ("values", "errors", "_rows"):
            if hasattr(rule, name):
                yield f"{type(rule).__name__}.{name}", getattr(rule, name)
    yield from (("ruled", runner.sampler.ruled), ("random", runner.sampler.random))


def fill_with_noise(drive: Drive) -> int:
    draw, found = np.random.default_rng(3), list(tables(drive))
    for _, table in found:
        for row in range(ROWS):
            if isinstance(table, set):
                table.add(row)
            elif isinstance(table, dict):
                table[row] = "of a former request"
            else:
                noise = torch.from_numpy(draw.integers(1, 50, tuple(table.shape[1:]))) + row
                table[row] = noise if isinstance(table, torch.Tensor) else noise.numpy()
    return len(found)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5, "min_p": 0.1}, {"logprobs": 2, "logit_bias": {5: 3.0}}])
def test_a_row_that_is_taken_holds_nothing_of_its_former_request(sampling: dict[str, Any], folder: pathlib.Path) -> None:
    clean, noisy = make(folder), make(folder)
    assert fill_with_noise(noisy) > 12
    runs = [drive.run("a", prompt(9, 1), max_tokens=7, **sampling) for drive in (clean, noisy)]
    assert runs[0].tokens == runs[1].tokens and runs[0].progress == runs[1].progress
    row = drives_row(clean)
    for (name, expected), (_, found) in zip(tables(clean), tables(noisy), strict=True):
        if isinstance(expected, set):
            same = (row in expected) == (row in found)
        elif isinstance(expected, dict):
            same = expected.get(row) == found.get(row)
        else:
            same = np.array_equal(np.asarray(expected[row]), np.asarray(found[row]))
        assert same, f"{name} of row {row}: {expected!r} without noise, {found!r} with"


def drives_row(drive: Drive) -> int:
    """The row of the only request that ran."""
    (row,) = drive.scheduler.rows._released
    return row


def test_rules_forget_requests_that_have_ended(folder: pathlib.Path) -> None:
    drive = make(folder)
    drive.add("long", prompt(3, 1), max_tokens=12)
    drive.add("short", prompt(3, 2), max_tokens=2, logit_bias={5: 3.0}, repetition_penalty=1.3, min_tokens=1, logprobs=1)
    drive.step()
    rules = drive.worker.runner.sampler.rules
    assert any(rule.values for rule in rules if isinstance(rule, _ByRow))
    for _ in range(4):
        drive.step()
    assert len(drive.runs["short"].tokens) == 2 and len(drive.runs["long"].tokens) < 12
    assert not any(rule.values for rule in rules if isinstance(rule, _ByRow))
    assert not drive.worker.runner.sampler.ruled


class Never(_ByRow):
    """A rule of nobody's parameters: a request whose seed is even gets no token below 100."""

    def value(self, admit: Admit) -> object | None:
        return None if admit.seed % 2 else True

    def apply(self, choice: Choice, at: list[int]) -> None:
        choice.logits[torch.tensor(at), :100] = NEGATIVE


@pytest.mark.parametrize("graphs", [False, True])
def test_a_rule_that_is_listed_holds_in_captured_steps_too(
    graphs: bool, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason_against("cpu"):
        pytest.skip(str(reason_against("cpu")))
    monkeypatch.setattr(sampler, "RULES", (*RULES, Never))
    drive = make(folder, backend="cpu", graphs=graphs)
    bound, free = (drive.run(str(seed), prompt(5, 1), max_tokens=8, ignore_eos=True, seed=seed).tokens for seed in (2, 3))
    assert min(bound) >= 100 > min(free) and max(bound) < VOCAB
