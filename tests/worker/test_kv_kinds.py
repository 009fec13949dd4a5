"""Every kind of KV beside every size of page, prefix hits, pauses, windows and ranks: as near to the plain body as its rounding."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive, Run, ThreadGroup
from tiny_models import LENGTH, prompt
from torch import Tensor

from trireme.backends import reason_against
from trireme.config import resolve
from trireme.errors import BadConfig
from trireme.ops import CacheSpec

KINDS = ("int8", "fp8", "int4")
# Bytes a token takes in the three layers of the model below: keys and values of 2 heads of 40 numbers.
BYTES = {"auto": 3 * 2 * 2 * 160, "int8": 3 * 2 * 2 * 44, "fp8": 3 * 2 * 2 * 40, "int4": 3 * 2 * 2 * (20 + 2 * 4)}
NEW = 12
# Without graphs, because the logits of recorded steps are not seen.
OPTIONS: dict[str, Any] = {"dtype": "float32", "quantize": "none", "max_step_tokens": 24, "graphs": False}
# Mean error of the logits, of their mean size. Both sides compute the same but for the order of sums, which now and then moves a
# key or a value to the next code: measured 4e-4 at most. A scale that is 1 % off gives 0.016 and more.
NEAR = 2e-3
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(reason_against(name) is not None, reason=str(reason_against(name))))
    for name in ("reference", "cpu")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Heads of 40: two groups of int4, of which the last is shorter."""
    made = tmp_path_factory.mktemp("heads_of_40")
    tiny_models.build("Qwen3Config", tiny_models._BASE | {"head_dim": 40}, seed=3).save_pretrained(made)
    return made


def opened(folder: pathlib.Path, kind: str, **settings: Any) -> Drive:
    settings = OPTIONS | {"max_model_len": LENGTH, "kv_dtype": kind} | settings
    return Drive(folder, **settings)


class Plain:
    """The logits of whole texts by the plain body, with the same kind of KV, computed in one step each."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.drives = folder, dict[str, Drive]()

    def logits(self, kind: str, tokens: list[int]) -> Tensor:
        if kind not in self.drives:
            self.drives[kind] = opened(self.folder, kind, page_size=0, prefix_cache=False, max_step_tokens=LENGTH)
        drive = self.drives[kind]
        run = drive.run(f"{len(drive.runs)}", tokens, max_tokens=1)
        return torch.stack([run.logits[i] for i in range(len(tokens))])


@pytest.fixture(scope="module")
def plain(folder: pathlib.Path) -> Iterator[Plain]:
    yield Plain(folder)


def error(run: Run, asked: list[int], expected: Tensor) -> float:
    """How far a run's logits are from the expected ones, of their mean size."""
    errors = [(run.logits[i] - expected[i]).abs().mean() for i in run.logits if i < len(expected)]
    assert len(run.logits) >= NEW and len(run.tokens) == NEW and len(expected) == len(asked) + NEW - 1
    return float(torch.stack(errors).mean() / expected.abs().mean())


def check(runs: dict[str, tuple[Run, list[int]]], kind: str, plain: Plain) -> None:
    for name, (run, asked) in runs.items():
        assert error(run, asked, plain.logits(kind, [*asked, *run.tokens[:-1]])) < NEAR, name


def answered(drive: Drive, asked: dict[str, list[int]]) -> dict[str, tuple[Run, list[int]]]:
    for name, tokens in asked.items():
        drive.add(name, tokens, max_tokens=NEW)
    found = drive.finish()
    return {name: (found[name], tokens) for name, tokens in asked.items()}


@pytest.mark.parametrize("page_size", [16, 1, 0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_and_prefixes(folder: pathlib.Path, plain: Plain, backend: str, kind: str, page_size: int) -> None:
    drive = opened(folder, kind, backend=backend, page_size=page_size, kv_tokens=4 * LENGTH)
    assert drive.worker.ready.kv_bytes == 4 * LENGTH * BYTES[kind]
    common = prompt(33, 1)
    runs = answered(drive, {"first": [*common, *prompt(7, 2)], "beside": prompt(3, 3)})
    runs |= answered(drive, {"again": [*common, *prompt(9, 4)]})
    assert runs["again"][0].cached == (0 if page_size == 0 else 32 if page_size == 16 else 33)
    check(runs, kind, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pauses(folder: pathlib.Path, plain: Plain, backend: str, kind: str) -> None:
    """With and without a prefix cache that holds what a paused row had computed."""
    settings = {"backend": backend, "page_size": 4, "kv_tokens": 64, "max_model_len": 64, "policy": "aggressive"}
    for prefix_cache in (True, False):
        drive = opened(folder, kind, prefix_cache=prefix_cache, **settings)
        runs = answered(drive, {f"{i}": prompt(18 + i, i) for i in range(3)})
        assert drive.scheduler.stats().preemptions > 0
        check(runs, kind, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps(folder: pathlib.Path, kind: str) -> None:
    if reason_against("cpu"):
        pytest.skip(str(reason_against("cpu")))
    asked = {"a": prompt(40, 1), "b": prompt(5, 2)}
    ways = (answered(opened(folder, kind, backend="cpu", graphs=graphs, full=False), asked) for graphs in (True, False))
    recorded, unrecorded = ([run.tokens for run, _ in way.values()] for way in ways)
    assert recorded == unrecorded


@pytest.mark.parametrize("kind", KINDS)
def test_several_answers(folder: pathlib.Path, plain: Plain, kind: str) -> None:
    """They share their prompt's pages, and the last one is copied."""
    drive = opened(folder, kind, page_size=16)
    asked = prompt(21, 5)
    drive.add("a", asked, n=3, max_tokens=NEW, temperature=1.0)
    check({name: (run, asked) for name, run in drive.finish().items() if name != "a"}, kind, plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks(folder: pathlib.Path, plain: Plain, monkeypatch: pytest.MonkeyPatch, backend: str, kind: str) -> None:
    settings = OPTIONS | {"max_running": 4, "max_model_len": LENGTH, "backend": backend, "kv_dtype": kind, "kv_tokens": 2 * LENGTH}
    ranks = ThreadGroup(resolve(settings | {"tp": 2}, environ={}), folder, monkeypatch)
    try:
        assert [worker.ready.kv_bytes for worker in ranks.workers] == [2 * LENGTH * BYTES[kind] // 2] * 2
        drive = Drive(folder, worker=ranks, **settings)
        check(answered(drive, {"a": prompt(40, 1), "b": prompt(5, 2)}), kind, plain)
    finally:
        ranks.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows(tmp_path_factory: pytest.TempPathFactory, backend: str, kind: str) -> None:
    """Layers of both bands; a hit resumes from a tail."""
    folder = tiny_models.save("gemma3", tmp_path_factory.mktemp("gemma3"))
    drive = opened(folder, kind, backend=backend, page_size=4, kv_windows="on")
    assert [band.keep for band in drive.worker.ready.bands] == [0, 9]
    first = answered(drive, {"a": prompt(50, 1)})
    asked = [*prompt(50, 1), *first["a"][0].tokens, *prompt(6, 2)]
    runs = first | answered(drive, {"b": asked})
    assert runs["b"][0].cached >= 48
    check(runs, kind, Plain(folder))


def test_odd_heads_are_refused() -> None:
    with pytest.raises(BadConfig, match="two numbers a byte; the model has heads of 21") as caught:
        CacheSpec((2, 21), (2, 21)).as_kind("int4")
    assert "\n" not in str(caught.value)
    assert CacheSpec((2, 21), (2, 21)).as_kind("int8").bytes_per_token(torch.float32) == 2 * 2 * 25


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_the_page_says_what_a_token_takes(kind: str) -> None:
    page = pathlib.Path(__file__).parents[2] / "docs/memory.md"
    (row,) = (line for line in page.read_text().splitlines() if line.startswith(f"| `{kind}` |") and "KiB" in line)
    llama, smollm = CacheSpec((8, 128), (8, 128)).as_kind(kind), CacheSpec((3, 64), (3, 64)).as_kind(kind)
    sizes = 32 * llama.bytes_per_token(torch.bfloat16) / 1024, 30 * smollm.bytes_per_token(torch.float32) / 1024
    assert [float(cell.strip().removesuffix(" KiB")) for cell in row.split("|")[-3:-1]] == [float(f"{size:.1f}") for size in sizes]
