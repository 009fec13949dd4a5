"""Random numbers: distribution, seeds, and independence of how the launch was cut."""

from __future__ import annotations

import pytest
import torch

from trireme import kernels
from trireme.kernels import chips, launch
from trireme.kernels.aten.elementwise import random

COUNT = 20001 if chips.current().interpreted else 1 << 20


def uniformity(x: torch.Tensor) -> float:
    """Kolmogorov's statistic √n · sup |F_n − F| for the uniform distribution; above 1.95 with probability 0.001."""
    ordered = x.double().sort().values
    n = x.numel()
    steps = torch.arange(n, device=x.device, dtype=torch.float64)
    return float(torch.maximum(ordered - steps / n, (steps + 1) / n - ordered).max()) * n**0.5


def test_uniform(device: str) -> None:
    x = random.rand([COUNT], device=torch.device(device))
    assert x.min() >= 0 and x.max() < 1
    assert uniformity(x) < 1.95
    lag = torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]
    assert abs(float(lag)) < 4 / COUNT**0.5


def test_normal(device: str) -> None:
    x = random.randn([COUNT], device=torch.device(device))
    assert uniformity(torch.special.ndtr(x.double())) < 1.95
    assert abs(float(x.mean())) < 4 / COUNT**0.5 and abs(float(x.var()) - 1) < 6 / COUNT**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_stay_below_one(dtype: torch.dtype, device: str) -> None:
    x = random.rand_like(torch.empty(COUNT, dtype=dtype, device=device))
    assert x.dtype is dtype and float(x.max()) < 1 and abs(float(x.float().mean()) - 0.5) < 0.02


def test_seed_decides_and_advances(device: str) -> None:
    place = torch.device(device)
    torch.manual_seed(7)
    first, second = random.rand([1001], device=place), random.rand([1001], device=place)
    torch.manual_seed(7)
    assert torch.equal(first, random.rand([1001], device=place))
    assert torch.equal(second, random.rand([1001], device=place))
    assert not torch.equal(first, second)


def test_launch_shape_does_not_matter(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    place = torch.device(device)
    torch.manual_seed(7)
    expected = random.randn([5000], device=place)
    monkeypatch.setattr(random, "_COUNTERS", 64)
    torch.manual_seed(7)
    assert torch.equal(expected, random.randn([5000], device=place))
    torch.manual_seed(7)
    assert torch.equal(expected[:777], random.randn([777], device=place))


def test_repeated_calls_draw_as_others_do(device: str) -> None:
    """What is remembered of a call is not its numbers: six calls under `use` give those of six that nobody remembers."""
    place = torch.device(device)
    x = torch.ones(3, 1003, device=device)
    own = {
        "rand": lambda: random.rand([1001], device=place),
        "randn": lambda: random.randn([1001], device=place, dtype=torch.float32),
        "rand_like": lambda: random.rand_like(x),
        "native_dropout": lambda: random.native_dropout(x, 0.25, True)[0],
    }
    torchs = {
        "rand": lambda: torch.rand([1001], device=place),
        "randn": lambda: torch.randn([1001], device=place, dtype=torch.float32),
        "rand_like": lambda: torch.rand_like(x),
        "native_dropout": lambda: torch.native_dropout(x, 0.25, True)[0],
    }
    for name, call in own.items():
        torch.manual_seed(11)
        expected = [call() for _ in range(6)]
        torch.manual_seed(11)
        with kernels.use(include=[name]):
            results = [torchs[name]() for _ in range(6)]
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result, wanted), name
        assert not torch.equal(expected[0], expected[1])
        assert name != "native_dropout" or not torch.equal(results[4], results[5])


def test_the_default_type_is_asked_again(device: str) -> None:
    with kernels.use(include=["rand", "randn"]), torch.device(device):
        try:
            for dtype in (torch.float32,) * 4 + (torch.bfloat16,) * 4 + (torch.float32, torch.float64):
                torch.set_default_dtype(dtype)
                assert torch.rand(64).dtype is dtype and torch.randn([5]).dtype is dtype
        finally:
            torch.set_default_dtype(torch.float32)


def test_the_highest_seeds_and_offsets(device: str) -> None:
    """Halves are put together again as they were."""
    for number in (0, 1, 2**31, 2**32 - 1, 2**32, 2**62 + 2**31 + 5, 2**63 - 1):
        low, high = chips._halves(number)
        assert -(2**31) <= low < 2**31 and 0 <= high < 2**31 and (high << 32) + (low & 0xFFFFFFFF) == number
    if not chips.current().interpreted:
        generator = torch.cuda.default_generators[torch.device(device).index or 0]
        for offset in (2**33 - 4, 2**35 + 4):  # its words are counted in fours
            torch.manual_seed(2**63 - 1)
            generator.set_offset(offset)
            far = random.rand([64], device=torch.device(device))
            generator.set_offset(offset)
            assert torch.equal(far, random.rand([64], device=torch.device(device)))
            generator.set_offset(offset % 2**32)
            assert not torch.equal(far, random.rand([64], device=torch.device(device)))


def test_dropout(device: str) -> None:
    x = torch.randn(COUNT, device=device)
    y, kept = random.native_dropout(x, 0.3, True)
    torch.testing.assert_close(y, torch.where(kept, x / 0.7, torch.zeros_like(x)))
    assert abs(float(kept.float().mean()) - 0.7) < 4 * (0.21 / COUNT) ** 0.5
    whole, all_kept = random.native_dropout(x, 0.3, False)
    assert torch.equal(whole, x) and bool(all_kept.all())
    assert float(random.native_dropout(x, 1.0, True)[0].abs().sum()) == 0


def test_without_numbers_nothing_is_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is recorded there are none: torch does it all, and nothing of ours stays in the graph."""
    monkeypatch.setattr(chips, "random_state", lambda count, device: None)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail("copied"))
    with pytest.raises(launch.Unsupported):
        random.native_dropout(torch.ones(4, 6, device=device).t(), 0.5, True)
    with pytest.raises(launch.Unsupported):
        random.rand([8], device=torch.device(device))
