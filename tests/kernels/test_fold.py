"""How reductions cut their tiles on a chip, and what that gives: rows that lie beside each other, many short ones, odd lengths."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trireme import kernels
from trireme.kernels import chips, launch
from trireme.kernels.aten import registry
from trireme.kernels.aten.folds import fold, line_cuts, reduce, scan
from trireme.kernels.aten.folds.cut import Cut, Way
from trireme.kernels.aten.rowwise import softmax


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "_folds", {})


def seen(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32) -> fold.Fold:
    fold._folds.clear()  # what is remembered was cut for another chip
    return fold.fold(torch.empty(shape, device="meta", dtype=dtype), dim, False)[1]


def cut(shape: tuple[int, ...], dim: int, dtype: torch.dtype = torch.float32) -> Cut:
    return seen(shape, dim, dtype).cut


def test_tiles_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    assert not cut((4096, 4096), 1).across and cut((4096, 4096), 0).across
    assert cut((4096, 4096), 0).tile == (32, 128)
    turned = torch.empty(4096, 4096, device="meta").t()
    found = fold.fold(turned, 1, False)[1].cut
    assert turned.stride() == (1, 4096) and found.across and found.tile == (32, 128)


def test_rows_of_one_block_need_no_division(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    assert seen((513, 2049), 0).numbered == (1, 1, 0, 2049)
    assert seen((64, 77, 999), 1).numbered == (999, 77 * 999, 1, 999)


def test_many_short_rows_are_folded_by_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for shape, dim, rows in (((7, 300000), 0, 256), ((16, 16, 16384), 1, 256), ((1, 1 << 20), 0, 2048), ((1 << 20, 1), 1, 2048)):
        f = cut(shape, dim)
        assert f.wide and f.splits == 1 and f.tile == (rows, 1), shape
    assert cut((13, 883790), 0).tile == (256, 1) and cut((13, 88379), 0).tile == (128, 1)  # single elements
    assert [cut((length, 300000), 0).unroll for length in (3, 16, 17, 18, 48)] == [3, 16, 9, 9, 8]
    assert not cut((65, 300000), 0).wide and cut((64, 300000), 0, torch.bfloat16).wide and not cut((7, 3000), 0).wide
    assert cut((56, 143872), 0, torch.bfloat16).wide and not cut((56, 143871), 0, torch.bfloat16).wide


def test_few_warps_meet_for_each_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for length, rows, dtype, columns in (
        (150, 140000, torch.bfloat16, 8), (150, 140000, torch.uint8, 8), (77, 20000, torch.float32, 16),
        (90, 120000, torch.float32, 8), (100, 120000, torch.float32, 16), (400, 70000, torch.float32, 16),
        (200, 120000, torch.float32, 16),
        (200, 140000, torch.float32, 8),
    ):  # fmt: skip
        assert cut((length, rows), 0, dtype).tile == (64, columns) and cut((length, rows), 0, dtype).warps == 2, (length, rows)
    assert cut((148, 62444), 0).stages == 1 and cut((148, 62448), 0).stages == cut((300, 50008), 0).stages == 3
    assert cut((64, 20001), 0).splits == 1 and cut((16384, 40, 2), 1).tile == (64, 8)
    assert cut((4630, 382, 16), 1).tile == (16, 64) and cut((4630, 382, 32), 1).tile == (32, 32)
    assert cut((273, 56, 527), 1, torch.float16).warps == 2 and cut((64, 77, 999), 1, torch.float64).warps == 2


def test_even_rows_that_do_not_fill_a_tile_have_warps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    half = torch.bfloat16
    for rows, length, tile in ((7281, 2304, (4, 256)), (4096, 1280, (4, 256)), (13107, 1280, (16, 64)), (52428, 320, (32, 32))):
        assert (cut((rows, length), 1, half).tile, cut((rows, length), 1, half).splits) == (tile, 1)
    for rows, length, dtype in ((8192, 4096, half), (8288, 2155, half), (1000, 2304, half), (4096, 3584, torch.uint8),
                                (30393, 1104, torch.float32), (7281, 2304, torch.float64), (9000, 128, half)):  # fmt: skip
        assert cut((rows, length), 1, dtype).apiece is None, (rows, length)


@pytest.mark.parametrize("tile", [(4, 256, 4), (16, 64, 4), (32, 32, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool], ids=str)
def test_rows_by_warps_of_their_own(tile: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """As long as lines are even, and of views that end within one."""
    monkeypatch.setattr(Cut, "apiece", property(lambda self: Way(*tile, unroll=2)))
    folds: list[Any] = [torch.any, torch.all, torch.amax, torch.argmax, torch.sum, torch.var_mean]
    full = torch.rand(37, 624, device=device) * 4 - 2
    full[3], full[5, 600], full[7, 2] = 0, 9, -9
    for length in (624, 619, 288):
        x = full.to(dtype)[:, :length]
        for call in folds[: 3 if dtype is torch.bool else None]:
            expected = call(x.double() if dtype is torch.bfloat16 and call is not torch.argmax else x, 1)
            with kernels.use():
                found = call(x, 1)
            loose = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(found, expected, check_dtype=False, **loose)


def test_what_divides_lines_is_told_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    lined_up = seen((40, 302780), 0, torch.bfloat16)
    assert (lined_up.of, lined_up.even) == (4, True)
    assert [seen((length, 740), 0).of for length in (300, 12919)] == [4, 4] and not seen((12919, 740), 0).even
    assert (seen((981, 2728), 0, torch.uint8).of, seen((40, 302781), 0).of, seen((64, 50258), 0, torch.float64).of) == (1, 1, 1)
    assert seen((6655, 748, 6), 1, torch.float16).of == 2 and seen((4096, 100), 1).of == 1 and seen((64, 4096), 0).of == 1


@pytest.mark.parametrize("shape", [(3, 150, 22), (2, 150, 33), (4, 300, 6), (7, 3, 5), (2, 40, 63), (1, 1, 3)], ids=str)
def test_matrices_of_few_columns_are_read_in_lines(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Those that begin anywhere, with gaps between them or none, turned, shared by programs or not."""
    assert line_cuts.pays(cut((128, 1024, 33), 1)) and not line_cuts.pays(cut((128, 1024, 33), 1, torch.float64))
    assert seen((2000, 3000, 5), 1, torch.float64).in_lines
    for other in ((128, 1024, 48), (128, 1024, 65), (128, 10, 33)):
        assert not line_cuts.pays(cut(other, 1)), other
    monkeypatch.setattr(line_cuts, "pays", lambda cut: cut.matrix)
    fold._folds.clear()
    high = (shape[0], shape[1] + 3, shape[2])
    plain, gaps = torch.randn(shape, device=device), torch.randn(high, device=device)[:, 1 : shape[1] + 1]
    for x in (plain, plain.transpose(0, 2).contiguous().transpose(0, 2), gaps.bfloat16()):
        total = registry.OPERATORS["sum.dim_IntList"].function(x, [1])
        assert total.is_contiguous() and total.dtype is x.dtype
        torch.testing.assert_close(total.double(), x.double().sum(1), rtol=1e-2 if x.dtype is torch.bfloat16 else 1e-4, atol=1e-3)
        assert torch.equal(registry.OPERATORS["all.dim"].function(x > -2.5, 1), (x > -2.5).all(1))


def test_results_far_apart_are_put_where_they_belong(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(fold, "_SCATTERED", 4)
    x = torch.randn(30, 3, 8, device=device).transpose(0, 2)
    assert fold.fold(x, [1], False, turn=True)[1].scattered
    for name, dims, expected in (("sum.dim_IntList", [1], x.sum(1)), ("any.dims", [1], (x > 1).any(1))):
        got = registry.OPERATORS[name].function(x if expected.dtype is torch.float32 else x > 1, dims)
        torch.testing.assert_close(got, expected)
        assert got.is_contiguous()
    kept = registry.OPERATORS["mean.dim"].function(x, [1], True)
    torch.testing.assert_close(kept, x.mean(1, keepdim=True))
    for name, keep in itertools.product(("max.dim", "min.dim"), (False, True)):
        found, expected = registry.OPERATORS[name].function(x, 1, keep), getattr(x, name[:3])(1, keep)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), (name, keep)
    assert torch.equal(registry.OPERATORS["argmax"].function(x, 1), x.argmax(1))
    for found, expected in zip(reduce.var_mean(x, [1], keepdim=True), torch.var_mean(x, 1, keepdim=True), strict=True):
        torch.testing.assert_close(found, expected)


def test_running_sums_have_a_thread_for_each_row_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for shape, dim, itemsize, expected in (
        ((64, 77, 1008), 1, 4, (64, 16, 2)), ((16, 300, 2048), 1, 4, (32, 32, 1)), ((8, 151936), 0, 4, (256, 8, 2)),
        ((5, 400001), 0, 4, (512, 8, 4)), ((8192, 4096), 1, 4, (1, 4096, 4)), ((3776, 4847), 1, 8, (1, 1024, 4)),
        ((100000, 33), 1, 4, (16, 64, 1)), ((100000, 33), 1, 8, (8, 64, 1)), ((1 << 19, 4), 1, 4, (64, 4, 4)),
        ((8192, 4096), 0, 4, (64, 64, 4)), ((9, 380251), 0, 4, (128, 4, 2)),
    ):  # fmt: skip
        assert scan._cut(seen(shape, dim), itemsize, 0) == expected, shape
    for length, columns, expected in ((41, 189780, (64, 16, 2)), (41, 189776, (64, 16, 2)), (20, 300000, (128, 4, 2))):
        assert scan._cut(seen((length, columns), 0, torch.uint8), 8, 2) == expected, columns  # sums wider than elements
    assert scan._cut(seen((41, 60000), 0, torch.int64), 8, 2) == (128, 8, 2)  # and not
    odd = seen((38, 8, 11331), 1, torch.int64)
    assert scan._cut(odd, 8, 2) == (128, 8, 4) and scan._cut(odd, 8, 1) == (512, 8, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(700, 45, 3), (1400, 60, 2), (1200, 14, 13), (300, 900, 3), (2100, 6, 15)], ids=str)
def test_running_sums_down_small_matrices(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Tiles hold several matrices, the last of them not all; one that is a part of a wider tensor, or repeats itself, too."""
    start, starts = scan._scan_matrices, list[Any]()
    monkeypatch.setattr(scan, "_scan_matrices", lambda grid, *args, **how: starts.append(grid) or start(grid, *args, **how))
    matrices, length, columns = shape
    if not dtype.is_floating_point and length > 60:
        pytest.skip("too long for whole numbers")
    if chips.current().interpreted:
        matrices //= 50
    x = (torch.randn(matrices, length, columns, device=device) * 5).abs().to(dtype)
    if dtype.is_floating_point:
        x[:, 0, 1] = -0.0
    for y in (x, x[1:], x[::2], x[:, 1:], x[:1].expand(matrices, -1, -1)):
        got = registry.OPERATORS["cumsum"].function(y, 1)
        if dtype.is_floating_point:
            assert not torch.signbit(got[:, 0]).any()  # 0 − 0 is 0
            near = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
            torch.testing.assert_close(got.double(), y.double().cumsum(1), rtol=near, atol=near)
        else:
            assert torch.equal(got, y.cumsum(1))
    assert len(starts) == 5


@pytest.mark.parametrize("columns", [2, 3, 5, 12, 15, 33])
def test_a_matrix_of_few_columns_is_read_in_lines(columns: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    assert seen((1 << 21, columns), 0).in_lines and not seen((columns, 1 << 21), 1).in_lines and not seen((1 << 21, 16), 0).in_lines
    monkeypatch.setattr(line_cuts, "pays", lambda cut: True)
    fold._folds.clear()
    interpreted = chips.current().interpreted  # for which many columns are many steps
    x = torch.randn(3001 if interpreted and columns > 3 else 20001, columns, device=device)
    double = x.double()
    torch.testing.assert_close(registry.OPERATORS["sum.dim_IntList"].function(x, [0]).double(), double.sum(0), rtol=1e-5, atol=1e-3)
    if interpreted and columns > 5:
        return
    for name, dims, expected in (
        ("mean.dim", [0], double.mean(0)), ("amax", [0], double.amax(0)), ("prod.dim_int", 0, double.prod(0)),
    ):  # fmt: skip
        torch.testing.assert_close(registry.OPERATORS[name].function(x, dims).double(), expected, rtol=1e-5, atol=1e-3)
    for order in (0.5, 1, 2, float("inf")):
        norm = registry.OPERATORS["linalg_vector_norm"].function(x, order, [0])
        torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(double, order, 0), rtol=1e-5, atol=1e-3)
    whole = (x * 1000).long()
    assert torch.equal(registry.OPERATORS["sum.dim_IntList"].function(whole, [0]), whole.sum(0))
    assert torch.equal(registry.OPERATORS["any.dim"].function(x > 3.5, 0), (x > 3.5).any(0))


VALUE_CUTS: list[tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]] = [
    ((2621, 120, 20), torch.float64, (64, 8, 2, 1, 4, 1)),
    ((1398, 225, 20), torch.int64, (32, 16, 4, 1, 4, 1)),
    ((685, 348, 26), torch.int64, (32, 32, 4, 1, 2, 1)),
    ((592, 400, 26), torch.float64, (32, 32, 4, 1, 4, 1)),
    ((700, 440, 20), torch.int64, (16, 32, 4, 1, 4, 1)),
    ((390, 470, 50), torch.int64, (32, 32, 4, 1, 2, 1)),
    ((449, 700, 20), torch.int64, (16, 64, 4, 1, 2, 1)),
    ((139, 2500, 18), torch.float64, (8, 128, 4, 1, 2, 1)),
    ((194, 1889, 33), torch.float64, (16, 64, 4, 1, 2, 1)),
    ((1966, 100, 8), torch.float64, (16, 32, 2, 1, 2, 1)),
    ((655, 300, 8), torch.int64, (8, 64, 2, 1, 2, 1)),
    ((97, 560, 24), torch.float64, (8, 128, 4, 1, 2, 1)),
    ((1, 100, 40000), torch.float64, (32, 8, 2, 1, 1, 3)),
    ((65, 300, 322), torch.int64, (32, 32, 4, 1, 2, 1)),
    ((16, 6000, 65), torch.int64, (16, 64, 4, 8, 4, 1)),
    ((16, 1500, 131), torch.float64, (16, 64, 4, 4, 2, 1)),
    ((135, 700, 65), torch.int64, (32, 64, 4, 1, 1, 1)),
    ((7561, 64, 13), torch.float64, (128, 8, 4, 1, 2, 1)),
    ((4183, 1504, 1), torch.float64, (2, 256, 4, 1, 2, 1)),
    ((2000, 3008, 1), torch.int64, (1, 512, 4, 1, 2, 1)),
    ((9000, 4, 13), torch.float32, (256, 4, 4, 1, 1, 1)),
    ((1871, 7, 401), torch.float32, (128, 8, 4, 1, 1, 1)),
    ((20971, 20, 3), torch.int32, (128, 8, 4, 1, 2, 1)),
    ((104857, 20, 6), torch.float32, (256, 4, 4, 1, 2, 1)),
    ((2827, 54, 54), torch.float32, (256, 4, 4, 1, 2, 1)),
    ((9999, 5, 6), torch.int32, (256, 8, 4, 1, 1, 1)),
    ((8366, 1504, 1), torch.float32, (4, 128, 4, 1, 4, 1)),
    ((196, 439, 17), torch.float32, (16, 64, 4, 1, 2, 1)),
    ((151, 253, 93), torch.int32, (32, 32, 4, 1, 2, 1)),
    ((6160, 200, 10), torch.float32, (64, 8, 2, 1, 4, 1)),
    ((8656, 137, 20), torch.float32, (32, 16, 4, 1, 4, 1)),
    ((379, 250, 130), torch.float32, (64, 8, 2, 1, 4, 1)),
    ((493, 250, 100), torch.float32, (32, 32, 4, 1, 2, 1)),
    ((36961, 31, 8), torch.int32, (64, 16, 2, 1, 2, 1)),
    ((1857, 345, 3), torch.bfloat16, (16, 64, 4, 1, 2, 1)),
    ((9500, 180, 6), torch.float16, (16, 32, 4, 1, 4, 1)),
    ((1198, 250, 35), torch.bfloat16, (64, 16, 2, 1, 2, 1)),
    ((5000, 70, 70), torch.bfloat16, (256, 4, 4, 1, 4, 1)),
    ((1, 2000, 24000), torch.bfloat16, (64, 16, 2, 4, 1, 3)),
    ((1, 6000, 32016), torch.bfloat16, (64, 16, 2, 4, 1, 3)),
    ((1, 2000, 50000), torch.float16, (64, 16, 2, 2, 1, 3)),
    ((1, 6000, 20008), torch.bfloat16, (64, 32, 4, 3, 1, 1)),
    ((9000, 12, 66), torch.uint8, (128, 16, 4, 1, 1, 1)),
    ((541, 355, 17), torch.uint8, (16, 32, 4, 1, 4, 1)),
    ((3146, 200, 10), torch.uint8, (32, 16, 4, 1, 4, 1)),
    ((9656, 83, 34), torch.uint8, (64, 8, 2, 1, 4, 1)),
]


@pytest.mark.parametrize("shape, dtype, choice", VALUE_CUTS, ids=str)
def test_folds_to_a_value_have_cuts_of_their_own(
    shape: tuple[int, ...], dtype: torch.dtype, choice: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    found = seen(shape, 1, dtype)
    assert tuple(found.of_values.values()) == choice


@pytest.mark.gpu
@pytest.mark.parametrize("shape, dtype, choice", VALUE_CUTS, ids=str)
def test_cuts_of_their_own_fold_right(shape: tuple[int, ...], dtype: torch.dtype, choice: tuple[int, ...], device: str) -> None:
    if dtype.is_floating_point:
        x = torch.randn(shape, device=device).to(dtype)
    else:
        x = torch.randint(0, 100, shape, device=device, dtype=dtype)
    at = torch.randint(0, shape[1], (shape[0], 1, shape[2]), device=device)  # what decides may stand anywhere
    x.scatter_(1, at, 111)
    assert bool((registry.OPERATORS["amax"].function(x, [1]) == 111).all())
    double = x.double()
    exact = {"rtol": 1e-2, "atol": 0.5} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-2}
    torch.testing.assert_close(registry.OPERATORS["sum.dim_IntList"].function(x, [1]).double(), double.sum(1), **exact)
    assert torch.equal(registry.OPERATORS["any.dim"].function(x == 111, 1), (x == 111).any(1))


def test_extremes_that_torch_finds_faster_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for shape, dtype in (((315, 20001), torch.float64), ((38427, 40, 7), torch.float32)):
        fold._folds.clear()
        with pytest.raises(launch.Unsupported):
            registry.OPERATORS["amax"].function(torch.empty(shape, dtype=dtype, device="meta"), [1])
        assert not reduce._is_torchs(reduce.SUM, seen(shape, 1, dtype))
    for shape, dtype in (
        ((315, 20000), torch.float64), ((315, 20001), torch.float32), ((500, 12001), torch.float64),
        ((38427, 40, 7), torch.float16), ((38427, 40, 9), torch.float32), ((60000, 40, 7), torch.float32),
        ((9000, 40, 7), torch.float32),
    ):  # fmt: skip
        assert not reduce._is_torchs(reduce.MAX, seen(shape, 1, dtype)), shape


@pytest.mark.gpu
def test_what_is_left_to_torch_is_right(device: str) -> None:
    for x in (torch.randn(315, 20001, dtype=torch.float64, device=device), torch.randn(38427, 40, 7, device=device)):
        expected = x.amax(1)
        with kernels.use():
            assert torch.equal(x.amax(1), expected)


def test_a_few_columns_of_eight_bytes_come_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    lines = (((1398, 2250, 2), (512, 4)), ((196, 3500, 9), (512, 8)), ((449, 933, 15), (512, 8)), ((9, 9000, 15), (1024, 8)),
             ((389, 508, 31), (512, 8)))  # fmt: skip
    for shape, line in lines:
        found = seen(shape, 1, torch.int64)
        assert found.in_lines == line and not found.of_values, shape
    assert not seen((4000, 60, 12), 1, torch.float64).of_values  # which a tile holds whole


def test_copies_ahead_only_of_whole_lines_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    long = [((32, 50257), 1, 3), ((64, 50257), 1, 1), ((64, 50256), 1, 3)]
    for shape, dim, stages in [((512, 2048), 0, 3), ((513, 2049), 0, 1), *long]:
        assert cut(shape, dim).stages == stages, shape
    assert cut((8, 1 << 18), 0).stages == 1  # each thread goes through its own rows
    types = (torch.bool, torch.bfloat16, torch.float32, torch.float64)
    assert [cut((512, 4096), 0, dtype).stages for dtype in types] == [3, 3, 3, 3]
    monkeypatch.setattr(chips, "current", lambda: dataclasses.replace(chips.GENERIC, shared_memory=32768))
    assert [cut((512, 1024), 0, dtype).stages for dtype in types] == [3, 3, 1, 1]


def test_few_programs_share_rows_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are processors, if that fills them."""
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for shape in ((32768, 64), (65536, 32), (8192, 256), (4096, 1024)):
        f = cut(shape, 0)
        programs = -(-f.rows // f.tile[0]) * -(-f.length // f.part)
        assert 0.9 * chips.HOPPER.multiprocessors <= programs <= chips.HOPPER.multiprocessors, shape
    assert cut((8192, 4096), 0).splits == 2 and cut((8192, 3000), 0).splits > 2  # 94 tiles side by side, which 132 do not divide


def test_tiles_of_long_rows_leave_little_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for length in (4097, 5120, 6144, 9000, 151936):
        n = cut((2048, length), 1).tile[1]
        assert -(-length // n) * n <= 1.26 * length
    assert cut((2048, 151936), 1).tile == (1, 4096) and cut((2048, 5120), 1).tile == (1, 1024)


def test_a_warp_folds_odd_short_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    assert cut((100000, 33), 1).odd and cut((100000, 33), 1).warps == 1 and cut((100000, 100), 1).tile == (16, 32)
    assert not cut((100000, 64), 1).odd and not cut((100000, 17), 1).odd and not cut((100, 33), 1).odd


def test_rows_that_begin_anywhere_are_read_from_their_first_even_place(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The extreme among the elements before that, within, and after; rows alone and shared by several programs."""
    small = dataclasses.replace(chips.current(), fold_tile=256, multiprocessors=2)
    monkeypatch.setattr(chips, "current", lambda: small)
    shapes = [(3, 517, 1), (9, 301, 1), (64, 301, 4), (64, 4099, 8)]
    more = [] if small.interpreted else [(3, 1003, 1), (9, 517, 1), (40, 300, 1), (66, 517, 4)]
    for rows, length, together in [*shapes, *more]:
        x = torch.rand(rows, length, device=device)
        assert (found := fold.fold(x, 1, False)[1].cut).shifted and found.tile[0] == together
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


@pytest.mark.parametrize("processors", [1, 100])
def test_softmax_of_long_rows_that_begin_anywhere(processors: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Rows alone and shared; what decides stands before the first even place, after the last, nowhere (−∞), or is no number."""
    small = dataclasses.replace(chips.current(), multiprocessors=processors, row_elements=256, fold_tile=256)
    monkeypatch.setattr(chips, "current", lambda: small)
    for length, dtype in ((515, torch.float32), (1003, torch.bfloat16), (1003, torch.float64)):
        x = torch.randn(5, length, device=device).to(dtype)
        x[0, -1], x[1, 0], x[2, :20], x[3], x[4, 2] = 40, 30, -torch.inf, -torch.inf, torch.nan
        loose = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        for name, theirs in (("softmax.int", torch.softmax), ("log_softmax.int", torch.log_softmax)):
            mine = registry.OPERATORS[name].function(x, 1).double()
            torch.testing.assert_close(mine, theirs(x.double(), 1), equal_nan=True, **loose)


F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
PIECES: list[tuple[int, int, torch.dtype, tuple[int, int, int, bool] | None]] = [
    (2050, 100, F32, (16, 32, 8, False)),
    (2050, 139, BF16, (8, 32, 4, False)),
    (2050, 301, BF16, (4, 32, 4, False)),
    (2050, 701, BF16, (4, 32, 4, False)),
    (2050, 701, F32, None),
    (2049, 304, F32, (8, 64, 4, False)),
    (2049, 201, F64, (4, 32, 4, False)),
    (2049, 301, F64, (2, 32, 2, False)),
    (2049, 451, F64, (1, 64, 2, False)),
    (2049, 700, F64, (1, 128, 4, False)),
    (2049, 600, F16, (4, 64, 4, False)),
    (5, 1501, BF16, (1, 512, 4, True)),
    (5, 1501, F32, (1, 512, 4, False)),
    (3, 4101, F64, (1, 1024, 16, True)),
    (3, 12001, F16, (1, 2048, 8, True)),
    (2, 9600, F32, (1, 1024, 8, False)),
    (3, 4096, BF16, None),
    (100, 40, F32, None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_softmax_down_narrow_matrices(dtype: torch.dtype, device: str) -> None:
    """Lines hold whole rows of a matrix; the first and the last have ends, and a matrix may begin within one."""
    exact = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    for shape in ((3, 300, 5), (2, 257, 3), (700, 2), (2, 270, 31), (2, 264, 16)):
        x = torch.randn(shape, device=device).to(dtype) * 3
        x.view(-1)[7], x.view(-1)[-1] = float("-inf"), 60.0
        dim = x.dim() - 2
        found = fold.fold(x, dim, True)[1]
        assert softmax._narrow(found, found)
        for mine, theirs in ((softmax.softmax_forward, torch.softmax), (softmax.log_softmax_forward, torch.log_softmax)):
            torch.testing.assert_close(mine(x, dim).double(), theirs(x.double(), dim), rtol=exact, atol=exact)
    x = torch.randn(3, 300, 5, device=device).to(dtype)
    x[0, 3, 2], x[1, :, 4], x[2, 5, 0] = float("nan"), float("-inf"), float("inf")
    loose = {"rtol": exact, "atol": exact, "equal_nan": True}
    torch.testing.assert_close(softmax.softmax_forward(x, 1).double(), x.double().softmax(1), **loose)
    torch.testing.assert_close(softmax.log_softmax_forward(x, 1).double(), x.double().log_softmax(1), **loose)


def test_which_matrices_are_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)

    def narrow(*shape: int) -> bool:
        found = seen(shape, 1)
        return softmax._narrow(found, found)

    assert narrow(2555, 1458, 5) and narrow(70, 2000, 13) and narrow(200, 6000, 5)
    assert not narrow(100, 6000, 5)  # too few long ones: turned
    assert not narrow(2555, 256, 5) and not narrow(2555, 1458, 32) and not narrow(2555, 1458, 1)


@pytest.mark.parametrize("rows, length, dtype, cut", PIECES)
def test_softmax_of_rows_in_pieces(
    rows: int, length: int, dtype: torch.dtype, cut: Any, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Rows that would leave much of a tile empty, whichever element of them decides."""
    small = dataclasses.replace(chips.current(), fold_tile=256)
    monkeypatch.setattr(chips, "current", lambda: small)
    found = fold.fold(torch.empty(rows, length, dtype=dtype, device="meta"), 1, True)[1]
    assert softmax._pieces(found, found, dtype is F64) == cut
    monkeypatch.setattr(softmax, "_pieces", lambda f, g, double: cut)
    rows = min(rows, 35) if chips.current().interpreted else rows
    x = torch.randn(max(rows, 5), length, device=device).to(dtype)
    x[0, -1], x[1, 0], x[2, :20], x[3], x[4, 2] = 40, 30, -torch.inf, -torch.inf, torch.nan
    loose = {"rtol": 1e-12, "atol": 1e-14} if dtype is F64 else {"rtol": 1e-5, "atol": 1e-5}
    loose = {"rtol": 2e-2, "atol": 5e-2} if dtype in (BF16, F16) else loose
    for mine, theirs in ((softmax.softmax_forward, torch.softmax), (softmax.log_softmax_forward, torch.log_softmax)):
        for y in (x[-rows:], x[:rows]):
            torch.testing.assert_close(mine(y, 1).double(), theirs(y.double(), 1), equal_nan=True, **loose)
    # Beside a large maximum the logarithm of a sum must not vanish.
    far = (torch.randn(min(rows, 9), length, device=device) + 2000).to(dtype)
    torch.testing.assert_close(softmax.log_softmax_forward(far, 1).double(), far.double().log_softmax(1), **loose)


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
        var, mean = reduce.var_mean(x, [dim], correction=0)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.uint8], ids=str)
def test_lines_that_begin_at_pairs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Of many long rows a thread takes two at once, or four, where no more begin together."""
    monkeypatch.setattr(fold, "MANY", 64)
    columns = 66 if dtype.itemsize > 1 else 68
    x = torch.randint(0, 4, (259, columns), device=device).to(dtype)
    found = seen(tuple(x.shape), 0, dtype)
    assert found.paired and found.of == columns % 64 and found.cut.tile == (64, 32) and found.cut.bare
    for name in ("sum.dim_IntList", "amax", "max.dim", "min.dim"):
        got = registry.OPERATORS[name].function(x, [0] if name in ("sum.dim_IntList", "amax") else 0)
        assert torch.equal(got[0] if isinstance(got, tuple) else got, _FOLDED[name](x)), name


@pytest.mark.parametrize("dtype", _KINDS, ids=str)
def test_uneven_rows_side_by_side_read_one_by_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """What is read where there is nothing changes no fold, whatever is folded."""
    assert cut((71, 1031), 0, dtype).bare
    monkeypatch.setattr(Cut, "way", Way(64, 16, 4, unroll=2))  # for fewer, too
    x = torch.randint(-3 if dtype.is_signed else 0, 4, (23, 67), device=device).to(dtype)
    assert cut((23, 67), 0, dtype).bare
    for name, expected in _FOLDED.items():
        if dtype is torch.bool and name == "argmax":
            continue
        dims = [0] if name in ("sum.dim_IntList", "amax") else 0
        for y in (x, x.clamp(max=-1) if dtype.is_signed else x, x.clamp(min=1)):  # nothing, or only what is masked, is 0
            got = registry.OPERATORS[name].function(y, dims)
            got = got[0] if isinstance(got, tuple) else got
            if name == "prod.dim_int" and dtype.is_floating_point:
                torch.testing.assert_close(got.double(), y.double().prod(0), rtol=1e-2, atol=0)
            else:
                assert torch.equal(got, expected(y)), (name, y)
    for order in (0, 0.5, 1, 2, float("inf"), float("-inf")) if dtype.is_floating_point else ():
        if order != 0.5 or dtype is not torch.float64:
            norm = registry.OPERATORS["linalg_vector_norm"].function(x + 5, order, [0])
            torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(x.double() + 5, order, 0), rtol=1e-2, atol=0)


def test_odd_lines_end_where_they_do(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """In tiles of 64, where kernels are told a length one too large, next to matrices whose numbers would show."""
    monkeypatch.setattr(fold.Fold, "of_values", {"M": 64, "N": 16, "warps": 4, "splits": 1, "unroll": 2, "stages": 1})
    fold._folds.clear()
    for shape in ((3, 32, 71), (2, 48, 65), (2, 33, 71), (64, 67)):
        x = torch.randint(-9, 9, shape, device=device, dtype=torch.int32)
        lines = fold.fold(x, [-2], False, turn=True)[1]
        assert not lines.even and lines.cut.by(lines.of_values).bare
        assert torch.equal(registry.OPERATORS["sum.dim_IntList"].function(x, [-2]), x.sum(-2)), shape
        assert torch.equal(registry.OPERATORS["amax"].function(x, [-2]), x.amax(-2)), shape


def test_short_rows_in_lines_of_pairs_are_held_whole(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """By folds to a value, of two bytes; what is read beside a row that does not fill its tile changes nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(chips, "current", lambda: chips.HOPPER)
        held = {(8, 26): (256, 8, 4), (16, 26): (128, 16, 2), (9, 27): (128, 16, 4), (24, 26): (256, 4, 4), (32, 50): (64, 32, 2)}
        held |= {(7, 27): (256, 8, 4), (24, 27): (128, 8, 4)}
        for (length, columns), tile in held.items():
            choice = seen((40000, length, columns), 1, torch.float16).of_values
            assert tuple(choice[name] for name in ("M", "N", "warps")) == tile, (length, columns)
        held = seen((30000, 60, 16), 1, torch.bfloat16).of_values
        assert (held["M"], held["N"]) == (32, 64) and not seen((60, 480000), 0, torch.bfloat16).of_values
        for length, columns in ((4, 26), (4, 27), (16, 28), (16, 24), (16, 32), (33, 26)):
            assert not seen((40000, length, columns), 1, torch.float16).of_values, (length, columns)
        assert not seen((40000, 16, 26), 1).of_values and not seen((4, 16, 26), 1, torch.float16).of_values
    monkeypatch.setattr(fold.Fold, "of_values", {"M": 128, "N": 16, "warps": 2, "splits": 1, "unroll": 1, "stages": 1})
    x = torch.randint(1, 4, (9, 12, 26), device=device).half()
    fold._folds.clear()
    for name, expected in (("sum.dim_IntList", (-x).sum(1)), ("amax", (-x).amax(1))):
        assert torch.equal(registry.OPERATORS[name].function(-x, [1]), expected), name
    assert torch.equal(registry.OPERATORS["prod.dim_int"].function(x.int(), 1), x.int().prod(1))
    for order in (0, 1, 2, float("inf"), float("-inf")):
        norm = registry.OPERATORS["linalg_vector_norm"].function(x, order, [1])
        torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(x.double(), order, 1), rtol=1e-3, atol=0)


def test_bytes_in_lines_of_pairs_come_in_pairs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(chips, "current", lambda: chips.HOPPER)
        for shape, tile in (
            ((2000, 80, 130), (256, 8, 4, 1)), ((100, 24, 5002), (256, 8, 4, 1)), ((4, 896, 9978), (64, 32, 4, 1)),
            ((60, 200, 102), (16, 32, 4, 1)), ((1, 3000, 5002), (32, 64, 4, 3)),
        ):  # fmt: skip
            choice = seen(shape, 1, torch.uint8).of_values
            assert tuple(choice[name] for name in ("M", "N", "warps", "splits")) == tile, shape
            assert seen(shape, 1, torch.uint8).of == 2, shape
        for shape in (
            (4, 896, 9977),
            (4, 896, 9980),
            (100, 10, 5002),
            (1, 24, 30002),
            (1, 4096, 9978),
            (500, 100, 62),
            (1, 900, 4002),
        ):
            assert not cut(shape, 1, torch.uint8).byte_pairs, shape
        assert not cut((4, 896, 9978), 1, torch.int16).byte_pairs
    monkeypatch.setattr(Cut, "byte_pairs", property(lambda self: self.across and self.common == 2))
    fold._folds.clear()
    for shape in ((3, 40, 66), (2, 300, 70), (35, 66)):
        x = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
        x[..., 3:5] = 0
        for name, expected in (
            ("amax", x.amax(-2)),
            ("any.dims", x.any(-2)),
            ("all.dims", x.all(-2)),
            ("sum.dim_IntList", x.sum(-2)),
        ):
            assert torch.equal(registry.OPERATORS[name].function(x, [-2]), expected), (name, shape)


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


def test_what_is_soon_read_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for shape, dtype, tile in (
        ((600, 3072), torch.float32, (32, 128, 8, 1)), ((2000, 6000), torch.bfloat16, (32, 128, 8, 1)),
        ((4016, 166, 6), torch.bfloat16, (16, 32, 4, 1)), ((2, 600, 6001), torch.bfloat16, (16, 64, 4, 1)),
        ((3, 700, 5001), torch.float32, (32, 64, 4, 1)),
    ):  # fmt: skip
        found = seen(shape, len(shape) - 2, dtype)
        assert found.cut.splits > 1 and tuple(found.of_values[name] for name in ("M", "N", "warps", "splits")) == tile, shape
    for shape, dtype in (
        ((3056, 1024), torch.bfloat16), ((4000, 4224), torch.bfloat16), ((600, 3072), torch.float64), ((4096, 4096), torch.float32),
        ((2, 2500, 6001), torch.float32), ((2, 600, 20001), torch.bfloat16), ((2, 600, 501), torch.float32),
    ):  # fmt: skip
        assert not seen(shape, len(shape) - 2, dtype).of_values, shape


def test_much_in_long_rows_is_asked_for_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for shape, dtype, choice in (
        ((3880, 4736), torch.float16, (4, 256, 4, 1, 4, 1)), ((2400, 10240), torch.bfloat16, (4, 512, 8, 1, 2, 1)),
        ((4300, 4112), torch.float32, (1, 1024, 4, 1, 4, 1)),
    ):  # fmt: skip
        assert tuple(seen(shape, 1, dtype).of_values.values()) == choice, shape
    for shape, dtype in (
        ((2048, 5120), torch.bfloat16), ((8192, 4096), torch.float32), ((2000, 20000), torch.float32), ((9000, 4608), torch.uint8),
        ((5000, 4608), torch.float64), ((5000, 4601), torch.float32), ((500, 16384), torch.float32),
    ):  # fmt: skip
        assert not seen(shape, 1, dtype).of_values, shape


def test_halves_in_lines_of_pairs_come_in_pairs(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(chips, "current", lambda: chips.HOPPER)
        found = seen((5000, 70, 70), 1, torch.bfloat16)
        assert found.of == 1 and found.of_value == 2
        for shape in ((5000, 70, 71), (5000, 70, 72), (5000, 200, 70), (500, 70, 70), (9000, 70, 50)):
            assert not cut(shape, 1, torch.bfloat16).half_pairs, shape
        assert not cut((5000, 70, 70), 1, torch.float32).half_pairs
    monkeypatch.setattr(Cut, "half_pairs", property(lambda self: self.across and self.common == 2))
    fold._folds.clear()
    for shape in ((3, 45, 66), (2, 130, 70)):
        x = torch.randn(shape, device=device).bfloat16()
        torch.testing.assert_close(registry.OPERATORS["amax"].function(x, [1]), x.amax(1))
        torch.testing.assert_close(registry.OPERATORS["sum.dim_IntList"].function(x, [1]), x.double().sum(1).bfloat16())


def test_which_of_several_matrices_are_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    two, four, one = torch.bfloat16, torch.float32, torch.uint8
    for shape, dtype, line in (
        ((1311, 2033, 3), two, (512, 2)), ((666, 1000, 6), two, (512, 2)), ((40000, 50, 60), four, (512, 4)),
        ((500, 2100, 13), four, (1024, 8)), ((2047, 605, 27), one, (512, 2)), ((1000, 1024, 33), one, (1024, 4)),
    ):  # fmt: skip
        assert seen(shape, 1, dtype).in_lines == line, shape
    for shape, dtype in (
        ((1777, 450, 10), two), ((2000, 100, 20), four), ((4000, 300, 3), four), ((2000, 100, 20), one),
    ):  # fmt: skip
        assert not line_cuts.pays(cut(shape, 1, dtype)), shape
    for shape, dtype in (((666, 500, 6), two), ((4000, 500, 2), four), ((500, 615, 13), four), ((656, 203, 30), one)):
        found = seen(shape, 1, dtype)  # which have tiles all the same
        assert line_cuts.pays(found.cut) and found.of_values and not found.in_lines, shape


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
    for y in (x, x[..., :-4], x[..., 1:]):
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
            var, mean = reduce.var_mean(y, [dim], correction=0)
            expected_var, expected_mean = torch.var_mean(y.double(), dim, correction=0)
            torch.testing.assert_close(mean.double(), expected_mean, **tight)
            torch.testing.assert_close(var.double(), expected_var, **tight)
            for name, theirs in (("softmax.int", torch.softmax), ("log_softmax.int", torch.log_softmax)):
                torch.testing.assert_close(registry.OPERATORS[name].function(y, dim).double(), theirs(y.double(), dim), **tight)
