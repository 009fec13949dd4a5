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
from trireme.kernels.aten.products import matmul, streamed, streamed_cuts, streamed_lanes, streamed_room
from trireme.kernels.launch import Unsupported

pytestmark = pytest.mark.skipif(not chips.current().interpreted, reason="the accuracy tests run these paths on a GPU")


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
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles_by_descriptors(turned: bool, biased: bool, splits: int) -> None:
    for m, k, n in ((40, 200, 52), (5, 96, 64)):
        p, expected = problem(m, k, n, turned, biased)
        described = matmul._described(p)
        assert described is not None and described.b_turned is turned
        for halves in (False, True) if splits == 1 else (False,):
            p.c.fill_(float("nan"))
            described.run(matmul._config(16, 32, 32, 4, 3, halves, 2, splits))
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
        config = streamed_room.config(16, 32, splits, 4, 3, copied)
        monkeypatch.setitem(tune._known, (f"rows.{room}.4.{int(along)}", tune.shape_class(n, k)), config)
        matmul._stream(p)
        torch.testing.assert_close(p.c[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert seen == [(False, copied), (copied, copied)]  # rows that are not there are not copied


@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_one_row_streamed(along: bool, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By lanes along the summed dimension, else on the tensor cores."""
    p, expected = problem(1, 200, 52, along, True)
    config = streamed_room.config(16, 32, splits, 4, 3)
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
        monkeypatch.setitem(tune._known, key, streamed_room.config(16, 32, splits, 4, 3, copied))
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
        config = streamed_room.config(rng.choice((16, 32)), rng.choice((16, 32)), rng.randint(1, 3), 4, 3, copied)
        monkeypatch.setattr(tune, "remembered", lambda name, shape, config=config: config)
        a, b = left(items, m, k), right(items, k, n)
        if b.stride(0):
            b[1] = float("nan")
        case = (a.shape, a.stride(), b.stride(), config)
        assert torch.equal(matmul.bmm(a, b).nan_to_num(99), torch.bmm(a, b).nan_to_num(99)), case


def goes_by_lanes(items: int, rows: int, n: int, k: int, along: bool, copyable: bool = False) -> bool:
    return streamed_lanes.goes_by_lanes(items, rows, n, k, along, 2, copyable)


def test_which_matrices_lanes_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: what is smaller than a second-level cache, or no descriptor takes; a few rows: what comes one by one."""
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for n, k in ((4096, 4096), (9728, 1024), (2176, 6144), (28672, 4096)):
        assert goes_by_lanes(1, 1, n, k, True, copyable=True), (n, k)
    for n, k in ((23296, 1024), (5376, 5312), (2112, 11904)):
        assert not goes_by_lanes(1, 1, n, k, True, copyable=True) and goes_by_lanes(1, 1, n, k, True), (n, k)
        assert streamed_lanes.goes_by_lanes(1, 1, n, k, True, 4, True), (n, k)
    taken = [(1, 2, 9316, 3679), (1, 2, 900, 1024), (39, 2, 98, 1974), (18, 3, 101, 6353), (5, 4, 423, 410)]
    handful = [(4000, 2, 2, 2406), (700, 3, 3, 823), (9000, 2, 2, 97)]
    for items, rows, n, k in (*taken, *handful):
        assert goes_by_lanes(items, rows, n, k, True), (items, rows, n, k)
        assert not goes_by_lanes(items, rows, n, k, False) and not streamed_lanes.goes_by_lanes(items, rows, n, k, True, 4, False)
    left = [(2, 2, 900, 1024), (1, 2, 900, 181), (136, 2, 76, 244), (18, 3, 101, 6354), (1, 5, 9316, 3679), (700, 4, 4, 340)]
    for items, rows, n, k in left:
        assert not goes_by_lanes(items, rows, n, k, True), (items, rows, n, k)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_few_rows_by_lanes(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past lines of any length, with a bias and factors; rows that lie apart and rows that are turned."""
    monkeypatch.setattr(tune, "remembered", lambda name, shape: streamed_room.config(4, 64, splits, 4, 2))
    monkeypatch.setattr(streamed, "_tensor", None)
    for (rows, k), n, items in itertools.product(((2, 203), (2, 262), (3, 1537), (4, 410)), (7, 30), (1, 2)):
        x = [torch.randint(-3, 4, (items, *size)).half() for size in ((rows, k), (rows, k + 3), (k, rows))]
        w, bias = torch.randint(-3, 4, (items, n, k)).half(), torch.randint(-3, 4, (rows, n)).half()
        for few in (x[0], x[1][..., :k], x[2].transpose(1, 2)):
            y = torch.full((items, rows, n), 7.0).half()
            streamed.few_rows(few, w, y, bias if items == 1 else None, 0.5, 2.0, "ieee")
            wanted = few.double() @ w.double().transpose(1, 2)
            wanted = 0.5 * wanted + 2 * bias.double() if items == 1 else wanted
            assert torch.equal(y, wanted.half()), (rows, k, n, items, few.stride())


def test_one_row_of_a_batch() -> None:
    """By lanes if items and outputs are few and long; few columns stand for few rows."""
    a, b = torch.randn(2, 1, 520), torch.randn(2, 6, 520).transpose(1, 2)
    assert goes_by_lanes(2, 1, 60, 520, True) and not goes_by_lanes(9, 1, 60, 520, True)
    assert goes_by_lanes(9, 1, 60, 521, True) and not goes_by_lanes(9, 1, 30, 16, True)
    assert goes_by_lanes(99, 1, 6, 520, True) and not goes_by_lanes(2, 2, 6, 520, False)
    for n, k in ((60, 520), (16, 520), (600, 32), (1000, 90), (1001, 4096), (1002, 4090), (1000, 4090)):
        assert goes_by_lanes(99, 1, n, k, False), (n, k)
    for n, k in ((64, 512), (1000, 4096), (1000, 60)):
        assert not goes_by_lanes(2, 1, n, k, False), (n, k)
    many, short = (torch.randn(12, 1, 40), torch.randn(12, 40, 3)), (torch.randn(12, 1, 3), torch.randn(12, 3, 70))
    for x, y in ((a, b), (a[:, :, ::2], b[:, ::2]), (b.transpose(1, 2), a.transpose(1, 2)), many, short):
        torch.testing.assert_close(matmul.bmm(x, y), torch.bmm(x, y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("along", [False, True])
def test_one_row_as_a_chip_would_cut_it(along: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items by lanes in the tiles and parts of Hopper: few columns, short sums, uneven lines, parts of long sums."""
    shapes = [(3, 5, 7), (2, 3, 600), (3, 20, 130), (2, 90, 70), (2, 1030, 12), (3, 401, 45), (2, 1200, 33), (2, 130, 19)]
    for items, k, n in shapes:
        with monkeypatch.context() as patch:
            patch.setattr(chips, "current", lambda: chips.HOPPER)
            by_lanes = goes_by_lanes(items, 1, n, k, along)
            cut = streamed_cuts.default(items, 1, n, k, along, 2, False)
        if not by_lanes:
            assert along and k < 32
            continue
        monkeypatch.setattr(tune, "remembered", lambda name, shape, cut=cut: cut)
        a, b = torch.randint(-3, 4, (items, 1, k)).float(), torch.randint(-3, 4, (items, n, k) if along else (items, k, n)).float()
        b = b.transpose(1, 2) if along else b
        assert torch.equal(matmul.bmm(a, b), torch.bmm(a, b)), (items, k, n, cut)


@pytest.mark.parametrize("along", [False, True])
def test_few_rows_as_a_chip_would_cut_them(along: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items in the tiles and parts of a chip like Hopper, but of two multiprocessors, so that a few items are many."""
    small, seen = dataclasses.replace(chips.HOPPER, multiprocessors=2), set()
    handful = itertools.product((2, 7), (2, 3, 4), (3, 31, 33, 227, 823, 2406), (2, 5))
    for items, rows, k, n in (*itertools.product((2, 7), (2, 4, 17), (6, 40, 111, 300, 1281), (20, 38, 77, 136)), *handful):
        with monkeypatch.context() as patch:
            patch.setattr(chips, "current", lambda: small)
            cut = streamed_cuts.default(items, rows, n, k, along, 2, False)
        seen.add(tuple(cut.values()))
        a, b = (torch.randint(-3, 4, (items, *size)).half() for size in ((rows, k), (n, k) if along else (k, n)))
        b = b.transpose(1, 2) if along else b
        monkeypatch.setattr(tune, "remembered", lambda name, shape, cut=cut: cut)
        c = torch.full((items, rows, n), 7.0).half()
        streamed.few_rows(a, b.transpose(1, 2), c, None, 1.0, 0.0, "ieee")
        assert torch.equal(c, (a.double() @ b.double()).half()), (items, rows, k, n, cut)
    assert len(seen) > 9


def test_what_was_not_measured_fits_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts of shapes that no table knows: within the shared memory, no program without work."""
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    for room in (16, 32, 64):
        for n in (8, 64, 1000, 4096, 6144, 8456, 28672, 151936):
            for k in (8, 72, 896, 4096, 28672):
                for along in (False, True):
                    config = streamed_cuts.default(1, room, n, k, along, 2, True)
                    held = config["stages"] * (config["N"] + room) * config["K"] * 2
                    assert held <= chips.HOPPER.shared_memory and config["stages"] > 1
                    assert config.get("copied") or (along and n == k == 4096)  # of which two halves by pointers are faster
                    assert config["splits"] == 1 or k // config["splits"] >= config["K"]
                    for items in (2, 32, 4096) if room < 64 else ():
                        config = streamed_cuts.default(items, room, n, k, along, 2, True)
                        held = config["stages"] * (config["N"] + room) * config["K"] * 2
                        assert held <= chips.HOPPER.shared_memory and min(config["N"], config["K"]) >= 16
                        assert not config.get("copied") or along or k % config["K"] == 0
                        one = streamed_cuts.default(items, 1, n, k, along, 2, False)
                        assert one["splits"] * one["K"] <= max(k, one["K"])
                        if goes_by_lanes(items, 1, n, k, along):  # a tile lies in registers
                            assert one["N"] * one["K"] <= 4096
                        else:
                            assert one["stages"] * (one["N"] + 16) * one["K"] * 2 <= chips.HOPPER.shared_memory
                            assert min(one["N"], one["K"]) >= 16
    # 96 programs, one a multiprocessor; 112 wide tiles in one round, where 448 narrow ones took two
    assert streamed_cuts.default(1, 32, 6144, 4096, True, 2, True) == streamed_room.config(64, 256, 1, 4, 4, True)
    assert streamed_cuts.default(1, 32, 28672, 4096, True, 2, True) == streamed_room.config(256, 128, 1, 4, 3, True)


def test_what_no_descriptor_says_is_streamed_by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, y = torch.randn(1, 8, 2, 64)[:, :, 0], torch.randn(1, 48, 65)[..., :64], torch.empty(1, 8, 48)  # rows 260 bytes apart
    monkeypatch.setitem(tune._known, ("rows.16.4.1", tune.shape_class(48, 64)), streamed_room.config(16, 32, 1, 4, 3, True))
    streamed.few_rows(x, w, y, None, 1.0, 0.0, "ieee")
    torch.testing.assert_close(y[0], x[0] @ w[0].t(), rtol=1e-4, atol=1e-4)


def test_splits_fill_the_chip_and_no_more() -> None:
    for m, n, k in ((64, 4096, 4096), (256, 4096, 4096), (32, 896, 4864)):
        for config in matmul._split_configs(m, n, k):
            programs = -(-m // config["M"]) * -(-n // config["N"]) * config["splits"]
            assert programs <= 2 * chips.current().multiprocessors and k // config["splits"] >= 2 * config["K"]


def test_what_torch_does_faster_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(8, 32, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16).t()
    monkeypatch.setitem(tune._known, ("fewmm.half.010", tune.shape_class(8, 64, 32)), {"torch": True})
    with monkeypatch.context() as compiled, pytest.raises(Unsupported):
        compiled.setattr(chips, "current", lambda: chips.HOPPER)
        matmul.mm(a, b)
    monkeypatch.setitem(tune._known, ("fewmm.half.010", tune.shape_class(8, 64, 32)), {"streamed": True})
    torch.testing.assert_close(matmul.mm(a, b).float(), a.float() @ b.float(), rtol=2e-2, atol=2e-1)


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
        (torch.randn(40, 64).bfloat16(), torch.randn(64, 200).bfloat16()),  # 33 to 64 rows
    ):
        with pytest.raises(Unsupported):
            matmul.mm(a, b)
    for batch, m, k, n in ((2, 8, 8, 8), (4, 200, 200, 200), (3, 128, 64, 128)):
        for dtype in (torch.float32, torch.bfloat16):
            if (m, dtype) != (8, torch.bfloat16):
                with pytest.raises(Unsupported):
                    matmul.bmm(torch.randn(batch, m, k, dtype=dtype), torch.randn(batch, k, n, dtype=dtype))
    assert matmul._suits_pointers(halves(1024, 64, 32, 64)) and not matmul._suits_pointers(halves(8, 1000, 1000, 1000))
    assert not matmul._suits_pointers(halves(1, 512, 4097, 512)) and not matmul._suits_pointers(halves(300, 40, 100, 60))
    for sizes, streams in (
        ((12, 1, 3000, 1000), False),
        ((12, 1, 3072, 1000), True),
        ((24, 7, 100, 1000), True),
        ((9, 2, 1776, 128), True),
        ((8, 30, 1408, 472), False),  # lines at multiples of 8
        ((2, 18, 6736, 984), True),  # few and long
        ((2, 32, 4472, 2784), False),
        ((113, 24, 5328, 32), False),
        ((2, 21, 2240, 4544), False),
        ((3, 2, 200, 5687), False),  # one by one
        ((9, 2, 2544, 279), True),
        ((282, 32, 8, 6032), False),
        ((265, 32, 112, 40), True),  # short
        ((71, 16, 824, 408), True),
        ((17, 9, 3416, 472), False),
        ((20, 16, 3000, 440), False),
        ((2, 32, 1752, 3296), False),  # few and wide
        ((2, 32, 5568, 6080), False),  # short tiles of what is long
    ):
        assert streamed.streams(sizes[1], halves(*sizes).b.transpose(1, 2)) is streams, sizes
    for sizes, streams in (
        ((12, 1, 3000, 1000), True),
        ((2, 28, 1336, 1056), False),
        ((39, 2, 1973, 98), True),
        ((275, 4, 654, 5), True),  # a handful of outputs
        ((9000, 2, 97, 2), True),
        ((700, 4, 1155, 8), False),
        ((20000, 2, 31, 2), True),
        ((1, 16, 4488, 11216), False),
        ((1, 16, 4480, 11216), True),
        ((1, 31, 5811, 5639), True),
        ((1, 16, 1608, 5888), False),
        ((1, 4, 1608, 5888), True),
    ):
        assert streamed.streams(sizes[1], halves(*sizes, turned=True).b.transpose(1, 2)) is streams, sizes
    for rows, k, n, streams in (
        (32, 4096, 4096, True),
        (32, 4360, 24056, False),
        (32, 5672, 136, True),
        (32, 8192, 1024, False),
        (2, 1395, 13155, False),
        (3, 1395, 13155, True),
        (4, 270, 18527, False),
        (25, 712, 24576, False),
        (25, 704, 24576, True),
        (31, 8968, 1776, False),
        (31, 8976, 1776, True),
    ):
        assert streamed.streams(rows, halves(1, rows, k, n).b.transpose(1, 2)) is streams, (rows, k, n)
