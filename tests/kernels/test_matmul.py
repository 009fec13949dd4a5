"""Products through tensor descriptors, whole and split, on a chip made of the interpreter; and what is left to torch."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trireme.kernels import chips
from trireme.kernels.aten import counters
from trireme.kernels.aten.calls import tune
from trireme.kernels.aten.products import matmul, streamed
from trireme.kernels.aten.products.streamed_cuts import Few, _config
from trireme.kernels.launch import Unsupported

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not chips.current().interpreted, reason="the accuracy tests run these paths on a GPU"),
]


@pytest.fixture(autouse=True)
def _small_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(chips.current(), descriptors=True, multiprocessors=8)
    monkeypatch.setattr(chips, "current", lambda: small)
    monkeypatch.setattr(tune, "_known", {})


def problem(m: int, k: int, n: int, turned: bool, biased: bool) -> tuple[matmul._Problem, torch.Tensor]:
    a, b = torch.randn(m, k), torch.randn(n, k).t() if turned else torch.randn(k, n)
    bias = torch.randn(n).expand(m, n) if biased else None
    c = torch.empty(1, m, n)
    expected = a.double() @ b.double() * (0.5 if biased else 1.0) + (2.0 * bias.double() if bias is not None else 0.0)
    return matmul._Problem(a[None], b[None], c, bias, 0.5 if biased else 1.0, 2.0 if biased else 0.0), expected


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_tiles_by_descriptors(turned: bool, biased: bool) -> None:
    for m, k, n in ((40, 200, 52), (5, 96, 64)):
        p, expected = problem(m, k, n, turned, biased)
        described = matmul._described(p)
        assert described is not None and described.b_turned is turned
        for halves in (False, True):
            p.c.fill_(float("nan"))
            described.run(matmul._config(16, 32, 32, 4, 3, halves, 2))
            torch.testing.assert_close(p.c[0].double(), expected, rtol=1e-4, atol=1e-4)


def copies_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of every product on the tensor cores from now on: whether its few rows and its matrix are copied."""
    seen: list[tuple[bool, bool]] = []
    start = streamed._tensor.__class__.__call__

    def watched(self: Any, *args: Any, **constants: Any) -> None:
        seen.append((constants["X_COPIED"], constants["W_COPIED"]))
        start(self, *args, **constants)

    monkeypatch.setattr(streamed._tensor.__class__, "__call__", watched)
    return seen


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_few_rows_streamed(copied: bool, along: bool, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns that fill no tile, and a bias, by pointers and by descriptors, the matrix either way round."""
    seen = copies_seen(monkeypatch)
    for rows, k, n in ((5, 200, 52), (32, 96, 64)):
        p, expected = problem(rows, k, n, along, True)
        room = max(16, 1 << (rows - 1).bit_length())
        config = _config(16, 32, splits, 4, 3, copied)
        monkeypatch.setitem(tune._known, (f"rows.{room}.4.{int(along)}", tune.shape_class(n, k)), config)
        matmul._stream(p)
        torch.testing.assert_close(p.c[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert seen == [(False, copied), (copied, copied)]  # rows that are not there are not copied


@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_one_row_streamed(along: bool, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By lanes along the summed dimension, else on the tensor cores."""
    p, expected = problem(1, 200, 52, along, True)
    config = _config(16, 32, splits, 4, 3)
    monkeypatch.setitem(tune._known, (f"rows.{1 if along else 16}.4.{int(along)}", tune.shape_class(52, 200)), config)
    matmul._stream(p)
    torch.testing.assert_close(p.c[0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_few_rows_of_a_batch(copied: bool, along: bool, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item past its own rows: tiles that end within an item, or reach into the next, which is not a number."""
    seen = copies_seen(monkeypatch)
    for rows, k, n in ((5, 192, 52), (16, 200, 72), (2, 96, 40)):
        a, b = torch.randn(4, rows, k), torch.randn(4, n, k).transpose(1, 2) if along else torch.randn(4, k, n)
        b[1::2] = float("nan")
        c = torch.full((4, rows, n), 7.0)
        longest = 256 if along else k & -k  # of the tiles that may be copied
        key = (f"rows.16.4.{int(along)}.batched.{longest}", tune.shape_class(4, n, k))
        monkeypatch.setitem(tune._known, key, _config(16, 32, splits, 4, 3, copied))
        matmul._stream(matmul._Problem(a, b, c, None, 1.0, 0.0))
        torch.testing.assert_close(c[::2].double(), (a.double() @ b.double())[::2], rtol=1e-4, atol=1e-4)
        assert c[1::2].isnan().all()
    # 200 is no multiple of 32, so a copied tile would reach into the next item
    assert [w for _, w in seen] == [copied, copied and along, copied]


_VIEWS: list[Callable[[int, int, int], torch.Tensor]] = [  # of whole numbers, so that any order of sums gives the same
    lambda items, rows, columns: torch.randint(-3, 4, (items, rows, columns)).float(),
    lambda items, rows, columns: torch.randint(-3, 4, (items, columns, rows)).float().transpose(1, 2),
    lambda items, rows, columns: torch.randint(-3, 4, (items, rows, columns + 8)).float()[..., :columns],
    lambda items, rows, columns: torch.randint(-3, 4, (items, rows + 3, columns)).float()[:, 1:-2],
    lambda items, rows, columns: torch.randint(-3, 4, (rows, items, columns)).float().transpose(0, 1),
    lambda items, rows, columns: torch.randint(-3, 4, (rows, columns)).float().expand(items, rows, columns),
]


@pytest.mark.parametrize("copied", [False, True])
def test_batches_however_they_lie(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    for left, right in itertools.product(_VIEWS, _VIEWS):
        items, m, n = rng.randint(2, 5), rng.randint(1, 40), rng.randint(1, 40)
        k = rng.choice((1, 16, 32, 48, 64, 130, 160, rng.randint(1, 70)))
        config = _config(rng.choice((16, 32)), rng.choice((16, 32)), rng.randint(1, 3), 4, 3, copied)
        monkeypatch.setattr(tune, "remembered", lambda name, shape, config=config: config)
        a, b = left(items, m, k), right(items, k, n)
        if b.stride(0):
            b[1] = float("nan")
        case = (a.shape, a.stride(), b.stride(), config)
        assert torch.equal(matmul.bmm(a, b).nan_to_num(99), torch.bmm(a, b).nan_to_num(99)), case


@pytest.mark.parametrize("along", [False, True])
def test_few_rows_as_a_chip_would_cut_them(along: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items in the tiles and parts of a chip like Hopper, but of two multiprocessors, so that a few items are many."""
    small, seen = dataclasses.replace(chips.HOPPER, multiprocessors=2), set()
    handful = itertools.product((2, 7), (1, 2, 4), (3, 33, 823), (2, 5))
    for items, rows, k, n in (*itertools.product((2, 7), (1, 2, 17), (6, 40, 300, 1281), (20, 77)), *handful):
        with monkeypatch.context() as patch:
            patch.setattr(chips, "current", lambda: small)
            few = Few(items, rows, n, k, along, 2, False)
            cut, by_lanes = few.cut(), few.by_lanes
        seen.add(tuple(cut.values()))
        monkeypatch.setattr(Few, "by_lanes", property(lambda self, by_lanes=by_lanes: by_lanes))
        a, b = (torch.randint(-3, 4, (items, *size)).half() for size in ((rows, k), (n, k) if along else (k, n)))
        b = b.transpose(1, 2) if along else b
        monkeypatch.setattr(tune, "remembered", lambda name, shape, cut=cut: cut)
        c = torch.full((items, rows, n), 7.0).half()
        streamed.few_rows(a, b.transpose(1, 2), c, None, 1.0, 0.0, "ieee")
        assert torch.equal(c, (a.double() @ b.double()).half()), (items, rows, k, n, cut)
        monkeypatch.undo()
    assert len(seen) > 6


def test_rules_fit_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts of shapes that no table knows: within the shared memory, no program without work."""
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    sizes = (8, 72, 896, 4096, 28672)
    for items, rows, n, k, along, copyable in itertools.product(
        (1, 2, 32, 4096), (1, 4, 16, 32), sizes, sizes, *[(True, False)] * 2
    ):
        few = Few(items, rows, n, k, along, 2, copyable)
        for config in (few.cut(), *few.candidates()):
            room = max(16, rows)
            assert config["splits"] == 1 or k // config["splits"] >= config["K"] // 2, (few, config)
            if few.by_lanes:  # a tile lies in registers
                assert rows * config["N"] * config["K"] <= 8192, (few, config)
                continue
            held = config["stages"] * (config["N"] + room) * config["K"] * 2
            assert config["splits"] > 0 and min(config["N"], config["K"]) >= 16 and config["stages"] >= 1
            assert not config.get("copied") or along or items == 1 or k % config["K"] == 0, (few, config)
            if config == few.cut():
                assert held <= chips.HOPPER.shared_memory, (few, config)


def test_what_no_descriptor_says_is_streamed_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, y = torch.randn(1, 8, 2, 64)[:, :, 0], torch.randn(1, 48, 65)[..., :64], torch.empty(1, 8, 48)  # rows 260 bytes apart
    monkeypatch.setitem(tune._known, ("rows.16.4.1", tune.shape_class(48, 64)), _config(16, 32, 1, 4, 3, True))
    streamed.few_rows(x, w, y, None, 1.0, 0.0, "ieee")
    torch.testing.assert_close(y[0], x[0] @ w[0].t(), rtol=1e-4, atol=1e-4)


def test_timing_takes_no_counters_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the recorded calls are free again, also if one of them fails."""
    arena, device = [torch.zeros(64, dtype=torch.int32), 8], torch.device("cpu")
    monkeypatch.setattr(counters, "_arenas", {0: arena})
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    monkeypatch.setattr(chips, "elapsed", lambda call: 1.0)
    recorded: list[torch.Tensor] = []

    def record(call: Callable[[], None], count: int) -> Callable[[], None]:
        recorded.extend(counters._recorded(device, 3) for _ in range(count))
        if len(recorded) > count:
            raise RuntimeError("nothing more can be recorded")
        return call

    monkeypatch.setattr(chips, "record", record)
    tune._microseconds(lambda: None)
    assert len(recorded) == tune._CALLS and arena[1] == 8
    with pytest.raises(RuntimeError):
        tune._microseconds(lambda: None)
    assert arena[1] == 8


def halves(batch: int, m: int, k: int, n: int, turned: bool = False) -> matmul._Problem:
    """A problem without memory: only its sizes are asked for."""
    a = torch.empty(batch, m, k, dtype=torch.bfloat16, device="meta")
    b = torch.empty(batch, n, k, dtype=torch.bfloat16, device="meta").transpose(1, 2) if turned else a.new_empty(batch, k, n)
    return matmul._Problem(a, b, a.new_empty(batch, m, n), None, 1.0, 0.0)


def test_tiles_run_where_they_fill_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an H200 showed: ours where 132 processors are in use, torch's where a last round leaves them idle."""
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    ours = [(1, 4096, 4096, 4096), (1, 4096, 5120, 5120), (1, 2048, 4096, 6144), (4, 1024, 1024, 1024)]
    for sizes in [*ours, (1, 256, 4096, 4096), (1, 128, 4096, 4096)]:
        p = halves(*sizes)
        assert matmul._keeps_up(p, matmul._default(p)), sizes
        assert (matmul._default(p) is matmul._LARGE) is (sizes in ours)
    short = [(1, 2048, 768, 50264), (1, 2048, 896, 9728)]  # sums so short that storing takes long
    idle = [(1, 1024, 5120, 5120), (1, 256, 5120, 5120), (1, 512, 4096, 28672), (1, 200, 4096, 4096), (1, 2048, 5120, 27648)]
    for sizes in [*idle, (32, 2048, 2048, 128), *short]:
        p = halves(*sizes)
        assert not matmul._keeps_up(p, matmul._default(p)), sizes
    narrow = matmul._config(128, 128, 64, 4, 4)
    assert matmul._keeps_up(halves(1, 2048, 5120, 5120), narrow, measured=True)
    assert not matmul._keeps_up(halves(1, 1024, 3584, 4608), narrow, measured=True)  # of the same class, but 0.73 of the chip


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for a, b in (
        (torch.randn(128, 64), torch.randn(64, 128)),  # float32
        (torch.randn(100, 101).bfloat16(), torch.randn(101, 103).bfloat16()),  # rows that lie unevenly
        (torch.randn(256, 512).bfloat16(), torch.randn(512, 512).bfloat16()),  # 8 tiles for 132 processors
        (torch.randn(40, 64).bfloat16(), torch.randn(64, 200).bfloat16()),  # 33 rows and more
    ):
        with pytest.raises(Unsupported):
            matmul.mm(a, b)
    assert matmul._suits_pointers(halves(1024, 64, 32, 64)) and not matmul._suits_pointers(halves(8, 1000, 1000, 1000))
    for sizes, turned, ours in (
        ((1, 1, 4096, 4096), True, True),
        ((1, 16, 4096, 4096), True, True),
        ((1, 32, 8192, 1024), True, False),  # long sums of many rows, whose parts are much to join
        ((1, 32, 4360, 24056), True, False),  # lines at multiples of 8 elements, of which torch takes 16 bytes at once
        ((24, 7, 100, 1000), False, True),
        ((2, 32, 4472, 2784), False, False),
    ):
        assert streamed.streams(sizes[1], halves(*sizes, turned=turned).b.transpose(1, 2)) is ours, sizes
