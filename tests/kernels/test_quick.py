"""Remembered calls in C: they do what Python does, let go of what they hold, and pass on what goes wrong."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_driver import EXTENDED_START, START, address

from trireme import kernels
from trireme.kernels.aten.calls import quick, repeat
from trireme.kernels.aten.elementwise import pointwise

needs_compiler = pytest.mark.skipif(quick.module() is None, reason="nothing can be built here")
PLACE, STREAM = 13, 3
LAYOUT = ((2, 2), (2, 1), torch.float32)
TEMPLATE = (1, 1, 1, None, *[None] * 9, None, None, 2.5, "constant")


@pointwise.pointwise()
def _sum(x, y):
    return x + y


@pytest.mark.parametrize("built", [True, False])
def test_the_same_with_a_compiler_and_without(built: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(quick, "module", lambda: None)
    plus = repeat.repeating(lambda x, y: _sum(x, y))
    assert type(plus).__name__ == ("Call" if built and quick.module() else "function"), "both ways are tried here"
    for shape in [(4, 8), (3, 5), (4, 8)] * 4:
        x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
        assert torch.equal(plus(x, y), x + y)
    memory = torch.randn(33, device=device)
    for _ in range(4):  # as long as the recorded one, but its memory begins elsewhere
        assert torch.equal(plus(memory[:32].view(4, 8), memory[1:].view(4, 8)), (memory[:32] + memory[1:]).view(4, 8))
    for a, b in ((x, x), (x, x), (y, y), (x, y), (y, x), (x, x)):  # one tensor twice
        assert torch.equal(plus(a, b), a + b)
    for number in (0.25, 0.25, 0.25, 1.5, 2.0, 2, True, float("inf")):
        assert torch.equal(plus(x, number), x + number)
    assert plus.__dict__["known"], "the function behind it can be asked"
    for wrong in ((), (torch.ones(2, device=device),), (torch.ones(2, device=device), torch.ones(3, device=device))):
        with pytest.raises((TypeError, RuntimeError)):
            plus(*wrong)


def fresh(shape: Any, stride: Any, dtype: Any) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def plan(start: Callable[..., Any], empty: Callable[..., Any] = fresh, raw: Any = None, **changes: Any) -> quick.Plan:
    """One launch of an argument, a result and a number."""
    starts = (quick.Start(start, TEMPLATE, ((PLACE, 0, 0), (PLACE + 1, 1, 0)), raw),)
    made = quick.Plan((0,), (0,), (LAYOUT,), (1,), False, empty, lambda device: 77 + device, 0, None, bool, (), starts, STREAM, ())
    return made._replace(**changes)


def run(made: quick.Plan, *args: Any) -> Any:
    return quick.module().repeat(tuple(made), args)


@needs_compiler
def test_a_launch_fills_in_what_changes() -> None:
    seen: list[tuple[Any, ...]] = []
    x = torch.randn(4)
    result = run(plan(lambda *values: seen.append(values)), x)
    assert seen == [(1, 1, 1, 77, *[None] * 9, x.data_ptr(), result.data_ptr(), 2.5, "constant")]
    (only,) = run(plan(lambda *values: None, as_tuple=True), x)
    assert tuple(only.shape) == (2, 2)
    assert run(plan(lambda *values: None), torch.randn(5)[1:]) is None, "memory that begins elsewhere is another call's"


@needs_compiler
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("code", [0, 201])
def test_a_driver_is_given_the_same(code: int, early: bool) -> None:
    """The kernel's parameters bit by bit; a launch that the driver refuses is made again by Triton's start."""
    seen: list[tuple[Any, ...]] = []
    started: list[tuple[Any, ...]] = []

    def driver(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):  # type: ignore[no-untyped-def]
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)
        values = [kind.from_address(parameters[i]).value for i, kind in enumerate(types)]
        seen.append((function, gx, gy, gz, bx, by, bz, shared, stream, extra, *values))
        return code

    def early_driver(configuration, function, parameters, extra):  # type: ignore[no-untyped-def]
        given = configuration[0]
        assert given.count == 1 and (given.attributes[0].id, given.attributes[0].value) == (6, 1), "may come early"
        return driver(function, *given.sizes, given.stream, parameters, extra)

    call = EXTENDED_START(early_driver) if early else START(driver)
    raw = quick.Raw(address(call), 42, 128, 4096, 5, 2, 1, b"-" * PLACE + b"ppf-", early)
    x = torch.randn(4)
    y = run(plan(lambda *values: started.append(values), raw=raw), x)
    assert seen == [(42, 5, 2, 1, 128, 1, 1, 4096, 77, None, x.data_ptr(), y.data_ptr(), 2.5, 0, 0)]
    assert len(started) == (code != 0)


@needs_compiler
def test_several_launches_share_memory() -> None:
    """Half of a workspace goes from the first to the second, and only what is asked for comes back."""
    seen: list[tuple[Any, ...]] = []
    first, second = ((lambda *values, name=name: seen.append((name, *values[PLACE:]))) for name in ("first", "second"))
    starts = (
        quick.Start(first, TEMPLATE, ((PLACE, 0, 0), (PLACE + 1, 2, 0)), None),
        quick.Start(second, TEMPLATE, ((PLACE, 2, 16), (PLACE + 1, 1, 0)), None),
    )
    x = torch.randn(4)
    result, same = run(plan(print, starts=starts, layouts=(LAYOUT, ((8,), (1,), torch.float32)), returned=(1, 0), as_tuple=True), x)
    assert same is x and tuple(result.shape) == (2, 2)
    (_, read, between, *_), (_, again, written, *_) = seen
    assert (read, written) == (x.data_ptr(), result.data_ptr()) and between == again - 16 not in (read, written)


@needs_compiler
def test_only_as_it_was_recorded() -> None:
    """Arguments that shared memory must share it; with memory that stays a call runs on its own stream, outside of graphs; and
    settings are what they were."""
    pointers = ((PLACE, 0, 0), (PLACE + 1, 2, 0))
    starts = (quick.Start(lambda *values: None, TEMPLATE, pointers, None),)
    both = plan(print, places=(0, 1), shared=(0, 0), returned=(2,), starts=starts)
    x, y = torch.randn(4), torch.randn(4)
    assert run(both, x, x) is not None and run(both, x, y) is None
    for bound, capturing, runs in ((77, False, True), (77, True, False), (78, False, False)):
        made = plan(lambda *values: None, bound=bound, capturing=lambda answer=capturing: answer)
        assert (run(made, x) is not None) == runs
    now = ["high"]
    made = plan(lambda *values: None, settings=((lambda: now[0], "high"), (lambda: 1, 1)))
    assert run(made, x) is not None
    now[0] = "low"
    assert run(made, x) is None
    with pytest.raises(ZeroDivisionError):
        run(plan(print, settings=((lambda: 1 / 0, 1),)), x)


@needs_compiler
def test_nothing_is_held_or_lost(device: str) -> None:
    plus = repeat.repeating(lambda x, y: _sum(x, y))
    x, y = torch.randn(64, device=device), torch.randn(64, device=device)
    for _ in range(4):
        plus(x, y)
    before, types = [sys.getrefcount(x), sys.getrefcount(y)], sys.getrefcount(torch.float32)
    result = weakref.ref(plus(x, y))
    for _ in range(2000):
        plus(x, y)
    gc.collect()
    assert result() is None and before == [sys.getrefcount(x), sys.getrefcount(y)]
    assert sys.getrefcount(torch.float32) - types < 1000, "others hold it too, and let go of it; a leak would be 2000"


@needs_compiler
@pytest.mark.parametrize("at", ["start", "empty", "pointer"])
def test_errors_are_passed_on(at: str) -> None:
    def fails(*values: object) -> None:
        raise RuntimeError("out of memory")

    class Odd:
        def data_ptr(self) -> str:
            return "nowhere"

    made = plan(fails if at == "start" else lambda *values: None, fails if at == "empty" else fresh)
    x = Odd() if at == "pointer" else torch.randn(4)
    before = sys.getrefcount(x)
    for _ in range(3):
        with pytest.raises(TypeError if at == "pointer" else RuntimeError):
            run(made, x)
    assert sys.getrefcount(x) == before


@needs_compiler
def test_operators_are_repeated_in_c(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that come through torch's dispatcher, from the third on, never reach the Python that would look them up."""
    x, y = torch.randn(2, 16, device=device)
    with kernels.use(include=["sub"]):
        for _ in range(3):
            torch.sub(x, y)
        monkeypatch.setattr(repeat, "_token", lambda x: pytest.fail("looked up"))
        monkeypatch.setattr(torch, "is_inference_mode_enabled", lambda: pytest.fail("looked up"))
        found = torch.sub(x, y)
    assert torch.equal(found, x - y)


@needs_compiler
def test_too_many_values_are_left_to_python() -> None:
    assert quick.fits(plan(print))
    many = quick.Start(print, (None,) * 65, (), None)
    for change in ({"places": tuple(range(9))}, {"layouts": (LAYOUT,) * 16}, {"starts": (many,)}):
        assert not quick.fits(plan(print, **change)), change
