"""Tuning: off by default, persistent, shareable, bounded, and never in the way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from trireme.kernels import chips
from trireme.kernels.aten import registry
from trireme.kernels.aten.calls import repeat, tune
from trireme.kernels.aten.folds import cut, fold, reduce
from trireme.kernels.aten.folds.cut import Cut

DEFAULT, QUICK, BROKEN = {"N": 1}, {"N": 2}, {"N": 3}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "_enabled", False)
    monkeypatch.setattr(tune, "_microseconds", lambda call: call() or 0.0)
    tune._known.clear()
    yield
    tune._known.clear()


def timed(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Replaces the clock: QUICK is fast, DEFAULT slow, BROKEN fails."""
    tried: list[dict] = []

    def run(config: dict) -> None:
        tried.append(config)
        if config == BROKEN:
            raise RuntimeError("out of shared memory")

    monkeypatch.setattr(tune, "_microseconds", lambda call: call() or {1: 9.0, 2: 1.0}[call.args[0]["N"]])
    monkeypatch.setattr(tune, "run_for_test", run, raising=False)
    return tried


def test_disabled_tuning_runs_nothing() -> None:
    def never(config: dict) -> None:
        raise AssertionError("a disabled tuner must not run anything")

    assert tune.choose("op", "8x8", DEFAULT, [QUICK], never) == DEFAULT


def test_shapes_of_a_class_have_their_own_defaults() -> None:
    assert tune.choose("op", "8x8", DEFAULT, [], print) == DEFAULT
    assert tune.choose("op", "8x8", QUICK, [], print) == QUICK


def test_a_default_that_won_is_a_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch)
    tune.enable()
    won = tune.choose("op", "8x8", QUICK, [DEFAULT], tune.run_for_test)
    assert won == QUICK and won is not QUICK


def test_the_fastest_wins_persists_and_travels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = timed(monkeypatch)
    tune.enable()
    assert tune.choose("op", "8x8", DEFAULT, [BROKEN, QUICK], tune.run_for_test) == QUICK
    assert tried == [DEFAULT, BROKEN, QUICK]
    tune.enable(False)
    assert tune.choose("op", "8x8", DEFAULT, [], tune.run_for_test) == QUICK
    assert tune.export(tmp_path / "table.csv") == 1
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "elsewhere"))
    tune._known.clear()
    assert tune.choose("op", "8x8", DEFAULT, [], tune.run_for_test) == DEFAULT
    assert tune.load(tmp_path / "table.csv") == 1
    assert tune.choose("op", "8x8", DEFAULT, [], tune.run_for_test) == QUICK


def test_the_budget_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = timed(monkeypatch)
    monkeypatch.setattr(tune, "BUDGET_SECONDS", -1.0)
    tune.enable()
    assert tune.choose("op", "16", DEFAULT, [QUICK], tune.run_for_test) == DEFAULT
    assert tried == []


def test_a_broken_database_gives_the_default(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "tuned.sqlite").write_text("this is no database" * 100)
    began = time.monotonic()
    assert tune.choose("op", "8x8", DEFAULT, [QUICK], lambda config: None) == DEFAULT
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("stored", ["{", "3", '{"x": 1}', '{"N": 3}', '{"N": -1}', '{"N": "1"}'])
def test_what_does_not_run_gives_the_default(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry cut short, of another version, or of a larger chip."""
    with tune._database() as database:
        database.execute("INSERT INTO tuned VALUES (?, 'op', '8x8', ?, NULL)", (chips.current().name, stored))
    tune._stored.cache_clear()

    def run(config: dict) -> None:
        if config["N"] == 3:
            raise RuntimeError("out of shared memory")

    assert tune.choose("op", "8x8", DEFAULT, [QUICK], run) == DEFAULT
    tune.enable()
    monkeypatch.setattr(tune, "_microseconds", lambda call: call() or {1: 9.0, 2: 1.0}[call.args[0]["N"]])
    assert tune.choose("op", "8x8", DEFAULT, [QUICK], run) == QUICK  # measured anew


def test_files_without_results_are_refused(tmp_path: Path) -> None:
    for text in (
        "{\n3\n",
        "chip,operator\nhopper,op\n",
        "chip,operator,shape,config\nhopper,op,8x8,N=two\n",
        "chip,operator,shape,config\nhopper\n",
    ):
        (tmp_path / "table.csv").write_text(text)
        with pytest.raises(ValueError, match="has no tuning results"):
            tune.load(tmp_path / "table.csv")


def test_shape_classes_are_powers_of_two() -> None:
    assert tune.shape_class(1, 5, 4096, 4097) == "1x8x4096x8192"


def test_the_shipped_table_is_whole() -> None:
    """Every row names torch's kernel, or all sizes of a cut."""
    tile, stream = {"M", "N", "K", "GROUP", "HALVES", "warps", "stages"}, {"N", "K", "splits", "warps", "stages"}
    known = tune.read(tune.SHIPPED)
    assert known and {chip for chip, *_ in known} == {"hopper"}
    for (_, name, shape), config in known.items():
        whole = tile if name.startswith("mm") else stream if name.startswith("rows") else set(cut.CHOICE)
        assert set(config) - {"copied"} == whole or config == {"torch": 1}, (name, shape)


@pytest.mark.parametrize(
    "shape, dim",
    [((70, 36), 0), ((70, 35), 0), ((9, 200), 0), ((40, 131), 1), pytest.param((3, 0), 1, marks=pytest.mark.wide)],
    ids=str,
)
def test_every_cut_that_is_tried_folds_alike(shape: tuple[int, int], dim: int, device: str) -> None:
    """Whatever a measurement puts in the place of the rules, the sum is the sum."""
    long = chips.current().fold_tile + 5  # rows that begin anywhere
    x = torch.randint(0, 9, (shape[0], shape[1] or long), device=device).float()
    kinds = {"sum.dim_IntList": lambda: x.double().sum(dim), "argmax": lambda: x.argmax(dim)}
    f = fold.fold(x, [dim], False, turn=True)[1]
    choices = list(f.lines.choices())
    assert len(choices) >= 6 and f.shifted == (x.shape[1] == long)
    for choice in choices:
        tune._known.clear()
        repeat.forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tune, "choose", lambda name, shape, default, candidates, run, choice=choice: choice)
            for name, expected in kinds.items():
                got = registry.OPERATORS[name].function(x, [dim] if name.startswith("sum") else dim)
                assert torch.equal(got.double(), expected().double()), (name, choice)


def test_a_fold_is_cut_as_was_measured(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Once, by the fastest of its cuts, and the same afterwards where tuning is off; others go on by the rules."""
    x = torch.randn(9, 70, device=device)
    f = fold.fold(x, [0], False, turn=True)[1]
    wanted = list(f.lines.choices())[1]
    starts: list[Cut] = []
    start = reduce._start
    monkeypatch.setattr(reduce, "_start", lambda *args: starts.append(args[-1]) or start(*args))
    seconds = lambda call: call() or (1.0 if starts[-1] == f.lines.cut().by(wanted) else 9.0)  # noqa: E731
    monkeypatch.setattr(tune, "_microseconds", seconds)
    monkeypatch.setattr(tune, "BUDGET_SECONDS", 600.0)  # compiling takes longer on a busy machine
    tune.enable()
    torch.testing.assert_close(registry.OPERATORS["sum.dim_IntList"].function(x, [0]), x.sum(0))
    assert starts[0] == f.lines.cut() and starts[-1] == f.lines.cut().by(wanted) and len(starts) == len(list(f.lines.choices())) + 2
    tune.enable(False)
    starts.clear()
    torch.testing.assert_close(registry.OPERATORS["sum.dim_IntList"].function(x, [0]), x.sum(0))
    torch.testing.assert_close(registry.OPERATORS["amax"].function(x, [0]), x.amax(0))
    assert starts == [f.lines.cut().by(wanted)] * 2 + [f.lines.cut()]  # once more, to see that what is stored runs
