"""Generated pointwise kernels: any rank and strides, several outputs, out=, scalars, the source on disk."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from trireme.kernels import launch
from trireme.kernels.aten.calls import tune
from trireme.kernels.aten.elementwise import layout, pointwise
from trireme.kernels.aten.registry import OPERATORS

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pointwise.pointwise(scalars=1, outputs=2)
def _mix(x, y, scale):
    return x * scale + y, tl.maximum(x, y)


@pointwise.pointwise()
def _double(x):
    return x + x


@launch.kernel
def _convert(x, y, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(y + place, tl.load(x + place).to(y.dtype.element_ty))


@pytest.mark.parametrize("source", [*FLOATS, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_types_convert_as_torchs_do(source: torch.dtype, device: str) -> None:
    """So does the interpreter, which is mended for it: what is rounded, and what is no float."""
    x = torch.randn(64, device=device).mul(9).abs().to(source)
    for target in (*FLOATS, torch.int32, torch.int64):
        y = torch.empty(64, dtype=target, device=device)
        _convert((1,), x, y, N=64)
        assert torch.equal(y, x.to(target)), target


def test_several_inputs_outputs_and_scalars(device: str) -> None:
    x, y = torch.randn(3, 1, 5, device=device), torch.randn(4, 1, device=device)
    total, larger = _mix(x, y, 2.5)
    torch.testing.assert_close(total, x * 2.5 + y)
    torch.testing.assert_close(larger, torch.maximum(x, y))


@pytest.mark.parametrize("number", [0.1, -0.0, 0.0, 5e-324, 1.0, -2.5e300, float("inf"), float("nan")])
def test_doubles_keep_all_their_bits(number: float, device: str) -> None:
    """As operands and as scalars, in every form of kernel: dense, counted through and in tiles."""
    x = torch.randn(6, 33, dtype=torch.float64, device=device)
    times = OPERATORS["mul.Tensor"].function
    for view in (x, x[:, 1:], x[:, ::2], x.t()):
        got, expected = (y.nan_to_num(7).view(torch.int64) for y in (times(view, number), view * number))
        assert torch.equal(got, expected)
        total, _ = _mix(torch.ones_like(view), torch.zeros_like(view), number)
        assert torch.equal(total.nan_to_num(7), (torch.ones_like(view) * number).nan_to_num(7))
    chosen = OPERATORS["where.ScalarOther"].function(x > 0, x, number)
    assert torch.equal(chosen.nan_to_num(7), torch.where(x > 0, x, number).nan_to_num(7))


def test_out_takes_any_layout(device: str) -> None:
    x = torch.randn(4, 6, device=device)
    out = torch.zeros(6, 8, device=device)[:, ::2].t()
    assert _double(x, out=out) is out
    torch.testing.assert_close(out, x * 2)
    with pytest.raises(launch.Unsupported):
        _double(x, out=torch.zeros(6, 4, device=device))


def test_seven_dimensions_of_alternating_strides(device: str) -> None:
    x = torch.randn(2, 3, 2, 3, 2, 3, 2, device=device).permute(6, 0, 5, 1, 4, 2, 3)[:, :, ::2]
    torch.testing.assert_close(_double(x), x + x)
    assert _double(x).stride() == (x + x).stride()


def test_dense_operands_collapse_to_one_dimension(device: str) -> None:
    x = torch.randn(3, 4, 5, device=device).permute(2, 0, 1)
    plan = layout.plan_layout([x, x], None)
    assert plan.dense and plan.sizes == (60,)
    assert layout.plan_layout([x, x.contiguous()], None).dense is False


def test_source_is_written_once(device: str) -> None:
    _double(torch.ones(3, device=device))
    files = sorted((tune.cache_folder() / "generated").glob("_double_0d_*.py"))
    assert len(files) == 1
    before = files[0].stat().st_mtime_ns
    fresh = pointwise.Pointwise(_double.function.fn if hasattr(_double.function, "fn") else _double.function)
    torch.testing.assert_close(fresh(torch.ones(3, device=device)), torch.full((3,), 2.0, device=device))
    assert files[0].stat().st_mtime_ns == before


def test_a_source_cut_short_is_written_again(device: str) -> None:
    _double(torch.ones(3, device=device))
    (file,) = (tune.cache_folder() / "generated").glob("_double_0d_*.py")
    whole = file.read_text()
    file.write_text(whole[:40])
    fresh = pointwise.Pointwise(_double.function.fn if hasattr(_double.function, "fn") else _double.function)
    torch.testing.assert_close(fresh(torch.ones(3, device=device)), torch.full((3,), 2.0, device=device))
    assert file.read_text() == whole


def test_unwritable_cache_is_not_an_error(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("TRIREME_CACHE", "/proc/nowhere")
    fresh = pointwise.Pointwise(_double.function.fn if hasattr(_double.function, "fn") else _double.function)
    torch.testing.assert_close(fresh(torch.ones(5, device=device)), torch.full((5,), 2.0, device=device))


def test_one_build_serves_other_shapes_and_alignments(device: str) -> None:
    base = torch.randn(4099, device=device)
    for start, stop in ((0, 4096), (1, 4097), (0, 4095), (3, 4), (0, 16), (5, 5)):
        x = base[start:stop]
        torch.testing.assert_close(_double(x), x + x)


def test_wrong_calls_are_told(device: str) -> None:
    with pytest.raises(ValueError, match="'flaot'"):
        pointwise.pointwise("flaot")(lambda x: x)
    plus = pointwise.pointwise()(_plain_sum)
    x = torch.ones(4, device=device)
    with pytest.raises(TypeError, match="takes 2 operands, not 1"):
        plus(x)
    with pytest.raises(RuntimeError, match=r"cannot be cast to out= of torch.int64"):
        plus(x, x, out=torch.empty(4, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match="share memory"):
        plus(x, x, out=torch.empty(1, device=device).expand(4))
    assert torch.equal(plus(torch._neg_view(x), x), torch.zeros_like(x))


def _plain_sum(x, y):  # type: ignore[no-untyped-def]
    return x + y


@pytest.mark.parametrize("rows, length", [(3, 5), (7, 33), (13, 257), (9, 48), (5, 16)])
def test_rows_of_any_length(rows: int, length: int, device: str) -> None:
    """Operands that lie as the result, repeat a row or a column, or begin elsewhere; the result is torch's."""
    x, column, row = (torch.rand(size, device=device) + 0.5 for size in ((rows, length), (rows, 1), (length,)))
    for a, b in ((x, column), (column, x), (x, row), (row, x), (column, row), (x[:, 1:], column), (x, x.t().contiguous().t())):
        assert torch.equal(OPERATORS["add.Tensor"].function(a, b), a + b)
        assert torch.equal(OPERATORS["lt.Tensor"].function(a, b), a < b)
    assert torch.equal(OPERATORS["where.self"].function(x > 1, column, row), torch.where(x > 1, column, row))
    assert torch.equal(OPERATORS["div.Tensor"].function(column.double(), row.double()), column.double() / row.double())
