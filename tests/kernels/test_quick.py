"""Remembered calls in C: they do what Python does, let go of what they hold, and pass on what goes wrong."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import pytest
import torch

from trireme.kernels import pointwise, quick, repeat

needs_compiler = pytest.mark.skipif(quick._module() is None, reason="nothing can be built here")
PLACE, STREAM = 13, 3


@pointwise.pointwise()
def _sum(x, y):
    return x + y


@pytest.mark.parametrize("built", [True, False])
def test_the_same_with_a_compiler_and_without(built: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(quick, "_module", lambda: None)
    plus = repeat.repeating(lambda x, y: _sum(x, y))
    assert type(plus).__name__ == ("Call" if built and quick._module() else "function"), "both ways are tried here"
    shapes = [(4, 8), (3, 5), (4, 8)]
    for shape in shapes * 4:
        x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
        assert torch.equal(plus(x, y), x + y)
    memory = torch.randn(33, device=device)
    for _ in range(4):  # as long as the recorded one, but its memory begins elsewhere
        assert torch.equal(plus(memory[:32].view(4, 8), memory[1:].view(4, 8)), (memory[:32] + memory[1:]).view(4, 8))
    assert plus.__dict__["known"], "the function behind it can be asked"
    for wrong in ((), (torch.ones(2, device=device),), (torch.ones(2, device=device), torch.ones(3, device=device))):
        with pytest.raises((TypeError, RuntimeError)):
            plus(*wrong)


@pytest.mark.parametrize("built", [True, False])
def test_floats_count_by_sign_only_where_they_may(built: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers with a fraction share one remembered call; whole ones, infinite ones and other types do not slip into it."""
    if not built:
        monkeypatch.setattr(quick, "_module", lambda: None)
    calls: list[object] = []

    def scaled(x: torch.Tensor, y: object) -> torch.Tensor:
        calls.append(y)
        return _sum(x, y)

    plus = repeat.repeating(scaled)
    x = torch.zeros(16, device=device)
    for y in (0.5, 1.5, 2.25, 0.125):
        assert plus(x, y)[0] == y
    assert calls == [0.5, 1.5], "the third is repeated, with its own number"
    for y in (-0.5, 2.0, 2, True, float("inf"), 1e16, -0.75):
        assert plus(x, y)[0] == y
    assert calls == [0.5, 1.5, -0.5, 2.0, 2, True, float("inf"), 1e16, -0.75]


def made(start, empty, **changes):  # type: ignore[no-untyped-def]
    layout = ((2, 2), (2, 1), torch.float32)
    settings = {"sources": [(PLACE, 0)], "floats": [(PLACE + 2, 1)], "targets": [(PLACE + 1, *layout)], "as_tuple": False} | changes
    template = [1, 1, 1, None, *[None] * 9, None, None, None, "constant"]
    order = (settings["sources"], settings["floats"], settings["targets"])
    tail = (settings["as_tuple"], settings.get("raw"))
    return quick.launch(start, template, STREAM, *order, empty, lambda device: 77 + device, 0, *tail)


@needs_compiler
def test_a_launch_fills_in_what_changes() -> None:
    seen: list[tuple] = []
    results: list[torch.Tensor] = []

    def empty(shape, stride, dtype):  # type: ignore[no-untyped-def]
        results.append(torch.empty_strided(shape, stride, dtype=dtype))
        return results[-1]

    launch = made(lambda *values: seen.append(values), empty)
    x = torch.randn(4)
    assert launch((x, 2.5), {}) is results[0]
    assert seen == [(1, 1, 1, 77, *[None] * 9, x.data_ptr(), results[0].data_ptr(), 2.5, "constant")]
    assert made(lambda *values: None, empty, as_tuple=True)((x, 2.5), {}) == (results[-1],)
    assert launch((torch.randn(5)[1:], 2.5), {}) is None, "memory that begins elsewhere is another call's"
    assert launch((x,), {}) is None and launch((), {}) is None


@needs_compiler
@pytest.mark.parametrize("code", [0, 201])
def test_a_driver_is_given_the_same(code: int) -> None:
    """The kernel's parameters bit by bit; a launch that the driver refuses is made again by Triton's start."""
    seen: list[tuple] = []
    started: list[tuple] = []
    number, place = ctypes.c_uint, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(ctypes.c_int, place, *[number] * 7, place, ctypes.POINTER(place), place)

    def driver(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):  # type: ignore[no-untyped-def]
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)
        values = [kind.from_address(parameters[i]).value for i, kind in enumerate(types)]
        seen.append((function, gx, gy, gz, bx, by, bz, shared, stream, extra, *values))
        return code

    call = kind(driver)
    address = ctypes.cast(call, ctypes.c_void_p).value
    raw = (address, 42, 128, 4096, "-" * PLACE + "ppf-")
    empty = lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)  # noqa: E731
    launch = made(lambda *values: started.append(values), empty, raw=raw)
    x = torch.randn(4)
    y = launch((x, 2.5), {})
    assert seen == [(42, 1, 1, 1, 128, 1, 1, 4096, 77, None, x.data_ptr(), y.data_ptr(), 2.5, 0, 0)]
    assert len(started) == (code != 0)
    with pytest.raises(ValueError):
        quick._module().Launch(
            None, [1, 1, 1, None], 3, [], [], [(0, ((1,), (1,), None))], None, None, 0, False, (address, 42, 32, 0, "pp")
        )


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

    good = lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype)  # noqa: E731
    launch = made(fails if at == "start" else lambda *values: None, fails if at == "empty" else good)
    x = Odd() if at == "pointer" else torch.randn(4)
    before = sys.getrefcount(x)
    for _ in range(3):
        with pytest.raises(TypeError if at == "pointer" else RuntimeError):
            launch((x, 1.5), {})
    assert sys.getrefcount(x) == before


@needs_compiler
def test_too_many_values_are_left_to_python() -> None:
    many = [(PLACE, i) for i in range(9)]
    assert made(lambda *values: None, None, sources=many) is None
    assert made(lambda *values: None, None, targets=[]) is None
    assert made(lambda *values: None, None, sources=[(400, 0)]) is None
