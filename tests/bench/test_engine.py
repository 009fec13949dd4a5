"""What the engine's benchmark makes of its clocks."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from trireme.bench import engine

ARGS = argparse.Namespace(prompt_tokens=16, output_tokens=11, batch=2, repeat=3)
LLM: Any = SimpleNamespace(worker=SimpleNamespace(ready=SimpleNamespace(vocab_size=100)))


def figures(monkeypatch: pytest.MonkeyPatch, whole: float) -> dict[str, Any]:
    """Half a second to the first token, `whole` for all."""
    monkeypatch.setattr(engine, "measure", lambda llm, prompts, tokens: (0.5 if tokens == 1 else whole, tokens * len(prompts)))
    return engine.latency(LLM, ARGS)


def test_a_step_is_what_more_tokens_take(monkeypatch: pytest.MonkeyPatch) -> None:
    made = figures(monkeypatch, 1.5)
    assert made["first token, ms"] == 500 and made["step, ms"] == 100 and made["output tokens/s"] == 20


@pytest.mark.parametrize("whole", [0.5, 0.4])
def test_a_time_too_short_to_tell_is_said_and_not_made_up(whole: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made = figures(monkeypatch, whole)
    assert "Fix: more --output-tokens" in made["step, ms"] and "output tokens/s" not in made
