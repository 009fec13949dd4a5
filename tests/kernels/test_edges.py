"""Edges that samples do not have: second derivatives, weights with gaps, autocast, truths as sums, what a type does not hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from trireme import kernels
from trireme.kernels import chips
from trireme.kernels.aten import registry
from trireme.kernels.aten.calls import repeat
from trireme.kernels.aten.elementwise.pointwise import pointwise
from trireme.kernels.aten.folds import fold, reduce
from trireme.kernels.aten.folds.cut import Cut


def _penalty(loss: Callable[..., torch.Tensor], *drawn: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a sum that has the gradient of the loss in it."""
    x, w = (tensor.clone().requires_grad_() for tensor in drawn)
    (first,) = torch.autograd.grad(loss(x, w), x, create_graph=True)
    (x.sum() + first.square().sum()).backward()
    return [grad for grad in (x.grad, w.grad) if grad is not None]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, w: x.softmax(1)[:, 0].sum(), lambda x, w: x.log_softmax(0)[:, 0].sum(),
        lambda x, w: F.rms_norm(x, (3,))[:, 0].sum(), lambda x, w: F.rms_norm(x, (3,), w).square()[:, 0].sum(),
        lambda x, w: F.cross_entropy(x, torch.tensor([0, 2, 1, 1], device=x.device)),
        lambda x, w: F.cross_entropy(x, torch.tensor([0, 2, 1, 1], device=x.device), w.detach().abs(), label_smoothing=0.1),
    ],
)  # fmt: skip
def test_gradients_of_gradients(loss: Callable[..., torch.Tensor], device: str) -> None:
    drawn = torch.randn(4, 3, device=device), torch.randn(3, device=device)
    expected = _penalty(loss, *drawn)
    with kernels.use():
        found = _penalty(loss, *drawn)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "softmax", "log_softmax"])
def test_a_gradient_is_no_part_of_a_graph(name: str, device: str) -> None:
    """Unless it is to be derived once more; it has the type of what it is the gradient of."""
    x = torch.randn(3, 8, device=device, requires_grad=True)
    calls = {
        "rms_norm": lambda x: F.rms_norm(x, (8,)),
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
    }
    for leaf in (x, x.detach().bfloat16().requires_grad_()):
        with kernels.use(include=[name]):
            calls[name](leaf).sum().backward()
        assert leaf.grad is not None and not leaf.grad.requires_grad and leaf.grad.dtype is leaf.dtype
        (expected,) = torch.autograd.grad(calls[name](leaf).sum(), leaf)
        torch.testing.assert_close(leaf.grad, expected, rtol=2e-2, atol=2e-2)


def test_weights_with_gaps(device: str) -> None:
    x, target, weight = torch.randn(6, 5, device=device), torch.randint(0, 5, (6,), device=device), torch.rand(10, device=device)
    expected = F.cross_entropy(x, target, weight[::2])
    with kernels.use():
        torch.testing.assert_close(F.cross_entropy(x, target, weight[::2]), expected)
    residual = torch.randn(6, 5, device=device)
    total = x + residual
    expected = total * (total.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight[::2]
    torch.testing.assert_close(kernels.skip_rms_norm(x, residual, weight[::2])[0], expected)


def test_cross_entropy_asks_for_autocast(device: str) -> None:
    """By whose types torch's own definition goes; also where the same call was repeated without it."""
    x, target = torch.randn(6, 5, device=device).bfloat16(), torch.randint(0, 5, (6,), device=device)
    with torch.autocast(chips.current().device_type, torch.bfloat16):
        expected = torch.ops.aten.cross_entropy_loss.default.decompose(x, target)
    with kernels.use():
        for _ in range(4):
            assert F.cross_entropy(x, target).dtype is torch.bfloat16
        with torch.autocast(chips.current().device_type, torch.bfloat16):
            assert F.cross_entropy(x, target).dtype is expected.dtype


def test_smoothing_beyond_its_range(device: str) -> None:
    x, target = torch.randn(6, 5, device=device), torch.randint(0, 5, (6,), device=device)
    for smoothing in (1.5, -0.5):
        with kernels.use(), pytest.raises(RuntimeError, match=r"label_smoothing must be between 0\.0 and 1\.0"):
            F.cross_entropy(x, target, label_smoothing=smoothing)


def test_roots_after_other_powers(device: str) -> None:
    """Whatever came before: the root of −∞ is no number, and of −0 it is −0."""
    x = torch.tensor([float("-inf"), -0.0, 4.0] + [1.0] * 13, device=device)
    with kernels.use():
        for first, then in ((0.3, 0.5), (0.5, 0.3)):
            repeat.forget()
            for _ in range(4):
                x**first
            assert str((x**0.5)[:3].tolist()) == "[nan, -0.0, 2.0]"
            torch.testing.assert_close((x**then)[2].item(), 4.0**then)


def test_sums_and_products_of_truths(device: str) -> None:
    x = torch.tensor([[1, -1], [0, 0], [2, 0]], device=device)
    with kernels.use():
        assert x.sum(1, dtype=torch.bool).tolist() == [True, False, True]
        assert x.prod(1, dtype=torch.bool).tolist() == [True, False, False]
        assert (x * 0.25).sum(1, dtype=torch.bool).tolist() == [True, False, True]


def test_what_a_type_does_not_hold(device: str) -> None:
    x = torch.tensor([1, -5, 7], dtype=torch.int32, device=device)
    with kernels.use():
        for call in (lambda: x.clamp(max=2**40), lambda: torch.where(x > 0, x, 2**40)):
            with pytest.raises(RuntimeError, match="without overflow"):
                call()
        assert x.clamp(-(2**31), 2**31 - 1).tolist() == [1, -5, 7]
        far = torch.tensor([1e5, 0.0], device=device)
        assert far.softmax(0, dtype=torch.float16).isnan().any()  # infinite in it, and cast first


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_places_where_there_is_one_element(dtype: torch.dtype, device: str) -> None:
    for x in (torch.randn(1, 9, device=device), torch.randn(5, 6, device=device)[:, 2:3], torch.randn(3, 1, 4, device=device)):
        x = x.to(dtype)
        with kernels.use():
            for _ in range(4):
                dim = x.shape.index(1)
                assert torch.equal(x.argmax(dim), torch.zeros_like(x.squeeze(dim), dtype=torch.int64))
                for found in (x.max(dim, keepdim=True), x.min(dim, keepdim=True)):
                    assert torch.equal(found.values, x) and torch.equal(found.indices, torch.zeros_like(x, dtype=torch.int64))


def test_running_sums_of_one_element(device: str) -> None:
    for dtype, into in ((torch.int32, None), (torch.bool, None), (torch.bfloat16, torch.float32), (torch.float32, torch.int64)):
        x = (torch.randn(3, 1, 5, device=device) * 4).to(dtype).transpose(0, 2)
        expected = x.cumsum(1, dtype=into)
        with kernels.use():
            for _ in range(4):
                assert torch.equal(x.cumsum(1, dtype=into), expected) and x.cumsum(-2).data_ptr() != x.data_ptr()
                assert not torch.tensor([[-0.0]], device=device).cumsum(1).signbit()


def test_places_in_tensors_without_dimensions(device: str) -> None:
    x = torch.tensor(3.0, device=device)
    with kernels.use():
        assert x.argmax(-1).item() == 0 and x.max(0)[0].item() == 3.0
        for call in (lambda: x.argmax(5), lambda: x.max(1)):
            with pytest.raises(IndexError):
                call()


def test_infinite_tolerance(device: str) -> None:
    x, y = torch.tensor([float("inf"), 1.0, float("inf")], device=device), torch.tensor([1.0, 2.0, float("inf")], device=device)
    expected = torch.isclose(x, y, atol=float("inf"))
    with kernels.use():
        assert torch.equal(torch.isclose(x, y, atol=float("inf")), expected)


def test_a_measured_cut_that_holds_whole_what_the_rule_would_not(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A class of shapes shares its cut: rows that begin anywhere, and fit a tile that was measured for shorter ones."""
    x = torch.ones(3, 1301, device=device)
    assert fold.fold(x, 1, False)[1].shifted
    monkeypatch.setattr(reduce, "best_cut", lambda name, f, start: Cut(1, 2048, 4))
    assert registry.OPERATORS["sum.dim_IntList"].function(x, [1]).tolist() == [1301.0] * 3


def _both(call: Callable[[], torch.Tensor]) -> tuple[object, object]:
    """What torch and we make of a call, or what kind of error."""

    def result() -> object:
        try:
            return call()
        except Exception as error:
            return type(error)

    expected = result()
    with kernels.use():
        return result(), expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compare", [torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge])
def test_comparisons_in_the_common_type(compare: Callable[..., torch.Tensor], dtype: torch.dtype, device: str) -> None:
    """In which a tenth is the tensor's tenth, and 1e-8 of float16 is 0."""
    x = torch.tensor([0.1, 0.0, 2048.0, -0.3], device=device, dtype=dtype).repeat(8)
    turned = x.view(4, 8).t()
    whole = torch.tensor([1, 0, 2049, -1], device=device).repeat(8)
    numbers = (0.1, 1e-8, -0.3, 2049)
    others = [y for n in numbers for y in (n, torch.tensor(n), torch.tensor(n, device=device))]
    found, expected = _both(lambda: [compare(z, y) for z in (x, turned, x[::2]) for y in others] + [compare(x, whole)])
    assert [y.tolist() for y in found] == [y.tolist() for y in expected]


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.full((2,), 2, dtype=torch.int8, device=d) ** 300, lambda d: torch.full((2,), 2, device=d) ** 2**63,
        lambda d: torch.ones(2, device=d, dtype=torch.half) ** 2**40, lambda d: torch.ones(2, device=d).half().clamp(min=2**40),
        lambda d: torch.where(torch.tensor([True, False], device=d), torch.ones(2, device=d, dtype=torch.uint8), -1),
        lambda d: torch.where(torch.tensor([True, False], device=d), torch.ones(2, device=d, dtype=torch.uint8), -256),
        lambda d: torch.where(torch.tensor([True, False], device=d), torch.ones(2, device=d).half(), 2**40),
        lambda d: torch.tensor([1, 255], device=d, dtype=torch.uint8).clamp(min=-1),
        lambda d: torch.tensor([1, 255], device=d, dtype=torch.uint8) < -1,
        lambda d: torch.tensor([True, False], device=d).clamp(min=True),
        lambda d: torch.add(*torch.tensor([[True, False], [True, True]], device=d), alpha=-1),
        lambda d: torch.add(*torch.tensor([[True, False], [True, True]], device=d), alpha=2),
        lambda d: torch.amax(torch.empty(0, device=d)), lambda d: torch.amax(torch.empty(0, 3, device=d), 0),
        lambda d: torch.empty(0, device=d).max(), lambda d: torch.empty(0, device=d).min(),
        lambda d: torch.empty(0, device=d).argmax(), lambda d: torch.empty(0, 3, device=d).max(0).values,
        lambda d: torch.ones(2, device=d) & 1, lambda d: ~torch.ones(2, device=d),
        lambda d: F.silu(torch.ones(2, device=d, dtype=torch.int32)), lambda d: F.gelu(torch.ones(2, device=d, dtype=torch.int32)),
        lambda d: torch.isclose(torch.ones(2, device=d), torch.ones(2, device=d), rtol=float("nan")),
        lambda d: torch.addmm(torch.ones(3, 5, device=d), torch.ones(3, 4, device=d), torch.ones(4, 5, device=d) / 0, alpha=0),
        lambda d: torch.addmm(torch.ones(4, device=d), torch.ones(3, 4, device=d), torch.ones(4, 5, device=d), beta=0),
        lambda d: torch.addmm(torch.ones(5, device=d).long(), torch.ones(3, 4, device=d), torch.ones(4, 5, device=d), beta=0),
        lambda d: torch.addmm(torch.ones(5, device=d) / 0, torch.ones(3, 4, device=d), torch.ones(4, 5, device=d), beta=0),
        lambda d: F.cross_entropy(torch.ones(3, device=d), torch.tensor(1, device=d), torch.ones(3, device=d).requires_grad_()),
    ],
)  # fmt: skip
def test_what_torch_refuses_or_does_at_the_ends(call: Callable[[str], torch.Tensor], device: str) -> None:
    found, expected = _both(lambda: call(device))
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found is expected


@pytest.mark.parametrize("order", [1, 2, 3, 1e3, float("inf"), float("-inf"), 0])
def test_norms_of_one_number(order: float, device: str) -> None:
    """Are its size, which a square of it would lose."""
    x = torch.tensor([[-1e20], [3e-30], [0.0], [float("nan")]], device=device)
    for call in (lambda: torch.linalg.vector_norm(x, order, dim=1), lambda: torch.linalg.vector_norm(x[0, 0], order)):
        found, expected = _both(call)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_norms_read_twice(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Rows that no tile holds, here far shorter ones; and their gradients."""
    monkeypatch.setattr(chips, "current", lambda chip=chips.current(): dataclasses.replace(chip, row_elements=1024))
    drawn = [torch.randn(shape, device=device, dtype=torch.float64) for shape in ((3, 5000), (5000,), (5000,))]
    for norm in (lambda x, w, b: F.rms_norm(x, (5000,), w, 1e-5) + b, lambda x, w, b: F.layer_norm(x, (5000,), w, b, 1e-5)):
        found, wanted = ([tensor.to(kind).detach().requires_grad_() for tensor in drawn] for kind in (torch.float32, torch.float64))
        norm(*wanted).cos().sum().backward()
        with kernels.use():
            norm(*found).cos().sum().backward()
        for mine, exact in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [24, 20000])
def test_doubles_are_normalised_with_all_digits_of_eps(length: int, device: str) -> None:
    """Which outweighs the variance of these rows, and has no float32 of its own."""
    x = 1e-4 * torch.randn(2, length, dtype=torch.float64, device=device)
    w = torch.rand(length, dtype=torch.float64, device=device)
    for eps in (1e-5, 1e-3, 0.0):
        got, mean, scale = registry.OPERATORS["native_layer_norm"].function(x, [length], w, None, eps)
        for mine, theirs in zip((got, mean, scale), torch.native_layer_norm(x, [length], w, None, eps), strict=True):
            torch.testing.assert_close(mine.view(theirs.shape), theirs, rtol=1e-12, atol=1e-15)
        got = registry.OPERATORS["rms_norm"].function(x, [length], w, eps)
        torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, [length], w, eps), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("groups", [0, 2])
def test_norms_with_weights_of_another_type(groups: int, device: str) -> None:
    """As torch has them on the host; on a GPU it has none, so that there only values are compared."""
    drawn, weight, bias = torch.randn(3, 4, device=device).bfloat16(), torch.rand(4, device=device), torch.rand(4, device=device)
    cotangent = torch.arange(12.0, device=device).view(3, 4)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        x, w, b = (tensor.clone().requires_grad_() for tensor in (drawn.to(dtype), weight, bias))
        y = F.group_norm(x, groups, w, b) if groups else F.layer_norm(x, (4,), w, b)
        if device != "cpu":
            return [y.float()]
        (y.float() * cotangent).sum().backward()
        return [y.float(), x.grad.float(), w.grad, b.grad]

    expected = results(torch.float32)
    with kernels.use():
        found = results(torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.1)


def test_dropout_lies_as_its_input(device: str) -> None:
    x = torch.randn(6, 8, device=device)
    for given in (x.t(), x[:, ::2], x.t()[::2], x.expand(2, 6, 8), x):
        with kernels.use():
            y, kept = torch.native_dropout(given, 0.4, True)
        assert y.stride() == kept.stride() == torch.empty_like(given).stride()
        torch.testing.assert_close(y, torch.where(kept, given / 0.6, 0.0))
        with kernels.use():
            y, kept = torch.native_dropout(given, 1.5, False)  # of which the probability does not count
        assert kept.stride() == torch.empty_like(given).stride() and kept.all() and torch.equal(y, given)


def test_out_shares_part_of_its_memory(device: str) -> None:
    @pointwise()
    def total(x, y):
        return x + y

    x = torch.arange(16.0, device=device)
    with pytest.raises(RuntimeError, match="shares part of its memory"):
        total(x[:-1], x[1:], out=x[1:])
    square = torch.arange(9.0, device=device).view(3, 3)
    with pytest.raises(RuntimeError, match="shares part of its memory"):
        total(square.t(), square, out=square)
    total(square.t(), square.t(), out=square.t())
    assert total(x, x, out=x).tolist() == torch.arange(0.0, 32.0, 2).tolist()
    assert total(x[:8], x[:8], out=x[8:])[0] == 0


def test_several_threads_compute(device: str) -> None:
    """Also under the interpreter, which is made for one."""
    x = torch.randn(4, 4, device=device)
    expected = torch.softmax(x + 1, 1).sum(0)
    with kernels.use(), ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: torch.softmax(x + 1, 1).sum(0), range(16)):
            torch.testing.assert_close(found, expected)
