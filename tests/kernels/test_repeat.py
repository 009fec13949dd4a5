"""Repeated calls: what is remembered of a call gives the same answers on fresh data, and is not used where a call differs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from reference import check

from trireme import kernels
from trireme.kernels import chips, launch
from trireme.kernels.aten import registry
from trireme.kernels.aten.calls import notes, quick, repeat, tune
from trireme.kernels.aten.elementwise import pointwise

Call = tuple[tuple[Any, ...], dict[str, Any]]


pytestmark = pytest.mark.usefixtures("ours_only")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    repeat.forget()
    yield
    kernels.disable()
    repeat.forget()


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[bool]:
    """One entry for every call that tried to repeat an earlier one: whether it did."""
    if request.config.getoption("--public-launcher", default=False):
        pytest.skip("calls are repeated by the private launcher alone")
    seen: list[bool] = []
    original = notes.Notes.repetition

    def counted(self: Any, result: Any) -> Any:
        inner = original(self, result)
        if inner is None:
            return None

        def again(args: Any) -> Any:
            result = inner(args)
            seen.append(result is not None)
            return result

        return again

    monkeypatch.setattr(notes.Notes, "repetition", counted)
    return seen


def _floats(*shape: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.randn(shape, device=device).abs() + 0.5


def _integers(*shape: int, dtype: torch.dtype = torch.int32) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.randint(0, 5, shape, device=device).to(dtype)


X, Y, W, A, B = _floats(5, 16), _floats(5, 16), _floats(16), _integers(5, 16), _integers(5, 16)
UNARY = ["abs", "cos", "exp", "gelu", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "tanh"]
UNARY += ["isfinite", "isinf", "isnan", "sum", "mean", "prod", "max", "min", "any", "all"]
BINARY = ["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "pow.Tensor_Tensor", "isclose", "clamp.Tensor"]
COMPARED = [f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")]
# Callables make fresh tensors; everything else is passed as it is.
CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(UNARY, (X,)),
    **dict.fromkeys(BINARY, (X, Y)),
    **{name: (X, Y if name.endswith("Tensor") else 1.25) for name in COMPARED},
    "bitwise_not": (A,), "bitwise_and.Tensor": (A, B), "bitwise_or.Tensor": (A, B), "bitwise_and.Scalar": (A, 3),
    "bitwise_or.Scalar": (A, 3), "bitwise_and.Scalar_Tensor": (3, A), "bitwise_or.Scalar_Tensor": (3, A),
    "pow.Scalar": (1.5, X), "pow.Tensor_Scalar": (X, 2.5), "clamp": (X, 0.75, 1.5),
    "where.self": (lambda device: X(device) > 1, X, Y), "where.ScalarSelf": (lambda device: X(device) > 1, 0.25, Y),
    "where.ScalarOther": (lambda device: X(device) > 1, X, 0.25),
    "mm": (_floats(8, 16), _floats(16, 24)), "bmm": (_floats(2, 5, 16), _floats(2, 16, 12)), "mv": (X, W),
    "addmm": (W, _floats(5, 8), _floats(8, 16)), "cumsum": (X, 1), "triu": (X, 1), "flip": (X, [1]), "outer": (W, W),
    "embedding": (_floats(7, 8), _integers(6, dtype=torch.int64)), "native_layer_norm": (X, [16], W, W, 1e-5),
    "native_group_norm": (_floats(2, 4, 8), _floats(4), _floats(4), 2, 4, 8, 2, 1e-5), "rms_norm": (X, [16], W, 1e-5),
    "softmax.int": (X, -1), "log_softmax.int": (X, 0), "cross_entropy_loss": (X, _integers(5, dtype=torch.int64)),
    "sum.dim_IntList": (X, [0]), "mean.dim": (X, [1], True), "prod.dim_int": (X, 1), "max.dim": (X, 1), "min.dim": (X, 0),
    "amax": (X, [1]), "argmax": (X, 1), "var_mean.correction": (X, [1]), "linalg_vector_norm": (X, 3.5, [1]),
    "all.dim": (A, 1), "all.dims": (A, [0]), "any.dim": (A, 1), "any.dims": (A, [0]),
}  # fmt: skip
UNREPEATED = ["rand", "randn", "rand_like", "native_dropout", "allclose"]  # random state, and an answer on the host


def test_every_operator_has_a_call() -> None:
    assert sorted([*CALLS, *UNREPEATED]) == sorted(registry.OPERATORS)


def run(name: str, arguments: tuple[Any, ...], device: str) -> None:
    """Calls the operator through torch's dispatcher with fresh data and compares it with torch's own."""
    args = tuple(x(device) if callable(x) else x for x in arguments)
    overload = registry.OPERATORS[name].overload

    def ours(*given: Any) -> Any:
        with kernels.use(include=[name]):
            return overload(*given)

    check(name, ours, overload, args, {}, length=64)


@pytest.mark.parametrize("name", CALLS)
def test_operators_repeat(name: str, device: str, repeats: list[bool]) -> None:
    for _ in range(4):
        run(name, CALLS[name], device)
    assert repeats == [True, True]
    run(name, tuple(_unaligned(x) if callable(x) else x for x in CALLS[name]), device)
    missed = repeats[2:]
    assert missed in ([False], [False, False]), "as a recent call, as one of its key, and not again"
    if name != "native_group_norm":  # of which torch itself refuses such an input
        run(name, tuple(_halved(x) if callable(x) else x for x in CALLS[name]), device)
    run(name, CALLS[name], device)
    assert repeats == [True, True, *missed, True]


@pytest.mark.gpu
def test_calls_in_other_streams_and_graphs(device: str) -> None:
    """What has memory of its own stays on its stream and out of graphs; what has none goes with the stream it is called on."""
    x, long = torch.randn(64, 64, device="cuda"), torch.randn(1 << 22, device="cuda")
    with kernels.use(include=["exp", "sum"]):
        for _ in range(4):
            x.exp(), long.sum()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ours = [x.exp(), long.sum()]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                recorded = [x.exp(), long.sum()]
        stream.synchronize()
        x.add_(0.5), long.mul_(2.0)
        graph.replay()
        torch.cuda.synchronize()
    torch.testing.assert_close(ours[0], (x - 0.5).exp(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[1], long.sum() / 2, rtol=1e-3, atol=1e-1)
    torch.testing.assert_close(recorded[0], x.exp(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(recorded[1], long.sum(), rtol=1e-3, atol=1e-1)


def _unaligned(make: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """The same layout, one element into its memory."""

    def made(device: str) -> torch.Tensor:
        x = make(device)
        room = torch.zeros(x.numel() + 1, dtype=x.dtype, device=device)
        return room.as_strided(x.shape, x.stride(), 1).copy_(x)

    return made


def _halved(make: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """The same shape in every other element of twice the memory."""

    def made(device: str) -> torch.Tensor:
        x = make(device)
        return x.new_zeros(2 * x.numel())[::2].view(-1).as_strided(x.shape, [2 * s for s in x.stride()]).copy_(x)

    return made


def test_memory_shared_by_arguments(device: str, repeats: list[bool]) -> None:
    """x + x is remembered with one memory for both; x + y is of another kind."""
    kernels.only_enable(["add"])
    for _ in range(4):
        x = torch.randn(4, 16, device=device)
        assert torch.equal(x + x, x * 2)
    assert repeats == [True, True]
    for _ in range(2):
        x, y = torch.randn(4, 16, device=device), torch.randn(4, 16, device=device)
        assert torch.equal(x + y, x - (-y))
        assert torch.equal(x + x, x * 2)
    assert repeats == [True, True, False, True, True, True]


def test_parts_of_one_tensor(device: str, repeats: list[bool]) -> None:
    for _ in range(4):
        fused = torch.randn(6, 32, device=device)
        expected = torch.nn.functional.silu(fused[:, :16]) * fused[:, 16:]
        torch.testing.assert_close(kernels.silu_and_mul(fused), expected)
    assert repeats == [True, True]
    for _ in range(3):
        fused = torch.randn(6, 32, device=device)
        gate, value = fused[:, :16], fused[:, 16:]
        torch.testing.assert_close(kernels.silu_and_mul(gate, value), torch.nn.functional.silu(gate) * value)
    gate = torch.randn(6, 32, device=device)[:, :16]
    torch.testing.assert_close(kernels.silu_and_mul(gate, value), torch.nn.functional.silu(gate) * value)
    assert repeats == [True] * 4


def test_fused_steps_repeat(device: str, repeats: list[bool]) -> None:
    weight = torch.randn(16, device=device)
    for eps in (1e-5, 1e-5, 1e-5, 1e-5):
        x, residual = torch.randn(2, 3, 16, device=device).unbind()
        total = x + residual
        y, same = kernels.skip_rms_norm(x, residual, weight, eps)
        assert same is residual
        torch.testing.assert_close(residual, total)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(total, (16,), weight, eps))
    assert repeats == [True, True]
    cos, sin = torch.randn(2, 9, 4, device=device).unbind()
    for _ in range(3):
        q, k = torch.randn(5, 2, 8, device=device), torch.randn(5, 1, 8, device=device)
        places = torch.randint(0, 9, (5,), device=device)
        expected = [part.clone() for part in kernels.rotary_embedding(q[None], k[None], cos[places], sin[places])]
        for mine, theirs in zip(kernels.rotary_embedding(q, k, cos, sin, places), expected, strict=True):
            torch.testing.assert_close(mine, theirs[0])
    assert repeats.count(True) == 4


def test_numbers_keep_their_type(device: str) -> None:
    kernels.only_enable(["mul", "div"])
    x = torch.arange(8, device=device)
    for _ in range(4):
        assert (x * 2).dtype is torch.int64 and (x * 2.0).dtype is torch.float32 and (x * True).dtype is torch.int64


def test_a_number_and_a_tensor_take_turns(device: str, repeats: list[bool]) -> None:
    kernels.only_enable(["mul"])
    x, y = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    for _ in range(5):
        doubled, product, turned = x * 2.5, x * y, 2.5 * x
        assert torch.equal(doubled, turned) and torch.allclose(doubled, x / 0.4)
        assert torch.allclose(product / y, x, atol=1e-5)
    assert repeats.count(True) >= 9


def test_settings_are_asked_again(device: str, repeats: list[bool]) -> None:
    kernels.only_enable(["div"])
    x, y = torch.arange(1, 9, device=device), torch.arange(2, 10, device=device)
    try:
        for dtype in (torch.float32,) * 3 + (torch.float64,) * 3 + (torch.float32,):
            torch.set_default_dtype(dtype)
            assert (x / y).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)
    # With another type neither what is of the kind nor what has the key repeats; back at the first one, what came last does not.
    assert repeats == [True, False, False, True, True, False, True]


COMPOSITE = {
    "softmax": lambda x, w: x.softmax(-1),
    "log_softmax": lambda x, w: x.log_softmax(-1),
    "rms_norm": lambda x, w: torch.rms_norm(x, [16], w, 1e-5),
    "outer": lambda x, w: torch.outer(x[0], w),
    "cross_entropy_loss": lambda x, w: torch.nn.functional.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
}


@pytest.mark.parametrize("name", COMPOSITE)
@pytest.mark.parametrize("built", [True, False])
def test_what_is_remembered_without_gradients_is_not_used_with_them(
    name: str, built: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluate, then train: the same tensors, which require gradients, first with none wanted."""
    if not built:
        monkeypatch.setattr(quick, "module", lambda: None)
        registry._with_gradient.cache_clear()
    x, w = torch.randn(4, 16, device=device, requires_grad=True), torch.nn.Parameter(torch.ones(16, device=device))
    call = COMPOSITE[name]
    truth = torch.autograd.grad(call(x, w).square().sum(), x)[0]
    with kernels.use(include=[name]):
        for _ in range(2):
            with torch.no_grad():
                for _ in range(4):
                    assert not call(x, w).requires_grad
            gradient = torch.autograd.grad(call(x, w).square().sum(), x)[0]
            torch.testing.assert_close(gradient, truth)
    registry._with_gradient.cache_clear()


def test_memory_of_another_device_is_not_repeated(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = launch.Recording()
    monkeypatch.setattr(launch.current, "recording", recording)
    launch.empty((4,), torch.float32, torch.device(device))
    assert recording.repeatable
    monkeypatch.setattr(launch.chips, "current_device", lambda: 5)
    launch.empty_like(torch.ones(4, device=device))
    assert not recording.repeatable and len(recording.made) == 2


def test_what_comes_once_is_not_noted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_MOST", 50)
    plus = repeat.repeating(lambda x, n: _add_one(x, n))
    x = torch.ones(8, device=device)
    for n in range(200):
        assert plus(x, n)[0] == n + 1
    assert not plus.__dict__["known"]
    for _ in range(3):
        plus(x, 3)
    assert len(plus.__dict__["known"]) == 1


@pointwise.pointwise()
def _add_one(x, y):
    return x + y


def test_torchs_own_work_is_not_repeated(device: str) -> None:
    """A copy, a result that torch made and a call without a launch leave nothing that could be repeated."""
    copied = repeat.repeating(lambda x: _add_one(x.t().contiguous(), 1.5))
    filled = repeat.repeating(lambda x: launch.empty(x.shape, x.dtype, x.device).fill_(1))
    foreign = repeat.repeating(lambda x: _add_one(x, x).clone())
    for function in (copied, filled, foreign):
        for _ in range(4):
            function(torch.randn(3, 4, device=device))
        assert not function.__dict__["known"]


def test_what_is_left_to_torch_is_not_repeated(device: str) -> None:
    """Torch defines a norm of mixed types by other operators, some of them ours, and writes between them."""
    weight = torch.ones(8, device=device, dtype=torch.bfloat16)
    with torch.no_grad(), kernels.use():
        for _ in range(7):
            x = torch.randn(4, 8, device=device) * 0.1
            expected = x * (x.square().mean(1, keepdim=True) + 0.25).rsqrt()
            torch.testing.assert_close(torch.nn.functional.rms_norm(x, [8], weight, 0.25), expected)


def test_what_a_kernel_refuses_goes_straight_on_from_its_third_call(device: str) -> None:
    asked, done = [], []

    def refuse(x: torch.Tensor, factor: float) -> torch.Tensor:
        asked.append(x)
        _add_one(x, factor)
        raise launch.Unsupported("nothing here")

    function = repeat.repeating(refuse, lambda x, factor: done.append(x) or x * factor)
    outer = repeat.repeating(lambda x: function(x, 2.5))
    x = torch.ones(4, 8, device=device)
    for _ in range(5):
        torch.testing.assert_close(function(x, 0.25), x * 0.25)
    assert len(asked) == 2 and len(done) == 5
    for n in (1.0, 2.0, 3.0):  # within a call that is noted its work is not
        torch.testing.assert_close(outer(x * n), x * n * 2.5)
    assert not outer.__dict__["known"]
    asked.clear()
    torch.testing.assert_close(function(x[:, ::2], 0.25), x[:, ::2] * 0.25)
    assert len(asked) == 1, "another layout is asked anew"


def test_a_refusal_lasts_as_long_as_the_setting_it_was_for(device: str) -> None:
    allowed, done = [False], []

    def ours(x: torch.Tensor) -> torch.Tensor:
        if not launch.setting(lambda: allowed[0]):
            raise launch.Unsupported("not now")
        return _add_one(x, 1.5)

    function = repeat.repeating(ours, lambda x: done.append(x) or x.clone())
    x = torch.ones(4, device=device)
    for _ in range(4):
        function(x)
    assert len(done) == 4
    allowed[0] = True
    for _ in range(4):
        torch.testing.assert_close(function(x), x + 1.5)
    assert len(done) == 4


def test_inference_mode_has_calls_of_its_own(device: str) -> None:
    """Its tensors look otherwise to the quick look, so that calls remembered outside would only be found by their keys."""
    plus = repeat.repeating(lambda x: _add_one(x, 1.5))
    x = torch.ones(4, device=device)
    for _ in range(3):
        assert not plus(x).is_inference()
    with torch.inference_mode():
        for _ in range(3):
            assert plus(x).is_inference()
    assert len(plus.__dict__["memory"].recent) == 2
    assert not plus(x).is_inference()


def test_refused_calls_of_an_operator_are_torchs(device: str) -> None:
    """Complex numbers, and a number where torch's schema says tensor."""
    kernels.only_enable(["exp", "add", "bitwise_and"])
    for _ in range(5):
        z = torch.randn(3, device=device, dtype=torch.complex64)
        torch.testing.assert_close(z.exp(), torch.polar(z.real.cpu().exp(), z.imag.cpu()).to(device))
        torch.testing.assert_close((z + 2).real, z.real + 2)
    with pytest.raises(RuntimeError):
        torch.exp(torch.ones(2, device=device), out=torch.ones(2, dtype=torch.int32, device=device))


def test_many_shapes_hold_few_calls(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten is let go of, though it once was recent."""
    monkeypatch.setattr(repeat, "_MOST", 20)
    plus = repeat.repeating(lambda x: _add_one(x, 1.5))
    memory = plus.__dict__["memory"]
    for n in range(1, 101):
        for _ in range(2):
            plus(torch.zeros(n, device=device))
    assert len(memory.known) <= 20 and len(memory.recent) <= 4
    assert all(change is True for change in memory.changes), "the calls themselves are not held"


def test_subclasses_and_odd_arguments_pass_through(device: str, repeats: list[bool]) -> None:
    class Named(torch.Tensor):
        pass

    kernels.only_enable(["add", "softmax"])
    x = torch.randn(4, 8, device=device)
    for _ in range(4):
        torch.testing.assert_close((x.as_subclass(Named) + x).as_subclass(torch.Tensor), 2 * x)
    for _ in range(4):
        torch.func.functionalize(lambda z: z.softmax(-1))(x)
        torch.testing.assert_close(torch.vmap(lambda z: z.softmax(-1))(x), x.softmax(-1))
    value = torch.func.grad(lambda z: (z.softmax(-1) * x).sum())(x)
    assert value.shape == x.shape
    z = x.to_sparse()
    torch.testing.assert_close(torch.sparse.softmax(z, 1).to_dense(), x.softmax(-1))


def test_nothing_of_the_noted_call_stays_alive(device: str) -> None:
    kernels.only_enable(["mul", "sum", "max"])
    x, y = torch.randn(8, 16, device=device), torch.randn(8, 16, device=device)
    results = [result for _ in range(3) for result in (x * y, (x * y).sum(), *x.max(1))]
    alive = [weakref.ref(tensor) for tensor in (x, y, *results)]
    del x, y, results
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


def test_each_thread_notes_its_own_call(device: str) -> None:
    function, inside, done = None, threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        result = _add_one(x, x)
        if launch.current.recording is not None:
            inside.set()
            assert done.wait(30)
        return result

    function = repeat.repeating(slow)
    x = torch.ones(16, device=device)
    function(x)
    thread = threading.Thread(target=function, args=(x,))
    thread.start()
    assert inside.wait(30)
    assert launch.current.recording is None
    _add_one(x, 2.5)
    done.set()
    thread.join(30)
    assert float(function(x).sum()) == 32 and len(function.__dict__["known"]) == 1


def test_tuning_forgets(device: str, repeats: list[bool]) -> None:
    kernels.only_enable(["exp"])
    x = torch.randn(8, device=device)
    for _ in range(3):
        x.exp()
    tune.enable(False)
    x.exp()
    assert repeats == [True]


@pytest.mark.gpu
def test_graphs_record_repeated_calls(device: str, repeats: list[bool]) -> None:
    x, w = torch.randn(4, 512, device=device).bfloat16(), torch.randn(256, 512, device=device).bfloat16()
    kernels.only_enable(["mm", "exp", "softmax"])
    step = lambda: (x.exp() @ w.t()).softmax(-1)  # noqa: E731
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    kernels.disable()
    torch.testing.assert_close(result, step(), rtol=2e-2, atol=2e-2)
    assert repeats.count(True) >= 3 and not chips.capturing()


@pytest.mark.gpu
def test_products_through_descriptors_repeat(device: str, repeats: list[bool]) -> None:
    kernels.only_enable(["mm", "addmm"])
    for m, k, n in ((256, 512, 1024), (512, 256, 256), (16, 512, 1024), (48, 512, 1024)):
        repeats.clear()
        for _ in range(4):
            a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16().t()
            bias = torch.randn(n, device=device).bfloat16()
            torch.testing.assert_close((a @ b).float(), a.float() @ b.float(), rtol=2e-2, atol=0.5)
            expected = bias.float() + a.float() @ b.float()
            torch.testing.assert_close(torch.addmm(bias, a, b).float(), expected, rtol=2e-2, atol=0.5)
        assert repeats.count(True) >= 4 or m == 48, (m, k, n)
