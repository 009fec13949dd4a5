"""`trireme models check`: a right class agrees with transformers in every way, a wrong one in none."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from tests import tiny_models
from trireme.backends import reason_against
from trireme.cli.main import main
from trireme.models import MODELS, ModelConfig


def test_a_right_class_agrees_and_a_wrong_one_does_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_models.save("qwen2", tmp_path / "model"))
    backend = "cpu" if reason_against("cpu") is None else "reference"
    command = ["models", "check", folder, "--tp", "1", "--tokens", "20", "--backend", backend]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert (
        "computed by        the class Qwen2" in told and told.count("  ok") == (3 if backend == "cpu" else 2) and "FAIL" not in told
    )
    right = MODELS["Qwen2ForCausalLM"]

    def config(raw: dict[str, Any]) -> ModelConfig:
        return dataclasses.replace(right.config(raw), eps=1.0)

    monkeypatch.setitem(MODELS, "Qwen2ForCausalLM", type("Wrong", (right,), {"config": staticmethod(config)}))
    assert main(command) == 1
    told = capsys.readouterr().out
    assert "FAIL" in told and "  ok" not in told


def test_what_cannot_be_checked_is_one_line(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", str(tmp_path / "nothing")]) != 0
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["models", "check", str(tmp_path), "--tokens", "1"]) != 0
    assert "--tokens" in capsys.readouterr().err
