"""Kernels that come onto the chip while the one before them still runs: they wait first, and read what that one wrote."""

from __future__ import annotations

import ast
import gc
import inspect
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl

from trireme import kernels
from trireme.kernels import chips
from trireme.kernels.aten.calls import notes
from trireme.kernels.aten.elementwise import pointwise
from trireme.kernels.aten.folds import reduce
from trireme.kernels.aten.products import streamed
from trireme.kernels.aten.rowwise import norms, softmax
from trireme.kernels.launch import Handle, Kernel


def first_of(source: str) -> str:
    """The first statement of a function, less its docstring."""
    body = ast.parse(textwrap.dedent(source)).body[-1].body  # type: ignore[attr-defined]
    return ast.unparse(body[1] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body[0])


def test_whoever_may_come_early_waits_first() -> None:
    """A kernel without the wait that is let onto the chip early would read what is not written yet."""
    known = [
        x for x in gc.get_objects() if issubclass(type(x), Kernel) and not x.function.__module__.startswith("trireme_generated")
    ]
    early = [kernel.function for kernel in known if kernel.early]
    assert {norms._norm.function, softmax._softmax.function, reduce._fold.function, streamed._tensor.function} <= set(early)
    for function in early:
        source = inspect.getsource(function)
        assert first_of(source[source.index("def ") :]).startswith("chips.begin(EARLY, "), function.__qualname__
    for rank, forms in ((0, ["t", "s"]), (2, ["t", "r"]), (3, ["t", "c"])):
        source = pointwise.generate(rank, forms, 0, 1, "tl.float32", False)
        assert first_of(source) == "chips.begin(EARLY, OPEN=True)" and "EARLY: tl.constexpr):" in source


def _early_kernel(x, EARLY: tl.constexpr) -> None:
    """No kernel at all."""


def _plain_kernel(x) -> None:
    """Nor is this."""


class Seen:
    """Stands in for a compiled function: notes what it is started with."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.options.append(options)


def options_of(function: Any, **given: Any) -> dict[str, Any]:
    kernel = Kernel(function)
    kernel.jit = seen = Seen()  # type: ignore[assignment]
    kernel.direct = True
    kernel((1,), 4, **given)
    return seen.options[0]


def test_early_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for early in (True, False):
        monkeypatch.setattr(chips, "current", lambda early=early: replace(chips.GENERIC, early=early))
        for given in ({}, {"dependent": False}, {"dependent": True}):
            comes = early and given.get("dependent") is not False
            options = options_of(_early_kernel, **given)
            assert options["EARLY"] is comes and options.get("launch_pdl", False) is comes, (early, given)
        assert "launch_pdl" not in options_of(_plain_kernel), "it does not wait"


def test_whoever_comes_early_is_started_so_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "driver_launch", lambda extended: 1 + extended)
    for early, driver in ((True, 2), (False, 1)):
        handle = Handle(None, 42, False, early, (4, 1, 4096), "pi-")
        raw = notes._raw(handle, (1, 1, 1))
        assert raw is not None and (raw.driver, raw.early) == (driver, early)
        assert notes._raw(handle._replace(metadata=(4, 8, 4096)), (1, 1, 1)) is None, "clusters are Triton's to start"


@pytest.mark.gpu
@pytest.mark.skipif(not chips.current().early, reason="no kernel comes early on this chip")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("shape", [(3, 4096), (600, 1000), (8192, 4096)])
def test_what_was_written_last_is_read(recorded: bool, shape: tuple[int, int]) -> None:
    """Each kernel reads all that the one before it wrote, in memory that was others' a moment ago."""
    start = torch.randint(-3, 4, shape, device="cuda").float()

    def chain() -> torch.Tensor:
        x = start
        for i in range(40):
            y = (x + (i % 3 - 1)) * 2 - x
            x = torch.where(y.sum(1, keepdim=True) > 0, -y, y).clamp(-100, 100) + y.amax(1, keepdim=True) * 0
        return torch.softmax(torch.nn.functional.layer_norm(x, [shape[1]]), 1)

    want = chain()
    with kernels.use():
        for _ in range(3):
            chain()
        step = chain
        if recorded:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                result = chain()
            step = lambda: (graph.replay(), result.clone())[1]  # noqa: E731
        found = [step() for _ in range(5)]
    for one in found:
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-6)
