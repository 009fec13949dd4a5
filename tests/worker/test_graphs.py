"""Captured steps: a step that cannot be captured is never replayed, and its tokens are those of steps that run as they come."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive
from tiny_models import LENGTH, prompt

from trireme.backends import reason_against
from trireme.worker.runner import Standing

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9], prompt(21, 3))
BACKENDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama2", tmp_path_factory.mktemp("llama2"))


def needs(backend: str) -> None:
    if reason_against(backend):
        pytest.skip(f"{backend}: {reason_against(backend)}")


def answers(drive: Drive) -> tuple[list[list[int]], float]:
    """Tokens: greedy, drawn and ruled, one after the other, so that each kind of step is captured; then all of them at once.
    And the log-probability of the third prompt's first token."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"logprobs": 1}]
    for together in (False, True):
        for i, (tokens, sampling) in enumerate(zip(PROMPTS, kinds, strict=True)):
            drive.add(f"{i}-{together}", tokens, max_tokens=12, ignore_eos=True, **sampling)
            if not together:
                drive.finish()
    runs = drive.finish()
    first = runs["2-False"].progress[0].logprobs
    assert first is not None
    return [run.tokens for run in runs.values()], first[0].logprob


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_halves_give_the_same_tokens_with_and_without_graphs(backend: str, dtype: str, folder: pathlib.Path) -> None:
    needs(backend)
    settings: dict[str, Any] = {"backend": backend, "dtype": dtype, "max_model_len": LENGTH, "page_size": 4}
    plain, captured = (answers(Drive(folder, full=False, graphs=graphs, **settings)) for graphs in (False, True))
    assert captured == plain
    reference = answers(Drive(folder, full=False, dtype=dtype, max_model_len=LENGTH))
    assert captured[0][2][0] == reference[0][2][0] and captured[1] == pytest.approx(reference[1], abs=0.1)


@pytest.mark.parametrize("read", ["item", "tolist", "numpy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_op_that_waits_for_the_device_runs_as_it_comes(
    backend: str, read: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an op of a plug-in may: here a norm that goes by a number it has read on the host."""
    needs(backend)
    settings: dict[str, Any] = {"backend": backend, "dtype": "float32", "max_model_len": LENGTH}
    expected = answers(Drive(folder, full=False, graphs=False, **settings))
    drive = Drive(folder, full=False, **settings)
    ops, runner = type(drive.worker.backend.ops), drive.worker.runner
    assert any(standing is Standing.WANTED for standing in runner.known.values()), "the first step is captured"
    runner.graphs.clear(), runner.known.clear()
    norm = ops.rms_norm

    def waiting(self: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        first = x.flatten()[:1].cpu()
        most = float(first.item() if read == "item" else first.tolist()[0] if read == "tolist" else first.numpy()[0])
        return norm(self, x - (most - most), weight, eps) + 0.0 * most

    monkeypatch.setattr(ops, "rms_norm", waiting)
    assert answers(drive) == expected
    assert not runner.graphs and Standing.NEVER in runner.known.values()
