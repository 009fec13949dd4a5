"""Kernels that come onto the chip while the one before them still runs: they wait first, and read what that one wrote."""

from __future__ import annotations

import ast
import gc
import inspect
import textwrap

import pytest
import torch

from trireme import kernels
from trireme.kernels import chips, norms, pointwise, reduce, softmax, streamed
from trireme.kernels.launch import Kernel


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
    assert {norms._rms_norm.function, softmax._softmax.function, reduce._fold.function, streamed._tensor.function} <= set(early)
    for function in early:
        source = inspect.getsource(function)
        assert first_of(source[source.index("def ") :]).startswith("chips.begin(EARLY, "), function.__qualname__
    for rank, forms in ((0, ["t", "s"]), (2, ["t", "r"]), (3, ["t", "c"])):
        source = pointwise.generate(rank, forms, 0, 1, "tl.float32", False)
        assert first_of(source) == "chips.begin(EARLY, OPEN=True)" and "EARLY: tl.constexpr):" in source


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
        step, found = chain, []
        if recorded:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                result = chain()
            step = lambda: (graph.replay(), result.clone())[1]  # noqa: E731
        found = [step() for _ in range(5)]
    for one in found:
        torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-6)
