"""The clock of `trireme bench kernels`: a chip that slows down while it is used does not favour whoever goes first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trireme.bench import kernels as bench
from trireme.bench.kernel_cases import Case, all_cases
from trireme.kernels.aten.registry import OPERATORS


def test_a_chip_that_grows_hot_favours_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = 0.0

    def work(microseconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal spent
            spent += microseconds * (1.0 + 0.05 * min(spent / 1e5, 4.0))  # up to a fifth slower

        return call

    def record(call: Callable[[], None], count: int) -> Callable[[], None]:
        def replay() -> None:
            for _ in range(count):
                call()

        return replay

    def elapsed(step: Callable[[], None]) -> float:
        begun = spent
        step()
        return spent - begun

    monkeypatch.setattr(bench.chips, "record", record)
    monkeypatch.setattr(bench.chips, "elapsed", elapsed)
    theirs = work(1000.0)
    for ours, ratio in ((work(1000.0), 1.0), (work(500.0), 2.0)):
        spent = 0.0
        row = bench.measure(Case("abs", "", tuple, theirs, ours, ("abs",), 1.0), {"GB/s": 1.0})
        assert row.error == "" and row.ratio == pytest.approx(ratio, rel=0.04)


def test_every_operator_is_timed_on_the_device_and_as_it_is_launched() -> None:
    cases = list(all_cases())
    assert {case.op for case in cases} >= set(OPERATORS)
    launched = [case.op for case in cases if case.launch]
    assert {*launched, "allclose"} >= set(OPERATORS) and "allclose" not in launched


def test_a_draw_is_the_same_everywhere_and_another_seed_draws_others() -> None:
    from trireme.bench.kernel_sweep import FAMILIES, sweep_cases

    def labels(seed: int) -> list[tuple[str, str, str]]:
        return [(family, case.op, case.label) for family, case in sweep_cases(seed)]

    assert labels(1) == labels(1) != labels(2)
    unrecorded = {"rand", "randn", "rand_like", "native_dropout", "allclose"}  # which draw anew, or wait for the device
    assert {family for family, _, _ in labels(1)} == set(FAMILIES) and {op for _, op, _ in labels(1)} == set(OPERATORS) - unrecorded


@pytest.mark.wide
def test_a_draw_is_of_calls_that_torch_takes() -> None:
    """All of them, on tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trireme.bench.kernel_sweep import sweep_cases

    with FakeTensorMode():
        for _, case in sweep_cases(3):
            case.theirs(*case.make())
