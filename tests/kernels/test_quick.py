"""Remembered calls in C: they do what Python does, let go of what they hold, and pass on what goes wrong."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import pytest
import torch
from fake_driver import EXTENDED_START, START, address, readdress

from trireme.kernels.aten.calls import quick, repeat
from trireme.kernels.aten.elementwise import pointwise

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
    for y in (0.25, 1.5, 2.25, 0.125):
        assert plus(x, y)[0] == y
    assert calls == [0.25, 1.5], "the third is repeated, with its own number"
    for y in (-0.25, 0.5, -0.5, 2.0, 2, True, float("inf"), 1e16, -0.75):
        assert plus(x, y)[0] == y
    assert calls == [0.25, 1.5, -0.25, 0.5, -0.5, 2.0, 2, True, float("inf"), 1e16, -0.75]


LAYOUT = ((2, 2), (2, 1), torch.float32)
TEMPLATE = [1, 1, 1, None, *[None] * 9, None, None, None, "constant"]


def made(start, empty, **changes):  # type: ignore[no-untyped-def]
    """One launch of an argument, a result and a number."""
    given = {"pointers": [(PLACE, 0), (PLACE + 1, 1)], "floats": [(PLACE + 2, 1)], "raw": None, "as_tuple": False} | changes
    given = {"tensors": [(0, 0)], "layouts": [LAYOUT], "returned": [1], "bound": None, "capturing": None} | given
    starts = given.get("starts", [(start, TEMPLATE, given["pointers"], given["floats"], given["raw"], given.get("drawn", []))])
    parts = (given["tensors"], given["layouts"], given["returned"], given["as_tuple"])
    more = (given.get("kept", []), given["bound"], given["capturing"], given.get("settings", []), given.get("asks", []))
    return quick.launch(starts, STREAM, *parts, empty, lambda device: 77 + device, 0, *more)


def fresh(shape, stride, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_strided(shape, stride, dtype=dtype)


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
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("code", [0, 201])
def test_a_driver_is_given_the_same(code: int, early: bool) -> None:
    """The kernel's parameters bit by bit; a launch that the driver refuses is made again by Triton's start."""
    seen: list[tuple] = []
    started: list[tuple] = []

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
    raw = quick.Raw(address(call), 42, 128, 4096, (5, 2, 1), "-" * PLACE + "ppf-", early)
    launch = made(lambda *values: started.append(values), fresh, raw=raw)
    x = torch.randn(4)
    y = launch((x, 2.5), {})
    assert seen == [(42, 5, 2, 1, 128, 1, 1, 4096, 77, None, x.data_ptr(), y.data_ptr(), 2.5, 0, 0)]
    assert len(started) == (code != 0)
    assert made(lambda *values: None, fresh, raw=raw._replace(kinds="pp")) is None, "too few kinds"


MAP = bytes(range(128))


def readdressed(tensor_map: bytes, pointer: int) -> bytes:
    return pointer.to_bytes(8, sys.byteorder) + tensor_map[8:]


@needs_compiler
@pytest.mark.parametrize("early", [False, True])
def test_clusters_and_maps_reach_the_driver(early: bool) -> None:
    """A kernel whose blocks form clusters, and what its copy engine knows of two tensors, each with its address of now."""
    seen: list[tuple] = []
    code = 0

    def driver(configuration, function, parameters, extra):  # type: ignore[no-untyped-def]
        given = configuration[0]
        attributes = [(x.id, x.value, *x.rest[:8]) for x in given.attributes[: given.count]]
        maps = [ctypes.string_at(parameters[i], 128) for i in (0, 1)]
        seen.append((list(given.sizes), attributes, *maps, ctypes.c_float.from_address(parameters[2]).value))
        return code

    call = EXTENDED_START(driver)
    others = bytes(reversed(MAP))
    kinds, maps = "-" * PLACE + "mmf-", MAP + others
    raw = quick.Raw(address(call), 42, 128, 4096, (5, 2, 1), kinds, early, 8, maps, address(readdress))
    started: list[tuple] = []
    launch = made(lambda *values: started.append(values), fresh, raw=raw, pointers=[(PLACE, 0), (PLACE + 1, 1, 32)])
    attributes = [(4, 8, 1, 0, 0, 0, 1, 0, 0, 0), (5, 1, *[0] * 8), *([(6, 1, *[0] * 8)] if early else [])]
    for x in (torch.randn(4), torch.randn(4)):
        y = launch((x, 2.5), {})
        wanted = readdressed(MAP, x.data_ptr()), readdressed(others, y.data_ptr() + 32)
        assert seen.pop() == ([40, 2, 1, 128, 1, 1, 4096], attributes, *wanted, 2.5)
    assert not started
    code = 201
    y = launch((x, 2.5), {})
    assert seen and [values[PLACE : PLACE + 2] for values in started] == [(x.data_ptr(), y.data_ptr() + 32)], "refused"
    for wrong in ({"maps": MAP}, {"readdress": 0}, {"kinds": "-" * PLACE + "mpf-"}, {"maps": MAP * 5, "kinds": "-" * 12 + "mmmmm"}):
        assert made(print, fresh, raw=raw._replace(**wrong), pointers=[]) is None, wrong


@needs_compiler
def test_several_launches_share_memory() -> None:
    """Half of a workspace goes from the first to the second, and only what is asked for comes back."""
    seen: list[tuple] = []
    first, second = ((lambda *values, name=name: seen.append((name, *values[PLACE:]))) for name in ("first", "second"))
    starts = [
        (first, TEMPLATE, [(PLACE, 0), (PLACE + 1, 2)], [(PLACE + 2, 1)], None, []),
        (second, TEMPLATE, [(PLACE, 2, 16), (PLACE + 1, 1)], [], None, []),
    ]
    launch = made(None, fresh, starts=starts, layouts=[LAYOUT, ((8,), (1,), torch.float32)], returned=[1, 0], as_tuple=True)
    x = torch.randn(4)
    result, same = launch((x, 0.5), {})
    assert same is x and tuple(result.shape) == (2, 2)
    (_, read, between, number, _), (_, again, written, *_) = seen
    assert (read, number, written) == (x.data_ptr(), 0.5, result.data_ptr()) and between == again - 16 not in (read, written)


@needs_compiler
def test_only_as_it_was_recorded() -> None:
    """Arguments that shared memory must share it; a call with memory that stays runs on its own stream, outside of graphs."""
    pointers = [(PLACE, 0), (PLACE + 1, 2)]
    both = made(lambda *values: None, fresh, tensors=[(0, 0), (1, 0)], returned=[2], pointers=pointers, floats=[])
    x, y = torch.randn(4), torch.randn(4)
    assert both((x, x), {}) is not None and both((x, y), {}) is None
    for bound, capturing, runs in ((77, False, True), (77, True, False), (78, False, False)):
        kept = [torch.zeros(4)]
        alive = weakref.ref(kept[0])
        launch = made(lambda *values: None, fresh, kept=kept, bound=bound, capturing=lambda answer=capturing: answer)
        assert (launch((x, 2.5), {}) is not None) == runs
        del kept
        assert alive() is not None, "its address is in the launch"
        del launch
        assert alive() is None


@needs_compiler
def test_settings_must_be_what_they_were() -> None:
    now = ["high", 1]
    settings = [(lambda: now[0], "high"), (lambda: now[1], 1)]
    launch = made(lambda *values: None, fresh, settings=settings)
    x = torch.randn(4)
    assert launch((x, 2.5), {}) is not None
    now[1] = 2
    assert launch((x, 2.5), {}) is None
    now[:] = "high", 1
    assert launch((x, 2.5), {}) is not None
    launch = made(lambda *values: None, fresh, settings=[(lambda: 1 / 0, 1)])
    with pytest.raises(ZeroDivisionError):
        launch((x, 2.5), {})


@pytest.mark.parametrize("built", [True, False])
def test_arguments_with_names(built: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names count, in their order, and so do the values given by them."""
    if not built:
        monkeypatch.setattr(quick, "_module", lambda: None)
    calls: list[dict] = []

    def weighted(x: torch.Tensor, *, twice: bool = False, less: bool = False) -> torch.Tensor:
        calls.append({"twice": twice, "less": less})
        return _sum(x, x) if twice else _sum(x, -1) if less else _sum(x, 0)

    function = repeat.repeating(weighted)
    x = torch.randn(16, device=device)
    for _ in range(4):
        assert torch.equal(function(x, twice=True), x + x)
        assert torch.equal(function(x, less=True), x - 1)
        assert torch.equal(function(x, twice=False), x) and torch.equal(function(x), x)
        assert torch.equal(function(x, twice=True, less=False), x + x)
        assert torch.equal(function(x, less=False, twice=True), x + x)
    assert len(calls) == 12, "each kind twice, then it is repeated"
    with pytest.raises(TypeError):
        function(x, thrice=True)


@needs_compiler
def test_numbers_are_drawn_anew() -> None:
    """Each repetition asks once; without an answer it is not repeated, with a wrong one it fails, and nothing is held."""
    seen: list[tuple] = []
    answers: list[object] = [(3, 4), (5, 6), None, (7,), "no"]
    asked = {"drawn": [(PLACE + 2, 0, 1)], "asks": [lambda: answers.pop(0)]}
    launch = made(lambda *values: seen.append(values[PLACE:]), fresh, floats=[], **asked)
    x = torch.randn(4)
    assert launch((x,), {}) is not None and launch((x,), {}) is not None and [values[2] for values in seen] == [4, 6]
    assert launch((x,), {}) is None and len(seen) == 2
    for _ in range(2):
        with pytest.raises(TypeError, match="asked for numbers"):
            launch((x,), {})
    assert not answers and made(lambda *values: None, fresh, drawn=[(PLACE, 1, 0)], asks=[int]) is None, "there is one to ask"


@pytest.mark.parametrize("built", [True, False])
def test_one_tensor_twice(built: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(quick, "_module", lambda: None)
    plus = repeat.repeating(lambda x, y: _sum(x, y))
    x, y = torch.randn(16, device=device), torch.randn(16, device=device)
    for a, b in ((x, x), (x, x), (y, y), (x, y), (y, x), (x, x), (x, y)):
        assert torch.equal(plus(a, b), a + b)
    calls = []
    counted = repeat.repeating(lambda x, y: calls.append(1) or _sum(x, y))
    for a, b in ((x, x), (y, y), (y, y), (x, x), (x.clone(), y)):
        assert torch.equal(counted(a, b), a + b)
    of_two, of_one = counted.__dict__["memory"].recent
    assert len(calls) == 3 and of_one[2] == (0,) and of_one[7] == [(1, 0)], "a tensor given twice is looked at once"
    assert quick._is_kind(of_one, (y, y), {}, []) and not quick._is_kind(of_one, (x, y), {}, [])
    assert quick._is_kind(of_two, (x, y), {}, []) and not quick._is_kind(of_two, (x, x), {}, [])


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

    launch = made(fails if at == "start" else lambda *values: None, fails if at == "empty" else fresh)
    x = Odd() if at == "pointer" else torch.randn(4)
    before = sys.getrefcount(x)
    for _ in range(3):
        with pytest.raises(TypeError if at == "pointer" else RuntimeError):
            launch((x, 1.5), {})
    assert sys.getrefcount(x) == before


@needs_compiler
def test_too_many_values_are_left_to_python() -> None:
    nothing = lambda *values: None  # noqa: E731
    assert made(nothing, fresh) is not None
    for change in (
        {"tensors": [(i, i) for i in range(9)]},
        {"tensors": [(0, 1), (1, 1)]},  # an argument is compared with one before it
        {"layouts": [LAYOUT] * 9},
        {"returned": []},
        {"returned": [2]},
        {"pointers": [(400, 0)]},
        {"pointers": [(PLACE, 2)]},
        {"floats": [(PLACE, -1)]},
        {"starts": []},
        {"asks": [int] * 3},
        {"starts": [(nothing, [None] * 65, [], [], None, [])]},
        {"starts": [(nothing, [None] * 3, [], [], None, [])]},  # no place for the stream
    ):
        assert made(nothing, fresh, **change) is None, change
