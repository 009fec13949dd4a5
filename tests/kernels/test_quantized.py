"""Products with quantized weights against the decoded ones: every kind, few rows and many, edges that no tile divides."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from trireme.kernels import chips
from trireme.kernels.steps import packed, scaled

DEVICE = "cpu" if chips.current().interpreted else "cuda"
SHAPES = [(5, 82, 256), *(pytest.param(shape, marks=pytest.mark.wide) for shape in [(1, 80, 256), (5, 130, 512), (33, 64, 256)])]
# each: rows, outputs, inner


def close(found: Tensor, wanted: Tensor, loss: float = 8e-3) -> None:
    far = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-9)
    assert far < loss, float(far)


def drawn(rows: int, outputs: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows + outputs + inner)
    return torch.randn(rows, inner, device=DEVICE).to(dtype), torch.randn(outputs, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind, group, zeros",
    [("int4", 128, False), ("int4", 64, True), ("int4", 32, True), ("e2m1", 32, False), ("int8", 128, True), ("int8", 256, False)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_words(shape: tuple[int, int, int], kind: str, group: int, zeros: bool, dtype: torch.dtype) -> None:
    _, outputs, inner = shape
    x, bias = drawn(*shape, dtype)
    codes = torch.randint(0, 16, (outputs, inner), dtype=torch.uint8, device=DEVICE)
    if kind == "int8":
        codes = torch.randint(-128, 128, (outputs, inner), device=DEVICE).to(torch.int8)
    scales = torch.rand(inner // group, outputs, device=DEVICE) * 0.01 + 0.001
    zero = torch.randint(0, 16, (inner // group, outputs), dtype=torch.int8, device=DEVICE) if zeros else None
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=DEVICE)
    if kind == "e2m1":
        scales = torch.exp2(torch.randint(-9, -4, scales.shape, device=DEVICE).float())
        number = torch.cat([table, -table])[codes.int()]
    else:
        middle = torch.full_like(scales, 8.0 if kind == "int4" else 0.0) if zero is None else zero.float()
        number = codes.float() - middle.t().repeat_interleave(group, 1)
    dense = number * scales.t().repeat_interleave(group, 1)
    width = packed.width_for(inner, group, kind)
    weight = packed.Words(packed.pack(codes, width, kind), scales, zero, group, width, kind)
    wanted = x.double() @ dense.double().t() + bias.double()
    close(packed.linear(x, weight, bias), wanted)
    assert torch.equal(packed.of_rows(weight, torch.arange(outputs, device=DEVICE)), codes)
    close(x @ packed.dense(weight, dtype).t() + bias, wanted)
    # in the last, weights are scaled before the product
    for config in (packed.Config(32, 16, 4, 2, 3), packed.Config(64, 32, 4, 1, inner=256), packed.Config(64, 64, 1, 1)):
        close(packed.linear(x, weight, bias, config=config), wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [0, 128, 32])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 48, 200)])
def test_eight_bits(shape: tuple[int, int, int], group: int, dtype: torch.dtype) -> None:
    _, outputs, inner = shape
    if group and inner % group:
        pytest.skip("whole groups alone")
    group = group or inner
    x, bias = drawn(*shape, torch.bfloat16)
    codes = (torch.randn(outputs, inner, device=DEVICE) * 40).clamp(-127, 127).to(dtype)
    scales = torch.rand(inner // group, outputs, device=DEVICE) * 0.01 + 0.001
    weight = scaled.EightBits(codes, scales, group)
    dense = codes.float() * scales.t().repeat_interleave(group, 1)
    q, sizes = scaled.quantize(x, dtype)
    rounded = q.double() * sizes.double().unsqueeze(1)
    both = torch.cat([x, x.flip(0)], 1)
    gate, gate_sizes = scaled.quantize(both, dtype, "silu")
    meant = torch.nn.functional.silu(x.float()) * x.flip(0).float()
    close(gate.double() * gate_sizes.double().unsqueeze(1), meant, 0.04 if dtype == torch.float8_e4m3fn else 0.01)
    close(rounded, x, 0.04 if dtype == torch.float8_e4m3fn else 0.005)
    exact = rounded @ dense.double().t() + bias.double()
    for cut in (None, scaled.Cut(32, 16, 4, 2, 2, inner=64, often=True)):
        close(scaled.rows(q, sizes, weight, bias, dtype=torch.bfloat16, cut=cut), exact)


@pytest.mark.parametrize("rows", [33, 128, 150])
def test_many_tiles_of_rows(rows: int) -> None:
    """As many as programs lie side by side, fewer, and more; twice, since counters have to be zero again."""
    assert scaled.SIDE * 16 == 128
    x, _ = drawn(rows, 64, 256, torch.bfloat16)
    codes = torch.randint(0, 16, (64, 256), device=DEVICE, dtype=torch.uint8)
    scales = torch.rand(2, 64, device=DEVICE) * 0.01 + 0.001
    words = packed.Words(packed.pack(codes, 32, "int4"), scales.half(), None, 128, 32, "int4")
    dense = (codes.float() - 8) * scales.half().float().t().repeat_interleave(128, 1)
    q, sizes = scaled.quantize(x, torch.int8)
    eight = scaled.EightBits(codes.to(torch.int8), scales, 128)
    rounded = q.double() * sizes.double().unsqueeze(1)
    exact = rounded @ (codes.double() * scales.double().t().repeat_interleave(128, 1)).t()
    for _ in range(2):
        close(packed.linear(x, words, config=packed.Config(32, 16, 4, 2, 2)), x.double() @ dense.double().t())
        close(scaled.rows(q, sizes, eight, dtype=torch.bfloat16, cut=scaled.Cut(32, 16, 4, 2, 2, inner=64)), exact)


class Device(NamedTuple):
    """What torch says of a chip: clocks in kHz."""

    major: int
    minor: int
    multi_processor_count: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int


@pytest.mark.parametrize(
    "device, balance, rows",
    [
        (Device(9, 0, 132, 1_980_000, 3_201_000, 6144), 217, 192),  # H200
        (Device(9, 0, 132, 1_980_000, 2_619_000, 5120), 319, 256),  # H100
        (Device(8, 0, 108, 1_410_000, 1_593_000, 5120), 152, 128),  # A100 of 80 GB
        (Device(8, 6, 82, 1_695_000, 9_751_000, 384), 152, 128),  # RTX 3090
        (Device(8, 6, 20, 1_000_000, 9_751_000, 384), 21, 64),  # never less than a tile
        (Device(9, 0, 132, 0, 0, 0), 0, 64),  # nothing is known
    ],
)
def test_rows_beyond_which_weights_are_decoded(device: Device, balance: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chips.balance_of(device) == balance
    monkeypatch.setattr(chips, "current", lambda: replace(chips.HOPPER, balance=balance, packed_rows=0))
    assert packed.most_rows() == rows
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)  # what was measured comes first
    assert packed.most_rows() == 256


def test_a_chip_that_was_not_measured_has_no_others_figure() -> None:
    assert [chip.packed_rows for chip in (chips.AMPERE, chips.GENERIC, chips.AMD, chips.XPU, chips.INTERPRETER)] == [0] * 5
