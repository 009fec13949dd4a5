"""The last block goes on with the tokens that need logits; with all where few are coarser, and while somebody looks."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive
from tiny_models import LENGTH, prompt

PROMPT = prompt(14, 2)
STEPS = {"whole": [14, 1], "cut": [5, 5, 4, 1]}  # tokens of each step


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "bloom"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_only_wanted_tokens_pass_the_last_block(
    family: str, backend: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.save(family, tmp_path)
    for steps in STEPS.values():
        settings: dict[str, Any] = {"max_model_len": LENGTH, "max_step_tokens": max(steps), "prefix_cache": False}
        drive = Drive(tmp_path, full=False, backend=backend, graphs=False, dtype="float32", **settings)
        model = drive.worker.model
        blocks = model.transformer.h if family == "bloom" else model.model.layers
        first, last = (_rows_given(monkeypatch, block.mlp) for block in (blocks[0], blocks[-1]))
        answer = drive.run("a", PROMPT, max_tokens=2).tokens
        assert first == steps
        assert last == (steps if backend == "cpu" else [0] * (len(steps) - 2) + [1, 1])  # a CPU computes few rows more coarsely
        assert answer == tiny_models.reference(family, PROMPT, 2)[0]


def _rows_given(monkeypatch: pytest.MonkeyPatch, layer: Any) -> list[int]:
    """How many rows the layer is given, call by call."""
    kind, seen = type(layer), list[int]()

    class Counting(kind):  # type: ignore[misc, valid-type]
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().__call__(x)

    monkeypatch.setattr(layer, "__class__", Counting)
    return seen


def test_a_tap_sees_all_tokens(tmp_path: pathlib.Path) -> None:
    tiny_models.save("qwen3", tmp_path)
    drive = Drive(tmp_path, full=False, max_model_len=LENGTH, prefix_cache=False)
    plain = drive.run("plain", PROMPT, max_tokens=2).tokens
    last = f"model.layers.{len(drive.worker.model.model.layers) - 1}"
    with drive.worker.capture(last, f"{last}.mlp", "lm_head") as values:
        watched = drive.run("watched", PROMPT, max_tokens=2).tokens
    assert watched == plain
    assert [len(x) for x in values[last]] == [len(x) for x in values[f"{last}.mlp"]] == [14, 1]
    assert [len(x) for x in values["lm_head"]] == [1, 1]
