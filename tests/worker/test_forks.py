"""Several answers to one prompt: it is computed once, the others go on from it, and each is what it would be alone."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive
from tiny_models import LENGTH, prompt

from trireme.backends import reason_against
from trireme.ipc.messages import NO_PARENT, Fork, Plan
from trireme.ops import CacheSpec, KVCache

PROMPT = prompt(21, 5)
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.3, "presence_penalty": 0.4, "no_repeat_ngram": 2},
    {"temperature": 1.0, "logprobs": 2, "min_tokens": 4, "logit_bias": {3: 2.0}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama2", tmp_path_factory.mktemp("llama2"))


def plans_of(drive: Drive) -> list[Plan]:
    """The plans that the worker will have run."""
    plans: list[Plan] = []
    launch = drive.runner.launch

    def noted(plan: Plan) -> None:
        plans.append(plan)
        launch(plan)

    drive.runner.launch = noted  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.wide), "cpu"])
def test_answers_to_one_prompt_are_what_each_is_alone(backend: str, page_size: int, rows: int, folder: pathlib.Path) -> None:
    if reason_against(backend):
        pytest.skip(f"{backend}: {reason_against(backend)}")
    settings = {"backend": backend, "dtype": "float32", "max_model_len": LENGTH, "page_size": page_size, "prefix_cache": False}
    drive = Drive(folder, full=False, max_running=rows, **settings)
    plans = plans_of(drive)
    for number, kind in enumerate(KINDS):
        drive.add(str(number), PROMPT, n=5, seed=10, max_tokens=8, **kind)
        drive.finish()
    assert sum(sum(plan.counts) for plan in plans) == 3 * (len(PROMPT) + 4 + 5 * 7), "a prompt was computed twice"
    parents = {fork.parent == NO_PARENT for plan in plans for fork in plan.forks}
    assert parents == ({False} if rows == 8 else {False, True})
    alone = Drive(folder, full=False, **settings)
    for number, kind in enumerate(KINDS):
        for other in range(5):
            name = f"{number}/{other}" if other else str(number)
            ours, run = drive.runs[name], alone.run(f"{name} alone", PROMPT, max_tokens=8, **{**kind, "seed": 10 + other})
            assert ours.tokens == run.tokens
            for a, b in zip(ours.progress, run.progress, strict=True):
                assert [s.token for s in a.logprobs or []] == [s.token for s in b.logprobs or []]
                assert [s.logprob for s in a.logprobs or []] == pytest.approx([s.logprob for s in b.logprobs or []], abs=1e-4)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    "backend, rows, page_size",
    [pytest.param("reference", 3, 4, marks=pytest.mark.wide), *(("cpu", *case) for case in ((2, 0), (8, 1), (8, 4), (2, 16)))],
)
def test_forks_take_over_what_windows_keep(
    backend: str, rows: int, page_size: int, prefix_cache: bool, windowed: pathlib.Path
) -> None:
    """Whole pages of a window are shared, its open page is copied; layers that keep all are forked beside them."""
    if reason_against(backend):
        pytest.skip(f"{backend}: {reason_against(backend)}")
    settings: dict[str, Any] = {"backend": backend, "dtype": "float32", "max_model_len": LENGTH, "page_size": page_size}
    drive = Drive(windowed, full=False, max_running=rows, kv_windows="on", prefix_cache=prefix_cache, **settings)
    assert len(drive.worker.ready.bands) == (2 if page_size else 1)
    plans = plans_of(drive)
    lengths = (21, 1, 40)
    for length in lengths:
        drive.add(f"{length}", prompt(length, 5), n=5, seed=10, max_tokens=14, temperature=1.0)
    drive.finish()
    copied = {band for plan in plans for fork in plan.forks for band, _, _ in fork.copies}
    assert copied == {0: {0}, 1: set()}.get(page_size, {0, 1})
    if not prefix_cache:
        assert sum(sum(plan.counts) for plan in plans) == sum(lengths) + 3 * (4 + 5 * 13), "a prompt was computed twice"
    alone = Drive(windowed, full=False, kv_windows="off", **settings)
    for length in lengths:
        for other in range(5):
            name = f"{length}/{other}" if other else f"{length}"
            run = alone.run(f"{name} alone", prompt(length, 5), max_tokens=14, temperature=1.0, seed=10 + other)
            assert drive.runs[name].tokens == run.tokens, name


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8", "int4"])
def test_copied_slots_hold_what_was_copied(kind: str) -> None:
    cache = KVCache.allocate(
        CacheSpec((2, 40), (2, 40), kind), 12, torch.float32, lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    for tensor in (cache.k, cache.v, *(cache.scales or ())):
        tensor.copy_(torch.randint(1, 100, tensor.shape).to(tensor.dtype))
    before = cache.at(torch.arange(12))
    cache.copy(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 9]))  # what is read has not been written over
    after = cache.at(torch.arange(12))
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours[[1, 2, 9]], theirs[[0, 1, 2]]) and torch.equal(ours[[0, 3, 4, 11]], theirs[[0, 3, 4, 11]])


@pytest.mark.parametrize("at_most", [False, True])
@pytest.mark.parametrize("kinds", [[{}, {}], [{"logit_bias": {7: 100.0}}, {"temperature": 1.0, "top_k": 5}]])
def test_rows_may_change_places(folder: pathlib.Path, kinds: list[dict[str, Any]], at_most: bool) -> None:
    """Two rows each become the other; then each computes one token more and gives the answer that the other would have given.

    at_most: the plan says only how far its rows can be
    """
    settings = {"dtype": "float32", "max_model_len": LENGTH, "page_size": 4, "full": False}
    plain, crossed = (Drive(folder, **settings) for _ in range(2))
    for drive in (plain, crossed):
        for name, tokens, kind in zip("ab", (prompt(9, 1), prompt(10, 2)), kinds, strict=True):
            drive.add(name, tokens, max_tokens=3, seed=4, **kind)
        drive.step()
    rows = {name: next(t.row for t in plain.scheduler.rows.tasks if t and t.id == name) for name in "ab"}
    asked = plain.scheduler.schedule(), crossed.scheduler.schedule()
    one, two = asked
    assert one is not None and one == two
    pages = {row: list(crossed.scheduler.memory.holdings[row].pages) for row in rows.values()}
    # Row a becomes b and row b becomes a. Their open pages go to pages that nobody has.
    free = crossed.scheduler.memory.pool.free_pages()
    starts = dict(zip(two.rows, two.starts, strict=True))
    a, b = rows["a"], rows["b"]
    two.forks = [
        Fork(row, parent, starts[parent], 4, [(0, pages[parent][starts[parent] // 4], free[i])] if starts[parent] % 4 else [])
        for i, (row, parent) in enumerate(((a, b), (b, a)))
    ]
    two.starts = [starts[b if row == a else a] for row in two.rows]
    new = dict(zip(two.page_rows, two.page_ids, strict=True))
    two.page_rows = [b if row == a else a for row in new]
    if at_most:
        two.drafts, two.starts = [0, 0], [start + 5 for start in two.starts]
    answers = []
    for drive, plan in zip((plain, crossed), asked, strict=True):
        drive.runner.launch(plan)
        answers.append(dict(zip(plan.rows, drive.runner.collect().tokens, strict=True)))
    assert answers[1] == {a: answers[0][b], b: answers[0][a]}
    assert answers[0][a] != answers[0][b]
