"""layer_norm and group_norm: y = (x − mean) / √(var + eps) · w + b; rms_norm: y = x / √(mean x² + eps) · w.
Knows rows of a contiguous tensor; torch's own formulas give the gradients of the first two, rms_norm brings its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.calls.originals import derived_again
from trireme.kernels.launch import Unsupported, blocks, doubled, empty, kernel, next_power, shared_by
from trireme.kernels.scalar import exactly, multiple

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@kernel
def _norm(
    x, residual, weight, bias, y, means, scales, rows, length, x_stride, groups, channel, eps,
    CENTRED: tl.constexpr, DOUBLE: tl.constexpr, EACH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, OF: tl.constexpr,
    OPEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows that fit a tile; not CENTRED: the mean counts as 0. Element i of row r takes w[(r % groups) · (length // channel) + i //
    channel], which with EACH is w[i]; with a residual, x becomes x + residual, which is stored back into it; OF divides the length
    and the stride"""
    chips.begin(EARLY, OPEN)
    eps = exactly(eps, DOUBLE)
    length, x_stride = multiple(length, OF), multiple(x_stride, OF)
    row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    column = tl.arange(0, N)[None, :]
    mask = (row < rows)[:, None] & (column < length)
    at = row[:, None] * length + column
    value = tl.load(x + row[:, None] * x_stride + column, mask=mask, other=0.0).to(tl.float64 if DOUBLE else tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=mask)
        value = rounded.to(value.dtype)
    place = column if EACH else (row % groups)[:, None] * (length // channel) + column // channel
    inside = column < length if EACH else mask
    # Asked for before the sums, behind which they would wait; doubles behind them, for want of registers.
    if weight is not None and not DOUBLE:
        factor = tl.load(weight + place, mask=inside, other=0.0)
    if bias is not None and not DOUBLE:
        shift = tl.load(bias + place, mask=inside, other=0.0)
    if CENTRED:
        mean = tl.sum(value, 1) / length
        value = tl.where(mask, value - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / length + eps)
    result = value * scale[:, None]
    if weight is not None:
        result = result * (tl.load(weight + place, mask=inside, other=0.0) if DOUBLE else factor)
    if bias is not None:
        result = result + (tl.load(bias + place, mask=inside, other=0.0) if DOUBLE else shift)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)
    if means is not None:
        tl.store(means + row, mean.to(means.dtype.element_ty), mask=row < rows)
        tl.store(scales + row, scale.to(scales.dtype.element_ty), mask=row < rows)


@kernel
def _norm_long(
    x, residual, weight, bias, y, means, scales, length, x_stride, groups, channel, eps,
    CENTRED: tl.constexpr, DOUBLE: tl.constexpr, N: tl.constexpr, WITHIN: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`_norm` of rows longer than a tile, in two passes: each lane updates its own moments as Welford does; WITHIN: all elements of
    a tile take the same weight"""
    chips.begin(EARLY, OPEN=False)
    eps = exactly(eps, DOUBLE)
    length, x_stride = multiple(length, OF), multiple(x_stride, OF)
    work = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    count = tl.zeros((N,), work)
    centre = tl.zeros((N,), work)
    square = tl.zeros((N,), work)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        inside = column < length
        value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(work)
        if residual is not None:
            value += tl.load(residual + row * length + column, mask=inside, other=0.0)
            rounded = value.to(residual.dtype.element_ty)
            tl.store(residual + row * length + column, rounded, mask=inside)
            value = rounded.to(work)
        if CENTRED:
            count += inside.to(work)
            delta = tl.where(inside, value - centre, 0.0)
            # Every lane that counts has seen the same number of elements, so one division serves all.
            centre += delta * (1.0 / tl.cast(at // N + 1, work))
            square += tl.where(inside, delta * (value - centre), 0.0)
        else:
            square += value * value
    if residual is not None:
        x = residual
        x_stride = length
        tl.debug_barrier()
    mean = tl.sum(centre * count, 0) / length
    square += count * (centre - mean) * (centre - mean)
    scale = 1.0 / tl.sqrt(tl.sum(square, 0) / length + eps)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        mask = column < length
        result = (tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(work) - mean) * scale
        place = (row % groups) * (length // channel) + (column * 0 + at // channel if WITHIN else column // channel)
        if weight is not None:
            result = result * tl.load(weight + place, mask=mask, other=0.0)
        if bias is not None:
            result = result + tl.load(bias + place, mask=mask, other=0.0)
        tl.store(y + row * length + column, result.to(y.dtype.element_ty), mask=mask)
    if means is not None:
        tl.store(means + row, mean.to(means.dtype.element_ty))
        tl.store(scales + row, scale.to(scales.dtype.element_ty))


def row_warps(size: int, rows: int = 1, residual: torch.Tensor | None = None) -> int:
    """Warps for one row: 32 bytes of bf16 a thread until the block is full; of many rows with a residual, which doubles what a
    thread has in flight, half as much."""
    if residual is not None and rows >= 1024 and 2048 < size <= 8192:
        return 16
    return 4 if size <= 2048 else 8 if size <= 8192 else 16


def _statistics_type(x: torch.Tensor, *parameters: torch.Tensor | None, own: bool = False) -> torch.dtype:
    """torch keeps the statistics of half types in float32 on an accelerator and in the input's own type on the host, where its
    operator does not keep them in their own everywhere; in float32 with weights of another type."""
    mixed = any(p is not None and p.dtype is not x.dtype for p in parameters)
    return x.dtype if x.dtype is torch.float64 or ((own or chips.current().interpreted) and not mixed) else torch.float32


def _normalise(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor,
    means: torch.Tensor | None, scales: torch.Tensor | None, sizes: tuple[int, int, int, int, int], eps: float,
) -> None:  # fmt: skip
    """Runs either kernel; `sizes`: rows, their length and stride, groups and elements of a channel. Rows are held whole where they
    fit a tile and, of many, fill most of it; short ones of many come several to a program, which then share their weights."""
    rows, length, stride, groups, channel = sizes
    chip, double = chips.current(), x.dtype is torch.float64
    n, each = next_power(length), groups == channel == 1
    kind: dict[str, Any] = {"CENTRED": means is not None, "DOUBLE": double, "OF": shared_by(length, stride)}
    many = rows >= 4 * chip.multiprocessors
    sparse = n >= 16384 and 4 * length < 3 * n and many and residual is None and not chip.interpreted
    number: Any = doubled(float(eps)) if double else float(eps)
    if n > chip.row_elements or sparse:
        n = 2048 if sparse or double else chip.row_elements // 2
        _norm_long((rows,), x, residual, weight, bias, y, means, scales, *sizes[1:], number, N=n,
                   WITHIN=not each and channel % n == 0, warps=8 if n == 2048 else 16, **kind)  # fmt: skip
        return
    m = max(1, min(2048 // n, next_power(rows), 16)) if each and (rows >= 1024 or chip.interpreted) else 1
    warps = row_warps(m * n, rows, residual)
    if each and n == 4096 and many and residual is None:
        warps = 4
    programs = blocks(rows, m)
    _norm((programs,), x, residual, weight, bias, y, means, scales, *sizes, number, EACH=each, M=m, N=n,
          OPEN=chips.crowded(programs, warps), warps=warps, **kind)  # fmt: skip


def layer_rows(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, rows: int, groups: int,
    channel: int, eps: float, statistics: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Normalises `rows` equal parts of x; weights repeat every `groups` parts and span `channel` elements each."""
    if x.dtype not in _FLOATS:
        raise Unsupported(f"no normalisation of {x.dtype}")
    x = x.contiguous()
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = empty(x.shape, x.dtype, x.device)
    means, scales = (empty((rows,), statistics or _statistics_type(x, weight, bias), x.device) for _ in range(2))
    length = x.numel() // rows if rows else 0
    if length == 0:
        return y, means.fill_(0), scales.fill_(1 / math.sqrt(eps) if eps else 0)
    _normalise(x, residual, weight, bias, y, means, scales, (rows, length, length, groups, channel), eps)
    return y, means, scales


def native_layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x − mean) / √(var + eps) · w + b over the last dimensions; also the mean and 1 / √(var + eps)"""
    axis = _check_shape(input, normalized_shape, weight, bias)
    rows = math.prod(input.shape[:axis])
    if input.numel() == 0:
        raise Unsupported("an empty layer norm")
    y, means, scales = layer_rows(input, None, weight, bias, rows, 1, 1, eps)
    shape = [*input.shape[:axis], *[1] * len(normalized_shape)]
    return y, means.view(shape), scales.view(shape)


def _check_shape(x: torch.Tensor, shape: Sequence[int], *parameters: torch.Tensor | None) -> int:
    """Where the normalised dimensions begin."""
    axis = x.dim() - len(shape)
    if axis < 0 or not shape or list(x.shape[axis:]) != list(shape):
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [*, {list(shape)}], but got {list(x.shape)}"
        )
    for parameter in parameters:
        if parameter is not None and list(parameter.shape) != list(shape):
            raise RuntimeError(f"Expected weight and bias of shape {list(shape)}, but got {list(parameter.shape)}")
    return axis


def native_group_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """layer_norm of each group of channels, with one weight and bias a channel"""
    if input.numel() == 0 or C % group or any(x is not None and x.numel() != C for x in (weight, bias)):
        raise Unsupported("an empty or uneven group norm, or weights of another size")
    statistics = _statistics_type(input, weight, bias, own=True)
    y, means, scales = layer_rows(input, None, weight, bias, N * group, group, HxW, eps, statistics)
    return y, means.view(N, group), scales.view(N, group)


def rms_rows(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalises the rows of a 2-d tensor whose last dimension is contiguous."""
    rows, length = x.shape
    y = empty((rows, length), x.dtype, x.device)
    _normalise(x, residual, weight, None, y, None, None, (rows, length, x.stride(0) if rows > 1 else length, 1, 1), eps)
    return y


def as_rows(x: torch.Tensor, length: int) -> torch.Tensor:
    """x as [rows, length] with a contiguous last dimension, without a copy where the layout allows."""
    if x.dim() == 2 and x.shape[1] == length and x.stride(1) == 1:
        return x
    return x.contiguous().view(-1, length)


def _defined(x: torch.Tensor, length: int, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The norm by torch's operators."""
    wide = x.reshape(-1, length).to(torch.float64 if x.dtype is torch.float64 else torch.float32)
    y = wide * (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    return (y if weight is None else y * weight.reshape(1, length)).to(x.dtype).view(x.shape)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, length: int, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.length, ctx.eps = length, eps
        return rms_rows(as_rows(x, length), None, weight, eps).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        inputs: list[Any] = list(ctx.saved_tensors)
        again = torch.is_grad_enabled()  # whether the gradient is to be derived once more
        if not again:
            inputs = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with torch.enable_grad():
            found = derived_again(lambda: _defined(inputs[0], ctx.length, inputs[1], ctx.eps), inputs, grad)
        dx, dw = found if again else (None if t is None else t.detach() for t in found)
        return dx, None, dw, None


def _prepare(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> tuple[int, float]:
    _check_shape(x, shape, weight)
    if x.dtype not in _FLOATS or x.numel() == 0 or (weight is not None and weight.dtype != x.dtype):
        raise Unsupported("an empty or mixed rms_norm")
    # torch computes half types in float32 and takes that type's epsilon.
    work = torch.float64 if x.dtype is torch.float64 else torch.float32
    return math.prod(shape), torch.finfo(work).eps if eps is None else eps


def rms_norm_forward(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """x / √(mean x² + eps) · w over the last dimensions"""
    length, eps = _prepare(input, normalized_shape, weight, eps)
    weight = None if weight is None else weight.contiguous()
    return rms_rows(as_rows(input, length), None, weight, eps).view(input.shape)


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """rms_norm, differentiable"""
    length, eps = _prepare(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, length, None if weight is None else weight.contiguous(), eps)
