"""What a plan may say beside what is to be computed: tokens that the worker did not keep, page tables that are cut, drafts."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
from drive import Drive

from trireme.backends import reason_against
from trireme.errors import BadConfig
from trireme.ipc.messages import Plan
from trireme.sched.plan import Draft
from trireme.worker.conformance import LENGTH, MODELS, VOCAB, write_checkpoint
from trireme.worker.tables import Tables

PROMPTS = [np.random.default_rng(length).integers(0, VOCAB, length).tolist() for length in (21, 3, 40, 9)]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 1.2, "seed": 5, "repetition_penalty": 1.3, "no_repeat_ngram": 2},
    {"logprobs": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("gemma3")
    write_checkpoint(folder, MODELS["gemma3"])
    return folder


def opened(folder: pathlib.Path, backend: str, **settings: Any) -> Drive:
    if reason_against(backend):
        pytest.skip(f"{backend}: {reason_against(backend)}")
    fixed = {"dtype": "float32", "max_model_len": LENGTH, "page_size": 4, "max_step_tokens": 24}
    return Drive(folder, full=False, backend=backend, **fixed | settings)


def plans_of(drive: Drive) -> list[Plan]:
    """The plans that the worker will have run."""
    plans: list[Plan] = []
    launch = drive.runner.launch

    def noted(plan: Plan) -> None:
        plans.append(plan)
        launch(plan)

    drive.runner.launch = noted  # type: ignore[method-assign]
    return plans


def answers(drive: Drive, prompts: list[list[int]] = PROMPTS, max_tokens: int = 20) -> list[list[int]]:
    for i, (tokens, kind) in enumerate(zip(prompts, KINDS, strict=False)):
        drive.add(f"{i}", tokens, max_tokens=max_tokens, **kind)
    return [run.tokens for run in drive.finish().values()]


@pytest.mark.parametrize("windows", ["on", "off"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_worker_that_keeps_nothing_it_samples_is_told_all(
    backend: str, depth: int, windows: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answers(opened(folder, backend, kv_windows=windows))
    monkeypatch.setattr(Tables, "append", lambda self, step, ids: None)
    forgetful = opened(folder, backend, kv_windows=windows)
    forgetful.depth = depth
    forgetful.scheduler.capacity = dataclasses.replace(forgetful.scheduler.capacity, tells=True)
    plans = plans_of(forgetful)
    assert answers(forgetful) == plain
    assert sum(len(plan.told_rows) for plan in plans) == len(PROMPTS) * 19, "the last token of an answer is told to nobody"
    if backend == "cpu":
        assert any(size.decode for size, _ in forgetful.runner.graphs), "no step was captured"


@pytest.mark.parametrize("windows", ["on", "off"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_page_tables_are_cut_and_go_on(backend: str, windows: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is given pages long before it needs them, as for drafts that are refused later. When memory is short, these go to
    other rows."""
    prompts = [tokens[:5] for tokens in PROMPTS[:2]]
    settings = {"kv_tokens": 108, "kv_windows": windows, "policy": "aggressive", "max_running": 2}
    plain = answers(opened(folder, backend, **settings), prompts, 58)
    drive = opened(folder, backend, **settings)
    scheduler, rows = drive.scheduler, drive.scheduler.rows
    exact, clear_out, short = scheduler._lacking, scheduler._clear_out, []

    def generous(generating: np.ndarray, drafts: np.ndarray | None) -> tuple[np.ndarray, int]:
        if short:
            short.clear()
            return exact(generating, drafts)
        room = rows.fixed.max_total[generating] - rows.total[generating]
        return exact(generating, np.where(generating == rows.order[0], np.minimum(24, room), 0))

    def noted(draft: Draft) -> None:
        clear_out(draft)
        short.append(True)

    monkeypatch.setattr(scheduler, "_lacking", generous)
    monkeypatch.setattr(scheduler, "_clear_out", noted)
    plans = plans_of(drive)
    assert answers(drive, prompts, 58) == plain
    assert any(plan.trims for plan in plans)


def test_drafts_are_refused_in_one_line(folder: pathlib.Path) -> None:
    drive = opened(folder, "reference")
    drive.add("0", PROMPTS[0], max_tokens=20)
    drive.step()
    drive.scheduler.num_drafts = 3
    with pytest.raises(BadConfig, match=r"checks no draft tokens. Fix: .*num_drafts"):
        drive.finish()
