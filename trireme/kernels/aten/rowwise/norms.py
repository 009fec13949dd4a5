"""layer_norm, group_norm and rms_norm. Knows rows of a contiguous tensor; torch's own formulas give the gradients of the
first two, rms_norm brings its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten import relay
from trireme.kernels.aten.calls.originals import derived_again
from trireme.kernels.aten.counters import workspace
from trireme.kernels.aten.folds import reduce
from trireme.kernels.aten.scalar import exactly, multiple
from trireme.kernels.launch import Unsupported, blocks, doubled, empty, kernel, next_power, shared_by

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_RELAYED, _TILES = 4096, 4  # elements of a tile, and tiles of one program, of rows that do not fit a tile
# Many rows that fit a tile of 16384, but leave much of it empty, are read twice in small ones, the second time from a cache; those
# from and up to so many elements, by the bytes of one (2110 x 8688 bfloat16 took 48 µs, so 30.4; but 2000 x 14336 floats 70 and
# 83, and 264 x 8448 bfloat16 2.9 and 3.8).
_SPARSE, _SPARSE_LAYER, _SPARSE_RMS = 8193, {2: 14592, 4: 9728}, {2: 11008, 4: 11008}


@kernel
def _layer_norm(
    x, residual, weight, bias, y, means, scales, rows, length, groups, channel, eps,
    DOUBLE: tl.constexpr, EACH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, OF: tl.constexpr, OPEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """y = (x − mean) / √(var + eps) · w + b; element i of row r takes w[(r % groups) · (length // channel) + i // channel],
    which with EACH is w[i]; with a residual, x becomes x + residual, which is stored back into it; OF divides the length"""
    chips.begin(EARLY, OPEN)
    eps = exactly(eps, DOUBLE)
    length = multiple(length, OF)
    row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    column = tl.arange(0, N)[None, :]
    mask = (row < rows)[:, None] & (column < length)
    at = row[:, None] * length + column
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float64 if DOUBLE else tl.float32)
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
    mean = tl.sum(value, 1) / length
    centred = tl.where(mask, value - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / length + eps)
    result = centred * scale[:, None]
    if weight is not None:
        result = result * (tl.load(weight + place, mask=inside, other=0.0) if DOUBLE else factor)
    if bias is not None:
        result = result + (tl.load(bias + place, mask=inside, other=0.0) if DOUBLE else shift)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)
    tl.store(means + row, mean.to(means.dtype.element_ty), mask=row < rows)
    tl.store(scales + row, scale.to(scales.dtype.element_ty), mask=row < rows)


@kernel
def _layer_norm_long(
    x, residual, weight, bias, y, means, scales, length, groups, channel, eps,
    DOUBLE: tl.constexpr, N: tl.constexpr, WITHIN: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """the same for rows longer than a tile, in two passes: each lane updates its own moments as Welford does; WITHIN: all
    elements of a tile take the same weight"""
    chips.begin(EARLY, OPEN=False)
    eps = exactly(eps, DOUBLE)
    length = multiple(length, OF)
    work = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    count = tl.zeros((N,), work)
    centre = tl.zeros((N,), work)
    square = tl.zeros((N,), work)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        value = tl.load(x + row * length + column, mask=column < length, other=0.0).to(work)
        if residual is not None:
            value += tl.load(residual + row * length + column, mask=column < length, other=0.0)
            rounded = value.to(residual.dtype.element_ty)
            tl.store(residual + row * length + column, rounded, mask=column < length)
            value = rounded.to(work)
        inside = column < length
        count += inside.to(work)
        delta = tl.where(inside, value - centre, 0.0)
        # Every lane that counts has seen the same number of elements, so one division serves all.
        centre += delta * (1.0 / tl.cast(at // N + 1, work))
        square += tl.where(inside, delta * (value - centre), 0.0)
    if residual is not None:
        x = residual
        tl.debug_barrier()
    mean = tl.sum(centre * count, 0) / length
    square += count * (centre - mean) * (centre - mean)
    scale = 1.0 / tl.sqrt(tl.sum(square, 0) / length + eps)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        mask = column < length
        result = (tl.load(x + row * length + column, mask=mask, other=0.0).to(work) - mean) * scale
        place = (row % groups) * (length // channel)
        if WITHIN:
            place += at // channel
            if weight is not None:
                result = result * tl.load(weight + place)
            if bias is not None:
                result = result + tl.load(bias + place)
        else:
            place += column // channel
            if weight is not None:
                result = result * tl.load(weight + place, mask=mask, other=0.0)
            if bias is not None:
                result = result + tl.load(bias + place, mask=mask, other=0.0)
        tl.store(y + row * length + column, result.to(y.dtype.element_ty), mask=mask)
    tl.store(means + row, mean.to(means.dtype.element_ty))
    tl.store(scales + row, scale.to(scales.dtype.element_ty))


@kernel
def _relayed_norm(
    x, weight, bias, y, means, scales, moments, counters, items, ahead, parts, length, groups, channel, eps,
    N: tl.constexpr, TILES: tl.constexpr, S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """the same for rows of `parts` times TILES whole tiles, each within a channel: a first pass stores the moments of a part,
    a second joins those of its row and normalises the part"""
    chips.begin(EARLY, OPEN=False)
    item, second = relay.take(counters, items, ahead)
    row = item // parts
    counter = counters + 1 + row
    at = item.to(tl.int64) * (N * TILES) + tl.arange(0, N)
    if second:
        following = tl.load(x + at)
        relay.wait(counter, parts)
        part = tl.arange(0, S)
        inside = part < parts
        centre = tl.load(moments + 2 * (row * parts + part), mask=inside, other=0.0, cache_modifier=".cg")
        square = tl.load(moments + 2 * (row * parts + part) + 1, mask=inside, other=0.0, cache_modifier=".cg")
        mean = tl.sum(centre, 0) / parts
        off = tl.where(inside, centre - mean, 0.0)
        scale = 1.0 / tl.sqrt((tl.sum(square, 0) + N * TILES * tl.sum(off * off, 0)) / length + eps)
        for tile in tl.static_range(TILES):
            result = (following.to(tl.float32) - mean) * scale
            if tile + 1 < TILES:
                following = tl.load(x + at + (tile + 1) * N)
            place = (row % groups) * (length // channel) + ((item % parts) * TILES + tile) * N // channel
            if weight is not None:
                result = result * tl.load(weight + place)
            if bias is not None:
                result = result + tl.load(bias + place)
            tl.store(y + at + tile * N, result.to(y.dtype.element_ty))
        if item % parts == 0:
            tl.store(means + row, mean.to(means.dtype.element_ty))
            tl.store(scales + row, scale.to(scales.dtype.element_ty))
        relay.leave(counter, 2 * parts)
    else:
        centres = tl.zeros((N,), tl.float32)
        squares = tl.zeros((N,), tl.float32)
        for tile in tl.static_range(TILES):
            value = tl.load(x + at + tile * N).to(tl.float32)
            delta = value - centres
            centres += delta * (1.0 / (tile + 1))
            squares += delta * (value - centres)
        mean = tl.sum(centres, 0) / N
        tl.store(moments + 2 * item, mean)
        tl.store(moments + 2 * item + 1, tl.sum(squares + TILES * (centres - mean) * (centres - mean), 0))
        relay.arrive(counter)


@kernel
def _rms_norm(
    x, residual, weight, y, scales, rows, length, x_stride, eps,
    DOUBLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, OF: tl.constexpr, OPEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = x / √(mean x² + eps) · w; with a residual, x becomes x + residual, which is stored back into it; OF divides the length
    and the stride"""
    chips.begin(EARLY, OPEN)
    eps = exactly(eps, DOUBLE)
    length, x_stride = multiple(length, OF), multiple(x_stride, OF)
    row = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    column = tl.arange(0, N)
    mask = (row < rows)[:, None] & (column < length)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float64 if DOUBLE else tl.float32)
    at = row[:, None] * length + column[None, :]
    if residual is not None:
        value += tl.load(residual + at, mask=mask, other=0.0)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=mask)
        value = rounded.to(value.dtype)
    if weight is not None and not DOUBLE:  # before the sum, behind which it would wait; doubles behind it, for want of registers
        factor = tl.load(weight + column, mask=column < length, other=0.0)[None, :]
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 1) / length + eps)
    result = value * scale[:, None]
    if weight is not None:
        result = result * (tl.load(weight + column, mask=column < length, other=0.0)[None, :] if DOUBLE else factor)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)
    if scales is not None:
        tl.store(scales + row, scale, mask=row < rows)


@kernel
def _rms_norm_long(
    x, residual, weight, y, scales, rows, length, x_stride, eps,
    DOUBLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """the same for rows longer than a tile"""
    chips.begin(EARLY, OPEN=False)
    eps = exactly(eps, DOUBLE)
    length, x_stride = multiple(length, OF), multiple(x_stride, OF)
    work = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64)
    square = tl.zeros((N,), work)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        value = tl.load(x + row * x_stride + column, mask=column < length, other=0.0).to(work)
        if residual is not None:
            value += tl.load(residual + row * length + column, mask=column < length, other=0.0)
            rounded = value.to(residual.dtype.element_ty)
            tl.store(residual + row * length + column, rounded, mask=column < length)
            value = rounded.to(work)
        square += value * value
    if residual is not None:
        x = residual
        x_stride = length
        tl.debug_barrier()
    scale = 1.0 / tl.sqrt(tl.sum(square, 0) / length + eps)
    for at in range(0, length, N):
        column = at + tl.arange(0, N)
        mask = column < length
        value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(work)
        result = value * scale
        if weight is not None:
            result = result * tl.load(weight + column, mask=mask, other=0.0)
        tl.store(y + row * length + column, result.to(y.dtype.element_ty), mask=mask)
    if scales is not None:
        tl.store(scales + row, scale)


@kernel
def _rms_gradient(grad, x, weight, scales, dx, dw, rows, length, DOUBLE: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr):
    """dx = s (g w − x̂ mean(g w x̂)) with x̂ = s x; each program adds its rows' g x̂ into its own line of dw"""
    chips.begin(EARLY, OPEN=False)
    work = tl.float64 if DOUBLE else tl.float32
    column = tl.arange(0, N)
    mask = column < length
    gathered = tl.zeros((N,), work)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * length + column
        scale = tl.load(scales + row)
        unit = tl.load(x + at, mask=mask, other=0.0).to(work) * scale
        g = tl.load(grad + at, mask=mask, other=0.0).to(work)
        gathered += g * unit
        if weight is not None:
            g = g * tl.load(weight + column, mask=mask, other=0.0).to(work)
        result = scale * (g - unit * (tl.sum(g * unit, 0) / length))
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
    if dw is not None:
        tl.store(dw + tl.program_id(0).to(tl.int64) * length + column, gathered, mask=mask)


def row_warps(size: int, rows: int = 1, residual: torch.Tensor | None = None) -> int:
    """Warps for one row: 32 bytes of bf16 a thread until the block is full; with a residual, which doubles what a thread has
    in flight, 16 bytes where rows are many (67.9 against 69.3 µs for 8192 x 4096 on an H200)."""
    if residual is not None and rows >= 1024 and 2048 < size <= 8192:
        return 16
    return 4 if size <= 2048 else 8 if size <= 8192 else 16


def _is_sparse(x: torch.Tensor, rows: int, length: int, longest: dict[int, int]) -> bool:
    """Whether these are many rows of which each would leave a tile about half empty, up to the `longest` by an element's bytes."""
    chip = chips.current()
    return rows >= 4 * chip.multiprocessors and _SPARSE <= length <= min(longest.get(x.itemsize, 0), chip.row_elements)


def _statistics_type(x: torch.Tensor, *parameters: torch.Tensor | None, own: bool = False) -> torch.dtype:
    """torch keeps the statistics of half types in float32 on an accelerator and in the input's own type on the host, where its
    operator does not keep them in their own everywhere; in float32 with weights of another type."""
    mixed = any(p is not None and p.dtype is not x.dtype for p in parameters)
    return x.dtype if x.dtype is torch.float64 or ((own or chips.current().interpreted) and not mixed) else torch.float32


def layer_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    rows: int,
    groups: int,
    channel: int,
    eps: float,
    statistics: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    limit = chips.current().row_elements
    n = min(next_power(length), limit if length <= limit else limit // 2)
    sizes = (length, groups, channel, _given(eps, x))
    if residual is None and groups == channel == 1 and _is_sparse(x, rows, length, _SPARSE_LAYER):
        _layer_norm_long((rows,), x, None, weight, bias, y, means, scales, *sizes, DOUBLE=False, N=2048, WITHIN=False,
                         OF=shared_by(length), warps=8)  # fmt: skip
        return y, means, scales
    if length <= n:
        each, m, warps = groups == channel == 1, 1, row_warps(n, rows, residual)
        if each and residual is None and n <= 4096 and (rows >= 1024 or chips.current().interpreted):
            # Four warps a row of 4096 (8192 rows: 35.1 µs, with eight 36.9, H200); shorter ones share a reading of their weights.
            m, warps = 1 if n == 4096 else min(16, max(2, 2048 // n)), 4
        body = (x, residual, weight, bias, y, means, scales, rows)
        programs = blocks(rows, m)
        _layer_norm((programs,), *body, *sizes, DOUBLE=x.dtype is torch.float64, EACH=each, M=m, N=n,
                    OF=shared_by(length), OPEN=chips.crowded(programs, warps), warps=warps)  # fmt: skip
        return y, means, scales
    whole = length % (_RELAYED * _TILES) == 0 and channel % _RELAYED == 0
    if whole and residual is None and x.dtype is not torch.float64:
        _relay_rows(x, weight, bias, y, means, scales, groups, channel, eps)
        return y, means, scales
    if x.dtype is torch.float64:
        n = min(n, 2048)  # larger tiles, with two sums for each element, do not fit into registers
    _layer_norm_long((rows,), x, residual, weight, bias, y, means, scales, *sizes,
                     DOUBLE=x.dtype is torch.float64, N=n, WITHIN=channel % n == 0, OF=shared_by(length), warps=16)  # fmt: skip
    return y, means, scales


def _relay_rows(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor, means: torch.Tensor,
    scales: torch.Tensor, groups: int, channel: int, eps: float,
) -> None:  # fmt: skip
    rows, items = means.numel(), x.numel() // (_RELAYED * _TILES)
    parts = items // rows
    moments, counters = workspace(x.device, 2 * items, rows + 1)
    sizes = (items, relay.lag(items, parts), parts, x.numel() // rows, groups, channel, float(eps))
    _relayed_norm((2 * items,), x, weight, bias, y, means, scales, moments, counters, *sizes,
                  N=_RELAYED, TILES=_TILES, S=next_power(parts), warps=8)  # fmt: skip


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


def _given(eps: float, x: torch.Tensor) -> Any:
    """As kernels take it that compute in x's type."""
    return doubled(float(eps)) if x.dtype is torch.float64 else float(eps)


def rms_rows(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalises the rows of a 2-d tensor whose last dimension is contiguous; `keep` also returns each row's scale."""
    rows, length = x.shape
    y = empty((rows, length), x.dtype, x.device)
    double = x.dtype is torch.float64
    scales = empty((rows,), torch.float64 if double else torch.float32, x.device) if keep else None
    limit = chips.current().row_elements
    n = min(next_power(length), limit if length <= limit else limit // 2)
    m = max(1, min(2048 // n, next_power(rows), 16)) if rows >= 1024 or chips.current().interpreted else 1
    stride = x.stride(0) if rows > 1 else length
    sparse = residual is None and _is_sparse(x, rows, length, _SPARSE_RMS)
    if length > n or sparse:
        if sparse:  # 700 x 8200 floats took 12.1 µs in tiles of 4096, so 10.2
            n = 2048 if x.itemsize == 2 or rows < 7 * chips.current().multiprocessors else 4096
        _rms_norm_long((rows,), x, residual, weight, y, scales, rows, length, stride, _given(eps, x),
                       DOUBLE=double, M=1, N=n, OF=shared_by(length, stride), warps=8 if n == 2048 else 16)  # fmt: skip
        return y, scales
    programs, warps = blocks(rows, m), row_warps(m * n, rows, residual)
    _rms_norm((programs,), x, residual, weight, y, scales, rows, length, stride, _given(eps, x),
              DOUBLE=double, M=m, N=n, OF=shared_by(length, stride), OPEN=chips.crowded(programs, warps),
              warps=warps)  # fmt: skip
    return y, scales


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
        y, scales = rms_rows(as_rows(x, length), None, weight, eps, keep=True)
        ctx.save_for_backward(x, weight, scales)
        ctx.length, ctx.eps = length, eps
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, scales = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be derived once more
            dx, dw = derived_again(lambda: _defined(x, ctx.length, weight, ctx.eps), [x, weight], grad)
            return dx, None, dw, None
        grad, x, length = grad.contiguous(), x.contiguous(), ctx.length
        rows = x.numel() // length
        dx = torch.empty_like(x)
        programs = min(rows, 2 * chips.current().multiprocessors)
        dw = None if weight is None else torch.empty((programs, length), dtype=scales.dtype, device=x.device)
        n = next_power(length)
        _rms_gradient((programs,), grad, x, weight, scales, dx, dw, rows, length,
                      DOUBLE=x.dtype is torch.float64, N=n, warps=row_warps(n))  # fmt: skip
        if dw is not None:
            dw = reduce.sum_dim(dw, [0], dtype=weight.dtype).view(weight.shape)
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
    return rms_rows(as_rows(input, length), None, weight, eps, keep=False)[0].view(input.shape)


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """rms_norm, differentiable"""
    length, eps = _prepare(input, normalized_shape, weight, eps)
    if next_power(length) > chips.current().row_elements:
        raise Unsupported("the gradient of rows longer than a tile")
    return _RmsNorm.apply(input, length, None if weight is None else weight.contiguous(), eps)
