"""Edges that samples do not have: second derivatives, weights with gaps, autocast, truths as sums, what a type does not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from trireme import kernels
from trireme.kernels import chips, fold, reduce, registry, repeat, softmax
from trireme.kernels.cut import Cut


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


def test_a_measured_cut_that_holds_whole_what_rules_would_not(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A class of shapes shares its cut: rows that begin anywhere, and fit a tile that was measured for shorter ones."""
    x = torch.ones(3, 301, device=device)
    monkeypatch.setattr(Cut, "shifted", property(lambda self: self.anywhere))
    whole = {"M": 1, "N": 512, "warps": 4, "splits": 1, "unroll": 1, "stages": 1}
    monkeypatch.setattr(reduce, "best_cut", lambda name, f, start, default: f.cut.by(whole))
    assert registry.OPERATORS["sum.dim_IntList"].function(x, [1]).tolist() == [301.0] * 3


def test_what_32_bits_do_not_count() -> None:
    meta = torch.empty(715827882, 3, dtype=torch.int8, device="meta")
    assert not fold.fold(meta, [0], False)[1].cut.narrow
    long = fold.fold(torch.empty(8388609, 32, dtype=torch.bfloat16, device="meta"), 0, True)[1]
    assert not softmax._near(long)
