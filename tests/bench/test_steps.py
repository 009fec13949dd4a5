"""The account of a step: how long the host waits for it, and what is printed of that."""

from __future__ import annotations

import time

import pytest

from trireme.bench.steps import show, waits


class Runner:
    """Answers after a while."""

    def collect(self) -> str:
        time.sleep(0.01)
        return "answer"


def test_waits_are_noted_while_somebody_asks() -> None:
    runner = Runner()
    with waits(runner) as waited:
        assert [runner.collect() for _ in range(3)] == ["answer"] * 3
    runner.collect()
    assert len(waited) == 3 and min(waited) >= 0.01
    assert "collect" not in vars(runner)


def test_only_the_second_half_of_the_waits_counts(capsys: pytest.CaptureFixture[str]) -> None:
    waited = [0.0, 0.0, 0.0, 90.0, 50.0, 70.0]  # prompts come first
    times = {"wall, us": 400.0, "span, us": 300.0, "busy, us": 200.0, "waits, us": waited, "late busy share": 0.995}
    show("a model", times | {"kernels": [("product", 60.0, 4)]}, 2, 5)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "a model: per step 200 us wall, 150 from first to last kernel, 100 busy; 99.5% of the second half"
    assert second.strip() == "the host waits 70 us for a step of the second half, 50 at least"
    assert third.split() == ["30.0", "us", "2.0", "x", "15.00", "product"]
