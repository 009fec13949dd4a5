"""Products of a few rows with a large matrix: every weight is read once, near the speed of the memory.

    y[m, n] = residual[m, n] + bias[n] + sum_k x'[m, k] weight[n, k]          x' = x, or rms_norm(x) * norm
    y[m, n] = act(gate[m, n]) * up[m, n], gate and up being the halves of weight     (gated)

One row goes through plain multiply-adds, up to 64 through the tensor cores with the weights as the tall operand. Where the outputs
alone do not fill the chip, programs share the inner axis and the last to finish adds the partial sums.
Knows nothing of layers; what the rows mean is the caller's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel, kernel_of_any, next_power

MAX_ROWS = 64


@dataclass(frozen=True)
class Config:
    """How a product is cut: outputs and inner elements of a tile, programs that share the inner axis, warps, stages in flight."""

    outputs: int
    inner: int
    warps: int
    stages: int = 1
    splits: int = 1


@triton.jit
def activate(x, KIND: tl.constexpr):
    """silu, gelu, gelu_tanh or relu, in float32."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def depend(PDL: tl.constexpr):
    """Waits for the kernel before, then lets the next one start; nothing where launches are ordinary.

    The other order, with weights asked into the cache before the wait, was slower on an H200: 4.51 ms a step of an 8B model
    against 4.07.
    """
    chips.begin(PDL, OPEN=True)


@kernel
def _one_row(
    x, weight, bias, residual, norm, out, K, N, eps,
    OUTPUTS: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS values of the product of one row."""
    # x: [K]; weight: [N, K], [2 N, K] where GATED; out, residual: [N]
    n, k = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INNER)
    row = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    upper = weight + (n.to(tl.int64) + N)[:, None] * K + k[None, :]
    inside = (n < N)[:, None]
    acc = tl.zeros([OUTPUTS, INNER], tl.float32)
    also = tl.zeros([OUTPUTS, INNER], tl.float32)
    squares = tl.zeros([INNER], tl.float32)
    if PDL:  # the first weights do not wait for the kernel before, which is still computing x
        chips.let_next()
    w = tl.load(row, mask=inside & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(upper, mask=inside & (k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        chips.wait()
    for start in range(0, K, INNER):
        here = start + k
        if EVEN:
            v = tl.load(x + here).to(tl.float32)
        else:
            v = tl.load(x + here, mask=here < K, other=0.0).to(tl.float32)
        if NORMED:
            squares += v * v
            v = v * tl.load(norm + here, mask=here < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * v[None, :]
        if GATED:
            also += u.to(tl.float32) * v[None, :]
        more = inside & (here + INNER < K)[None, :]
        w = tl.load(row + start + INNER, mask=more, other=0.0, eviction_policy="evict_first")
        if GATED:
            u = tl.load(upper + start + INNER, mask=more, other=0.0, eviction_policy="evict_first")
    y = tl.sum(acc, 1)
    z = tl.sum(also, 1)
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares) / K + eps)
        y, z = y * factor, z * factor
    if BIASED:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            z += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        y = activate(y, KIND) * z
    if ADDED:
        y += tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < N)


@kernel_of_any("M")
def _few_rows(
    x, weight, bias, residual, norm, out, partial, counters, M, K, N, x_stride, share, eps,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS columns of the product of up to ROWS rows, over one share of the inner axis."""
    # x: [M, K]; weight: [N, K], [2 N, K] where GATED; out, residual: [M, N]; partial: [SPLITS, 1 or 2, M, N] float32
    block, split = tl.program_id(0), tl.program_id(1)
    n, m, k = block * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS), tl.arange(0, INNER)
    begin = split * share
    end = tl.minimum(begin + share, K)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    row = weight + rows[:, None] * K + k[None, :]
    upper = weight + (rows + N)[:, None] * K + k[None, :]
    source = x + m[:, None] * x_stride + k[None, :]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    also = tl.zeros([OUTPUTS, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    depend(PDL)
    for start in range(begin, end, INNER):
        here = start + k
        if EVEN:
            w = tl.load(row + start, eviction_policy="evict_first")
            v = tl.load(source + start, mask=(m < M)[:, None], other=0.0)
        else:
            w = tl.load(row + start, mask=(here < end)[None, :], other=0.0, eviction_policy="evict_first")
            v = tl.load(source + start, mask=(m < M)[:, None] & (here < end)[None, :], other=0.0)
        if NORMED:
            wide = v.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            scale = tl.load(norm + here, mask=here < K, other=0.0).to(tl.float32)
            v = (wide * scale[None, :]).to(w.dtype)
        acc = tl.dot(w, v.T, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                u = tl.load(upper + start, eviction_policy="evict_first")
            else:
                u = tl.load(upper + start, mask=(here < end)[None, :], other=0.0, eviction_policy="evict_first")
            also = tl.dot(u, v.T, also, input_precision="ieee")
    cell = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    if SPLITS > 1:
        halves: tl.constexpr = 2 if GATED else 1
        tl.store(partial + split * halves * M * N + cell, acc, mask=inside)
        if GATED:
            tl.store(partial + (split * halves + 1) * M * N + cell, also, mask=inside)
        tl.debug_barrier()  # every thread's partial is written before the count says so
        if tl.atomic_add(counters + block, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counters + block, 0)
        acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        also = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for other in tl.static_range(SPLITS):
            acc += tl.load(partial + other * halves * M * N + cell, mask=inside, other=0.0, cache_modifier=".cg")
            if GATED:
                also += tl.load(partial + (other * halves + 1) * M * N + cell, mask=inside, other=0.0, cache_modifier=".cg")
    if NORMED:
        factor = tl.rsqrt(squares / K + eps)
        acc, also = acc * factor[None, :], also * factor[None, :]
    if BIASED:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            also += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = activate(acc, KIND) * also
    if ADDED:
        acc += tl.load(residual + cell, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + cell, acc.to(out.dtype.element_ty), mask=inside)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None, norm: Tensor | None = None,
    eps: float = 0.0, gated: str = "", config: Config | None = None, pdl: bool = False, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The product of at most MAX_ROWS rows, with whatever is to happen before and after it in the same kernel.

    dtype: of the result, where it is not x's.

    x: [rows, in]; weight: [out, in], [2 out, in] where gated (an activation's name); bias: [out or 2 out]; residual: [rows, out]
    """
    rows, inner = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    config = config or choose(rows, weight.shape[0], inner, bool(gated))
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    # an argument that is not there is never read
    inputs = (x, weight, *(part if part is not None else x for part in (bias, residual, norm)), out)
    flags: dict[str, Any] = {"BIASED": bias is not None, "ADDED": residual is not None, "NORMED": norm is not None}
    flags |= {"GATED": bool(gated), "KIND": gated, "PDL": pdl, "dependent": pdl}
    grid = blocks(outputs, config.outputs)
    if rows == 1:
        _one_row(
            (grid,), *inputs, inner, outputs, eps, OUTPUTS=config.outputs, INNER=config.inner, EVEN=inner % config.inner == 0,
            **flags, warps=config.warps, stages=config.stages,
        )  # fmt: skip
        return out
    # a norm needs the whole row in one program
    share = blocks(blocks(inner, config.inner), 1 if norm is not None else config.splits) * config.inner
    splits = blocks(inner, share)
    partial, counters = _workspace(x.device) if splits > 1 else (x, x)
    _few_rows(
        (grid, splits), *inputs, partial, counters, rows, inner, outputs, x.stride(0), share, eps, ROWS=max(next_power(rows), 16),
        OUTPUTS=config.outputs, INNER=config.inner, EVEN=inner % config.inner == 0, SPLITS=splits, **flags,
        warps=config.warps, stages=config.stages,
    )  # fmt: skip
    return out


PARTIAL_VALUES = 1 << 23  # 32 MiB of partial sums: 8 shares of 64 rows of 16384 outputs


@functools.cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """(partial sums, counters that are zero between launches), for products that follow each other on one stream."""
    return torch.empty(PARTIAL_VALUES, device=device), torch.zeros(1 << 14, dtype=torch.int32, device=device)


def pays(rows: int, outputs: int, inner: int) -> bool:
    """Whether these kernels beat cuBLAS: on an H200 always up to 32 rows, with 64 rows where the weights are many."""
    return rows <= 32 or (rows <= MAX_ROWS and outputs * inner > 1 << 25)


def choose(rows: int, outputs: int, inner: int, gated: bool = False) -> Config:
    """The best cut of those measured on an H200, by class of shape; `outputs` are the weight's rows.  (bench llm_kernels)"""
    if rows == 1:
        if inner >= 2048 or outputs <= 2048:
            return Config(2, 1024, 4)
        if outputs <= 4096:
            return Config(4, 512, 4)
        return Config(8 if outputs <= 32768 else 16, 256, 4)
    if rows > 32 and outputs > 65536 and not gated:
        return Config(128, 128 if inner % 128 == 0 else 64, 4, 4)
    if inner < 1024 and outputs <= 4096:
        return Config(64, 64, 4, 6)
    tiles, many = blocks(outputs // (2 if gated else 1), 64), chips.current().multiprocessors
    # Programs start early, beside the kernel before, and lie two to a multiprocessor where they fit; others are left without any.
    # Long rows go to one program a multiprocessor, held apart by the memory of six stages: a down projection of 32 rows took 42 us
    # in a step that alone takes 33. Shorter ones are cut so finely that all places are taken.
    stages = 6 if inner >= 8192 and not gated else 4
    splits = (2 * many if inner >= 4096 and stages == 4 else many) // tiles
    return Config(64, 128 if inner % 128 == 0 else 64, 4, stages, max(min(splits, 8, PARTIAL_VALUES // (rows * outputs)), 1))
