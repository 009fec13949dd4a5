"""Remembered calls answered by C++: what is like a remembered one never reaches Python and is launched with its own memory and
numbers; everything else goes on. On the CPU, with a driver of ours that computes in place of a kernel."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_driver import START, address, readdress
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from trireme.kernels import chips
from trireme.kernels.calls import launch, straight
from trireme.kernels.calls.notes import Plan
from trireme.kernels.calls.quick import Raw

if not chips.current().interpreted:
    pytest.skip("on a GPU every other test goes this way", allow_module_level=True)
if straight.module(wait=240) is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

SHAPE = (4, 8)
MAPPED = 43  # a kernel that takes maps


class Chip:
    """A driver whose only kernel computes out = x + y * factor for SHAPE, and remembers its starts. Whether it takes addresses as
    they are or in maps, they are the first bytes."""

    def __init__(self) -> None:
        self.starts: list[tuple[int, ...]] = []
        self.maps: list[bytes] = []
        self.code = 0
        self.callback = START(self._start)
        self.address = address(self.callback)

    def _start(self, function: int, *rest: Any) -> int:
        grid, parameters = rest[:7], rest[8]
        self.starts.append((function, *grid))
        self.maps = [ctypes.string_at(parameters[i], 128)[8:] for i in range(3)] if function == MAPPED else []
        x, y, out = (ctypes.c_uint64.from_address(parameters[i]).value for i in range(3))
        factor = ctypes.c_float.from_address(parameters[3]).value
        if self.code == 0:
            memory = [torch.frombuffer((ctypes.c_float * 32).from_address(at), dtype=torch.float32) for at in (x, y, out)]
            memory[2].copy_(memory[0] + memory[1] * factor)
        return self.code


class Standing:
    """An operator of the test's own, its Python kernel, and what stands above it."""

    def __init__(self, schema: str, kernel: Callable[..., Any], name: str, key: str) -> None:
        self.definition = torch.library.Library("trireme_test", "FRAGMENT")
        self.definition.define(name + schema)
        self.calls: list[tuple[Any, ...]] = []
        self.keeping: Callable[..., None] = lambda *args: None

        def python(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(args)
            self.keeping(*args)
            return kernel(*args, **kwargs)

        self.key = key
        self.definition.impl(name, python, key)
        self.call = getattr(torch.ops.trireme_test, name).default
        self.above: Any = straight.above(self.call, key)
        self.above.place()

    def end(self) -> None:
        self.above.remove()
        self.above.clear()
        del straight._above[self.call, self.key]
        self.definition._destroy()


@pytest.fixture
def chip() -> Chip:
    return Chip()


@pytest.fixture
def standing(request: pytest.FixtureRequest) -> Iterator[Callable[..., Standing]]:
    made: list[Standing] = []

    def make(schema: str, kernel: Callable[..., Any], key: str = "CPU") -> Standing:
        made.append(Standing(schema, kernel, f"op{abs(hash(request.node.name)) % 10**9}_{len(made)}", key))
        return made[-1]

    yield make
    for one in made:
        one.end()


def plan(chip: Chip, **changes: Any) -> Plan:
    """x and y, a result, and the number that is the third argument."""
    values = [1, 1, 1, None, *[None] * 9, None, None, None, 2.5, "constant"]
    pointers, raw = [(13, 0, 0), (14, 1, 0), (15, 2, 0)], Raw(chip.address, 42, 128, 64, (5, 2, 1), "-" * 13 + "pppf-", False)
    given = {
        "starts": [(None, values, pointers, [(16, 2)], raw, [])], "tensors": [(0, 0), (1, 1)], "returned": [2], "as_tuple": False,
        "layouts": [(SHAPE, (8, 1), torch.float32)], "device": -1, "kept": [], "bound": None, "settings": [], "asks": [],
    }  # fmt: skip
    return Plan(**(given | changes))


def weighted(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    return x + y * factor


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SHAPE), torch.randn(SHAPE)


WEIGHTED = "(Tensor x, Tensor y, float factor) -> Tensor"


def remembering(standing: Callable[..., Standing], given: Plan, signs: tuple[int, ...] = (2,), key: str = "CPU") -> Standing:
    """An operator that remembers one call, by this plan: the one with which it was called here."""
    one = standing(WEIGHTED, weighted, key)
    one.keeping = lambda *args: one.above.keep(given, list(signs))
    one.call(*pair(), 2.5)
    one.keeping = lambda *args: None
    return one


@contextlib.contextmanager
def replaced(overload: Any, python: Callable[..., Any]) -> Iterator[Any]:
    """torch's operator with a Python kernel, which is given what stands above it and torch's kernel, then the arguments."""
    library = torch.library.Library("aten", "IMPL")
    kernel = torch.library.get_kernel(overload, "CPU")
    torchs = functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))
    above: Any = straight.above(overload, "CPU")
    library.impl(overload.name().removeprefix("aten::"), functools.partial(python, above, torchs), "CPU", allow_override=True)
    above.place()
    try:
        yield above
    finally:
        above.remove()
        above.clear()
        library._destroy()


def test_what_is_like_it_never_reaches_python(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = remembering(standing, plan(chip))
    assert len(one.calls) == 1 and not chip.starts
    for factor in (2.5, 0.125, 7.75):
        x, y = pair()
        result = one.call(x, y, factor)
        torch.testing.assert_close(result, weighted(x, y, factor))
        assert result.stride() == (8, 1) and not result.requires_grad
    assert len(one.calls) == 1 and chip.starts == [(42, 5, 2, 1, 128, 1, 1, 64)] * 3
    shifted = torch.randn(40)[1:33].view(SHAPE)  # begins elsewhere
    others = [
        (x, y, -0.5), (x, y, 2.0), (x, y, float("inf")), (x.double(), y.double(), 2.5), (x.t(), y.t(), 2.5),
        (x[:2], y[:2], 2.5), (shifted, y, 2.5), (x.half(), y.half(), 2.5),
    ]  # fmt: skip
    for args in others:
        torch.testing.assert_close(one.call(*args), weighted(*args))
    assert len(one.calls) == 1 + len(others) and len(chip.starts) == 3


def test_gradients_are_torchs(chip: Chip, standing: Callable[..., Standing]) -> None:
    """It stands below autograd, so tensors with and without a gradient are the same to it."""
    one = remembering(standing, plan(chip))
    x, y = pair()
    with torch.no_grad():
        one.call(x.requires_grad_(), y, 2.5)
    assert len(chip.starts) == 1
    with torch.inference_mode():
        assert one.call(*pair(), 2.5).is_inference()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_above_autograd_only_what_nobody_watches(chip: Chip, standing: Callable[..., Standing]) -> None:
    """Where gradients are ours: a call of which one is wanted, or that a mode or a transform looks at, is Python's."""
    one = remembering(standing, plan(chip), key="AutogradCPU")
    x, y = pair()
    torch.testing.assert_close(one.call(x, y, 1.5), weighted(x, y, 1.5))
    assert len(chip.starts) == 1 and one.above.passed_on() == 1
    x.requires_grad_()
    one.call(x, y, 1.5).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(SHAPE))
    with Watching():
        one.call(x.detach(), y, 1.5)
    with forward_ad.dual_level():
        one.call(x.detach(), y, 1.5)
    assert len(chip.starts) == 1 and one.above.passed_on() == 4
    with torch.no_grad():
        one.call(x, y, 1.5)
    assert len(chip.starts) == 2
    several = torch.func.vmap(lambda a: one.call(a, y, 1.5))(x.detach().expand(3, *SHAPE))
    torch.testing.assert_close(several, weighted(x, y, 1.5).expand(3, *SHAPE))


def test_autocast_is_asked_for_without_python(chip: Chip, standing: Callable[..., Standing]) -> None:
    """A call that depends on it is repeated as long as it is as it was."""
    one = remembering(standing, plan(chip, settings=[(chips.autocasts, False)]))
    x, y = pair()
    one.call(x, y, 2.5)
    assert len(chip.starts) == 1 and len(one.calls) == 1
    with torch.autocast("cpu", torch.bfloat16):
        one.call(x, y, 2.5)
    assert len(chip.starts) == 1 and len(one.calls) == 2
    one.call(x, y, 2.5)
    assert len(chip.starts) == 2 and len(one.calls) == 2


def test_a_driver_that_refuses_is_pythons_to_ask(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = remembering(standing, plan(chip))
    x, y = pair()
    chip.code = 201
    torch.testing.assert_close(one.call(x, y, 2.5), weighted(x, y, 2.5))
    assert len(chip.starts) == 1 and len(one.calls) == 2


def test_addresses_in_maps(chip: Chip, standing: Callable[..., Standing]) -> None:
    """What the copy engine knows of a tensor comes along with the tensor's address of now."""
    start = plan(chip).starts[0]
    raw = start[4]._replace(function=MAPPED, kinds="-" * 13 + "mmmf-", maps=bytes(range(128)) * 3)
    readdressed = raw._replace(readdress=address(readdress))
    one = remembering(standing, plan(chip, starts=[(*start[:4], readdressed, [])]))
    for count in (1, 2):
        x, y = pair()
        torch.testing.assert_close(one.call(x, y, 2.5), weighted(x, y, 2.5))
        assert len(chip.starts) == count and len(one.calls) == 1
        assert chip.maps == [bytes(range(8, 128))] * 3
    for wrong in (raw, readdressed._replace(maps=bytes(256)), readdressed._replace(kinds="-" * 13 + "mmpf-")):
        another = remembering(standing, plan(chip, starts=[(*start[:4], wrong, [])]))
        another.call(*pair(), 2.5)
        assert len(another.calls) == 2 and len(chip.starts) == 2, "nothing of it is remembered"


def test_of_several_chips_only_on_its_own(chip: Chip, standing: Callable[..., Standing]) -> None:
    built = straight.module()
    one = standing(WEIGHTED, weighted)
    x, y = pair()
    for device, starts in ((-1, 1), (3, 0)):
        one.above.clear()
        chip.starts.clear()
        one.keeping = lambda *args, device=device: one.above.keep(plan(chip, device=device), [2])
        one.call(x, y, 2.5)
        built.set_up("CPU", 0, 0, 0, True)
        one.call(x, y, 2.5)
        built.set_up("CPU", 0, 0, 0, False)
        assert len(chip.starts) == starts


def test_shared_memory_and_several_results(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = standing("(Tensor x, Tensor y, float factor) -> (Tensor, Tensor)", lambda x, y, f: (weighted(x, y, f), x))
    same = plan(chip, tensors=[(0, 0), (1, 0)], returned=[2, 0], as_tuple=True)
    one.keeping = lambda *args: one.above.keep(same, [])
    x, y = pair()
    one.call(x, x, 2.5)
    one.keeping = lambda *args: None
    result, argument = one.call(x, x, 2.5)
    torch.testing.assert_close(result, x * 3.5)
    assert argument is x and len(one.calls) == 1
    one.call(x, y, 2.5)
    one.call(x, x, 0.5)  # this time the float counts by value
    assert len(one.calls) == 3


def test_a_result_twice_and_a_number_too_large(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = standing("(Tensor x, Tensor y, float factor) -> (Tensor, Tensor)", lambda x, y, f: (weighted(x, y, f), x))
    values = plan(chip).starts[0][1][:]
    values[16] = 1e300  # beyond float32: infinite to the kernel, as a cast makes it
    start = (None, values, *plan(chip).starts[0][2:])
    one.keeping = lambda *args: one.above.keep(plan(chip, starts=[start], returned=[2, 2], as_tuple=True), [])
    x, y = torch.ones(SHAPE), torch.ones(SHAPE)
    one.call(x, y, 1e300)
    first, second = one.call(x, y, 1e300)
    assert first is second and torch.isinf(first).all() and len(one.calls) == 1


def test_symbols_for_sizes_stay_symbols(chip: Chip, standing: Callable[..., Standing]) -> None:
    """What is asked of a tensor depends on what it is: one whose sizes are symbols is looked at no further."""
    one = remembering(standing, plan(chip), key="AutogradCPU")
    x, y = pair()
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:
        fake = mode.from_tensor(x, symbolic_context=None, static_shapes=False)
        other = mode.from_tensor(y, symbolic_context=None, static_shapes=False)
    result = one.call(fake, other, 2.5)
    assert any(not isinstance(size, int) for size in fake.shape), "its sizes are symbols still"
    assert result.shape == fake.shape and not chip.starts


def test_removed_while_a_call_is_on_its_way(chip: Chip) -> None:
    """A call that came here before an operator was switched off, and can neither be repeated nor go on to Python, is torch's. (How
    calls that come in that moment find their kernel is torch's business, whose table is not made for it.)"""
    x, y = pair()
    wanted = torch.atan2(x, y)
    asked: list[Any] = []

    def python(above: Any, torchs: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        above.keep(removing, [])
        return torchs(*args, **kwargs)

    with replaced(torch.ops.aten.atan2.default, python) as above:

        def remove(*rest: Any) -> int:
            above.remove()
            return 201

        callback = START(remove)
        raw = plan(chip).starts[0][4]._replace(driver=address(callback), kinds="-" * 13 + "ppp-")
        removing = plan(chip, starts=[(None, [None] * 17, [(13, 0, 0), (14, 1, 0), (15, 2, 0)], [], raw, [])])
        for _ in range(2):  # remembered, and removed midway
            assert torch.equal(torch.atan2(x, y), wanted) and len(asked) == 1


def test_switched_while_another_thread_is_in_the_python_kernel() -> None:
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    wanted = torch.bmm(a, b)
    inside, switched, found = threading.Event(), threading.Event(), []

    def slow(above: Any, torchs: Any, *args: Any) -> Any:
        inside.set()
        assert switched.wait(60)
        return torchs(*args)

    thread = threading.Thread(target=lambda: found.append(torch.bmm(a, b)))
    with replaced(torch.ops.aten.bmm.default, slow) as above:
        thread.start()
        assert inside.wait(60)
        for _ in range(300):
            above.remove()
            above.place()
        switched.set()
        thread.join(60)
    assert torch.equal(found[0], wanted)


def test_numbers_in_the_place_of_tensors() -> None:
    """torch wraps a number as a tensor where the schema wants one; Python gets the number, and so does a start."""
    seen: list[Any] = []
    got: list[float] = []

    def start(*rest: Any) -> int:
        parameters = rest[9]
        out = ctypes.c_uint64.from_address(parameters[0]).value
        got.append(ctypes.c_float.from_address(parameters[1]).value)
        torch.frombuffer((ctypes.c_float * 32).from_address(out), dtype=torch.float32).fill_(got[-1])
        return 0

    callback = START(start)
    raw = Raw(address(callback), 42, 128, 64, (5, 2, 1), "-" * 13 + "pf-", False)
    values = [None] * 13 + [None, 0.5, "constant"]
    program = plan(Chip(), starts=[(None, values, [(13, 1, 0)], [(14, 1)], raw, [])], tensors=[(0, 0)], returned=[1])

    def python(above: Any, torchs: Any, x: Any, y: Any, **kwargs: Any) -> Any:
        seen.append(y)
        if type(y) is float:
            above.keep(program, [1])
        return torchs(x, y if isinstance(y, torch.Tensor) else torch.scalar_tensor(y), **kwargs)

    x = torch.zeros(SHAPE)
    with replaced(torch.ops.aten.add.Tensor, python):
        for y in (0.25, 1.5, 2.25):
            assert float(torch.add(x, y)[0, 0]) == y
        assert seen == [0.25] and got == [1.5, 2.25]
        for y in (2.0, 2, True, -0.5, torch.ones(())):
            assert float(torch.add(x, y)[0, 0]) == float(y)
        assert len(seen) == 6 and got == [1.5, 2.25]
    assert float(torch.add(x, 1.5)[0, 0]) == 1.5 and len(seen) == 6


def test_what_is_left_to_torch_goes_there() -> None:
    """Without Python, as long as the settings are what they were."""
    seen: list[Any] = []

    def python(above: Any, torchs: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        above.leave([(torch.get_default_dtype, torch.get_default_dtype())], [])
        return torchs(a, b)

    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    with replaced(torch.ops.aten.bmm.default, python):
        for _ in range(4):
            torch.testing.assert_close(torch.bmm(a, b), torch.einsum("bij,bjk->bik", a, b))
        assert len(seen) == 1
        torch.set_default_dtype(torch.float64)
        try:
            torch.bmm(a, b)
        finally:
            torch.set_default_dtype(torch.float32)
        assert len(seen) == 2
        torch.bmm(b.transpose(1, 2), a.transpose(1, 2))
        assert len(seen) == 3


def test_lists_types_and_names(chip: Chip, standing: Callable[..., Standing]) -> None:
    """Every argument counts: lists by value, types and devices as torch boxes them, what has a name like the rest."""
    schema = (
        "(Tensor x, Tensor y, float factor, int[] dim, *, ScalarType? dtype=None, bool keep=False, Device? device=None) -> Tensor"
    )
    one = standing(schema, lambda x, y, factor, dim, **kwargs: weighted(x, y, factor))
    one.keeping = lambda *args: one.above.keep(plan(chip), [2])
    x, y = pair()
    calls: list[tuple[list[int], dict[str, Any]]] = [
        ([0], {}), ([0, 1], {}), ([1], {}), ([0], {"dtype": torch.float32}), ([0], {"dtype": torch.float64}), ([0], {"keep": True}),
        ([0], {"device": torch.device("cpu")}),
    ]  # fmt: skip
    for dim, others in calls:
        one.call(x, y, 2.5, dim, **others)
    assert len(one.calls) == len(calls) and not chip.starts
    for dim, others in calls:
        torch.testing.assert_close(one.call(x, y, 1.5, dim, **others), weighted(x, y, 1.5))
    assert len(one.calls) == len(calls) and len(chip.starts) == len(calls)


def test_while_a_call_is_recorded_everything_comes_to_python(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = remembering(standing, plan(chip))
    x, y = pair()
    for listener in launch.listeners:
        listener(1)
    one.call(x, y, 2.5)
    for listener in launch.listeners:
        listener(-1)
    assert len(one.calls) == 2 and not chip.starts
    one.call(x, y, 2.5)
    assert len(one.calls) == 2 and len(chip.starts) == 1


def test_without_random_numbers_it_is_not_repeated(chip: Chip, standing: Callable[..., Standing]) -> None:
    """The host's generator has no counter, as a GPU's has none while a graph is recorded: Python decides what to do."""

    def ask() -> None:
        return None

    ask.__dict__["past"] = 4
    one = remembering(standing, plan(chip, asks=[ask]))
    x, y = pair()
    torch.testing.assert_close(one.call(x, y, 2.5), weighted(x, y, 2.5))
    assert len(one.calls) == 2 and not chip.starts


def test_memory_that_stays_is_held_until_it_is_forgotten(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = standing(WEIGHTED, weighted)
    kept = [torch.zeros(4)]
    alive = weakref.ref(kept[0])
    held = [plan(chip, kept=kept, bound=0)]
    one.keeping = lambda *args: one.above.keep(held[0], [2]) if held else None
    x, y = pair()
    one.call(x, y, 2.5)
    del kept
    held.clear()
    gc.collect()
    assert alive() is not None
    one.call(x, y, 2.5)
    assert len(chip.starts) == 1
    one.above.clear()
    gc.collect()
    assert alive() is None
    one.call(x, y, 2.5)
    assert len(one.calls) == 2


def test_only_sixteen_kinds_are_remembered(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = standing("(Tensor x, Tensor y, float factor, int number) -> Tensor", lambda x, y, factor, number: weighted(x, y, factor))
    one.keeping = lambda *args: one.above.keep(plan(chip), [2])
    x, y = pair()
    for number in range(20):
        one.call(x, y, 2.5, number)
    one.keeping = lambda *args: None
    for number in range(20):
        one.call(x, y, 2.5, number)
    assert len(chip.starts) == 16 and len(one.calls) == 24


def test_programs_that_make_no_sense_are_refused(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = standing(WEIGHTED, weighted)
    x, y = pair()
    start = plan(chip).starts[0]
    refused: list[bool] = []
    bad: list[dict[str, Any]] = [
        {"tensors": [(7, 0)]}, {"tensors": [(0, 1), (1, 1)]}, {"returned": []}, {"returned": [9]}, {"starts": []},
        {"layouts": [(SHAPE, (8, 1), torch.float32)] * 20}, {"starts": [(*start[:4], None, [])]},
        {"starts": [(*start[:2], [(13, 5, 0)], *start[3:])]}, {"starts": [(*start[:3], [(16, 9)], *start[4:])]},
        {"asks": [lambda: None]}, {"settings": [(lambda: 1, 1)]}, {"tensors": [(2, 0), (1, 1)]},
    ]  # fmt: skip

    def keep(*args: Any) -> None:
        for change in bad:
            one.above.keep(plan(chip, **change), [])
        refused.append(True)

    one.keeping = keep
    one.call(x, y, 2.5)
    one.keeping = lambda *args: None
    one.call(x, y, 2.5)
    assert refused and len(one.calls) == 2 and not chip.starts
    one.above.keep(plan(chip), [2])  # nobody calls now
    one.call(x, y, 2.5)
    assert len(one.calls) == 3


def test_many_threads(chip: Chip, standing: Callable[..., Standing]) -> None:
    one = remembering(standing, plan(chip))
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for i in range(50):
            x, y = (torch.randn(SHAPE, generator=generator) for _ in range(2))
            if not torch.allclose(one.call(x, y, 0.5 + seed), x + y * (0.5 + seed)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        one.above.clear()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
