"""How rows are seen and cut into tiles, and that every way of it folds right: side by side, short, odd, beginning anywhere."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from trireme.kernels import chips, launch
from trireme.kernels.aten import registry
from trireme.kernels.aten.folds import fold, moments
from trireme.kernels.aten.folds.cut import Lines
from trireme.kernels.aten.rowwise import softmax


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_folds", {})


def test_tiles_fit_a_chip_and_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of all sizes on a chip like Hopper: tiles that registers hold, and programs enough."""
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    sizes = (1, 3, 40, 1000, 30000, 1 << 20)
    for rows, length, itemsize, across in itertools.product(sizes, sizes, (1, 2, 4, 8), (False, True)):
        for vector in {1, 16 // itemsize}:
            lines = Lines(rows, length, itemsize, across, vector)
            cut = lines.cut()
            assert cut.M & (cut.M - 1) == cut.N & (cut.N - 1) == 0 and cut.M * cut.N <= 8192, lines
            assert cut.warps in (1, 2, 4, 8) and 1 <= cut.splits <= max(1, launch.blocks(length, cut.N)), lines
            assert cut.stages == 1 or cut.stages * cut.M * cut.N * itemsize <= chips.HOPPER.shared_memory // 2, lines
            if rows * length >= 1 << 24:
                assert 2 * launch.blocks(rows, cut.M) * cut.splits >= chips.HOPPER.multiprocessors, lines


def test_each_warp_has_its_own_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lane takes at once, 32 lanes a row: for halves 256 elements; threads alone with very many short rows side by side."""
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    cut = Lines(8192, 2304, 2, False, 8).cut()
    assert (cut.M, cut.N, cut.warps) == (4, 256, 4)
    assert Lines(8192, 4096, 2, False, 8).cut().N == 4096, "held whole where a power of two is filled"
    assert Lines(1 << 20, 20, 4, True, 4).cut().N == 1 and Lines(4096, 8192, 2, True, 8).cut().N == 128


@pytest.mark.wide
def test_rows_that_begin_anywhere_are_read_from_their_first_even_place(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The extreme among the elements before that, within, and after; rows alone and shared by several programs."""
    small = dataclasses.replace(chips.current(), fold_tile=256, multiprocessors=2)
    monkeypatch.setattr(chips, "current", lambda: small)
    for rows, length in [(3, 1099), (9, 2061), (64, 1301)]:
        x = torch.rand(rows, length, device=device)
        assert fold.fold(x, 1, False)[1].shifted
        places = torch.tensor([0, 5, 15, 16, length // 2, length - 16, length - 2, length - 1], device=device)
        for first in range(0, len(places), rows):
            y = x.clone()
            at = places[(first + torch.arange(rows, device=device)) % len(places)]
            y[torch.arange(rows, device=device), at] = 7.0
            for name, sign in (("max.dim", 1), ("min.dim", -1)):
                values, indices = registry.OPERATORS[name].function(sign * y, 1)
                assert torch.equal(indices, at) and torch.equal(values, torch.full_like(values, 7.0 * sign)), (name, rows, first)
            assert torch.equal(registry.OPERATORS["amax"].function(y, [1]), y.amax(1))
        torch.testing.assert_close(registry.OPERATORS["sum.dim_IntList"].function(x, [1]), x.sum(1), rtol=1e-5, atol=1e-5)
        x[:, 3] = float("nan")
        assert registry.OPERATORS["argmax"].function(x, 1).tolist() == [3] * rows


@pytest.mark.parametrize("length", [33, 34, 36, 40, 48])
def test_rows_that_begin_at_multiples(length: int, device: str) -> None:
    """What the compiler is told of a length holds for it: rows alone, and in a wider matrix whose stride has another divisor."""
    assert [launch.shared_by(n) for n in (33, 34, 36, 40, 48)] == [1, 2, 4, 8, 1]
    assert launch.shared_by(40, 50) == 2 and launch.shared_by(48, 64) == 1
    for wide in (length, length + 2, length + 16):
        x = torch.randn(70, wide, device=device)[:, :length]
        weight, bias = torch.randn(2, length, device=device)
        pairs = [
            (registry.OPERATORS["rms_norm"].function(x, [length], weight, 1e-5), F.rms_norm(x, [length], weight, 1e-5)),
            (
                registry.OPERATORS["native_layer_norm"].function(x, [length], weight, bias, 1e-5)[0],
                F.layer_norm(x, [length], weight, bias),
            ),
            (softmax.softmax_forward(x, 1), x.softmax(1)),
            (softmax.log_softmax_forward(x, 1), x.log_softmax(1)),
        ]
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


TURNS = [(shape, order) for shape in ((5, 6, 7), (33, 4, 5), (2, 3, 4, 5)) for order in itertools.permutations(range(len(shape)))]


@pytest.mark.parametrize("shape, order", TURNS)
def test_turned_tensors_are_read_as_they_lie(shape: tuple[int, ...], order: tuple[int, ...], device: str) -> None:
    """Whichever way dimensions lie in memory, results are torch's; along one of three dimensions, or all, nothing is copied."""
    x = torch.randn(shape, device=device).permute(order)
    for count in range(1, x.dim() + 1):
        for dims in itertools.combinations(range(x.dim()), count):
            assert (x.dim() > 3 and count == 1) or 1 < count < x.dim() or not fold.fold(x, dims, False, turn=True)[1].copied
            sums = registry.OPERATORS["sum.dim_IntList"].function(x, list(dims))
            torch.testing.assert_close(sums, x.sum(dims), rtol=1e-5, atol=1e-5)
            assert sums.is_contiguous()
    for dim in range(x.dim()):
        for name in ("max.dim", "min.dim"):
            mine, theirs = registry.OPERATORS[name].function(x, dim), getattr(x, name[:3])(dim)
            assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
        for mine, theirs in zip(registry.OPERATORS["var_mean.correction"].function(x, [dim]), torch.var_mean(x, dim), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert registry.OPERATORS["argmax"].function(x) == x.argmax()


@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "any", "all", "amax"])
@pytest.mark.parametrize("length", [257, 1000, 1024, 4099])
def test_odd_ends(name: str, length: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row longer than a tile, of which the last few elements come by themselves; the extreme is among those."""
    small = dataclasses.replace(chips.current(), fold_tile=256, multiprocessors=2)
    monkeypatch.setattr(chips, "current", lambda: small)
    for rows in (1, 3):
        x = 1 + torch.rand(rows, length + (-length) % 16, device=device)[:, :length] / 1000
        for at, value in ((length - 1, 3.0), (length - 1, 0.0), (0, 0.0)):
            x[:, at] = value
            if name in ("sum", "amax"):
                full = name + (".dim_IntList" if name == "sum" else "")
                mine, theirs = registry.OPERATORS[full].function(x, [1]), getattr(torch, name)(x.double(), 1)
            elif rows == 1:
                mine, theirs = (
                    registry.OPERATORS[name].function(x),
                    getattr(torch, name)(x if name in ("any", "all") else x.double()),
                )
            else:
                continue
            torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-4, atol=1e-4)


def test_gaps_are_not_crossings() -> None:
    from trireme.kernels.aten.elementwise.layout import plan_layout

    x = torch.empty(128, 4096)
    assert not plan_layout([x[:, ::2]], None).crossed and not plan_layout([x[:, 1:]], None).crossed
    assert plan_layout([x, torch.empty(4096, 128).t()], None).crossed
    assert not plan_layout([x, x[0]], None).crossed and not plan_layout([x, x[:, :1]], None).crossed


def test_every_kernel_knows_flat_rows(device: str) -> None:
    """Reductions, extremes, running sums and softmax along the first dimension of matrices of odd sizes, and along a middle one."""
    for shape, dim in (((5, 37), 0), ((3, 7, 11), 1), ((1, 65), 0), ((40, 3), 0), ((9, 20), 0), ((3, 9, 12), 1), ((4, 5, 8), 1)):
        x = torch.randn(shape, device=device)
        for name, theirs in (
            ("amax", torch.amax),
            ("argmax", torch.argmax),
            ("cumsum", torch.cumsum),
            ("softmax.int", torch.softmax),
        ):
            args = ([dim],) if name == "amax" else (dim,)
            torch.testing.assert_close(registry.OPERATORS[name].function(x, *args), theirs(x, dim), rtol=1e-4, atol=1e-5)
        var, mean = moments.var_mean(x, [dim], correction=0)
        torch.testing.assert_close(mean, x.mean(dim), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(var, x.var(dim, correction=0), rtol=1e-4, atol=1e-5)
        wide = x.double()
        torch.testing.assert_close(registry.OPERATORS["max.dim"].function(wide, dim), tuple(wide.max(dim)))


_KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]
_FOLDED = {
    "sum.dim_IntList": lambda x: x.double().sum(0).to(x.dtype if x.is_floating_point() else torch.int64),
    "amax": lambda x: x.amax(0), "argmax": lambda x: x.argmax(0), "prod.dim_int": lambda x: x.prod(0),
    "any.dim": lambda x: x.any(0), "all.dim": lambda x: x.all(0), "max.dim": lambda x: x.max(0)[0],
    "min.dim": lambda x: x.min(0)[0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.int16, torch.int64, torch.float32], ids=str)
def test_whether_any_or_all_are_true_is_0_or_1(dtype: torch.dtype, device: str) -> None:
    """Of bytes, which are not compared with 0 one by one, and of others; negative, with one bit, in tiles that they fill or not."""
    values = torch.tensor([0, 1, 2, 64, 128, 255, 0, 0], device=device)
    x = values[torch.randint(0, 8, (6, 64), device=device)].to(dtype)
    x[0], x[1], x[2], x[3, ::2] = 2, 0, 1, 0
    x[4] = values[5].to(dtype)
    for y in (x, x.t().contiguous().t(), x[:, :33], x[:, 1:], x.repeat(1, 40)):
        for name in ("any", "all"):
            for got, expected in (
                (registry.OPERATORS[f"{name}.dim"].function(y, 1), getattr(y, name)(1)),
                (registry.OPERATORS[f"{name}.dims"].function(y, [0]), getattr(y, name)(0)),
                (registry.OPERATORS[name].function(y), getattr(y, name)()),
            ):
                assert got.dtype is expected.dtype and torch.equal(got, expected), (name, y.shape)


_CLASSES = [  # one for each way to cut rows side by side
    ((150, 70000), 0), ((77, 20000), 0), ((300, 32768), 0), ((500, 20000), 0), ((28, 33812), 0), ((40, 70001), 0), ((9, 33364), 0),
    ((64, 77, 996), 1), ((64, 77, 999), 1), ((700, 104, 8), 1), ((600, 90, 20), 1), ((128, 300, 33), 1), ((5000, 740), 0),
    ((20000, 33), 0), ((2000, 300), 0), ((413, 2981), 0), ((60, 200, 102), 1), ((666, 600, 5), 1), ((2, 600, 6001), 1),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", _KINDS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), _CLASSES, ids=str)
def test_rows_side_by_side_of_every_cut(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randint(-3 if dtype.is_signed else 0, 4, shape, device=device).to(dtype)
    for y in (x, x[..., 1:]):
        along = y.movedim(dim, 0)
        for name, expected in _FOLDED.items():
            if name == "prod.dim_int" or (name == "argmax" and dtype is torch.bool):
                continue
            got = registry.OPERATORS[name].function(y, [dim] if name in ("sum.dim_IntList", "amax") else dim)
            got = got[0] if isinstance(got, tuple) else got
            assert torch.equal(got, expected(along)), name
        sums = registry.OPERATORS["cumsum"].function(y, dim)
        assert torch.equal(sums, y.double().cumsum(dim).to(sums.dtype))  # whole numbers, which no type rounds but at the end
        if dtype.is_floating_point:
            tight = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
            var, mean = moments.var_mean(y, [dim], correction=0)
            expected_var, expected_mean = torch.var_mean(y.double(), dim, correction=0)
            torch.testing.assert_close(mean.double(), expected_mean, **tight)
            torch.testing.assert_close(var.double(), expected_var, **tight)
            for name, theirs in (("softmax.int", torch.softmax), ("log_softmax.int", torch.log_softmax)):
                torch.testing.assert_close(registry.OPERATORS[name].function(y, dim).double(), theirs(y.double(), dim), **tight)
