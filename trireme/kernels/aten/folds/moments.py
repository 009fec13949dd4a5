"""var_mean: mean = Σ x / n, var = Σ (x − mean)² / max(n − correction, 0), by Welford's update and Chan's rule of joining.
Knows rows; a few long ones are split over programs, of which the last to arrive joins the parts, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.counters import arrive, meeting
from trireme.kernels.aten.elementwise.pointwise import Number
from trireme.kernels.aten.folds.fold import begins, fold, lined_up, placed
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power

_JOINED = 1 << 13  # bytes of parts that one program joins at once


@triton.jit
def _across_moments(count, mean, square, total):
    """mean and Σ (x − mean)² of each row of a tile whose columns stand for so many of its `total` elements, by Chan's rule"""
    centre = tl.sum(count * mean, 1) / total
    off = tl.where(count > 0, mean - centre[:, None], 0.0)
    return centre, tl.sum(square + count * off * off, 1)


@kernel
def _moments(
    x, parts, counters, var_out, mean_out, rows, inner, length, split_length, x_outer, x_inner, x_step, out_outer, out_inner,
    correction, DOUBLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, FLAT: tl.constexpr, TURNED: tl.constexpr,
    STAGES: tl.constexpr, OF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """mean = Σ x / n and var = Σ (x − mean)² / max(n − correction, 0), each lane by Welford's update;
    parts[split] has the rows' means, then their Σ (x − mean)²"""
    chips.begin(EARLY, OPEN=False)
    rows, inner, x_outer, x_step = lined_up(rows, inner, x_outer, x_step, OF, FLAT)
    row = tl.program_id(0) * M + tl.arange(0, M)
    split = tl.program_id(1)
    base = x + begins(row, inner, x_outer, x_inner, FLAT)
    start = split * split_length
    stop = tl.minimum(start + split_length, length)
    work = tl.float64 if DOUBLE else tl.float32
    means = tl.zeros((M, N), work)
    squares = tl.zeros((M, N), work)
    ahead = (tl.arange(0, N).to(tl.int64) * x_step)[None, :]
    for at in tl.range(start, stop, N, num_stages=STAGES, loop_unroll_factor=4 if N == 1 else 1):
        column = at + tl.arange(0, N)
        mask = (row < rows)[:, None] & (column < length)[None, :]
        value = tl.load(base[:, None] + (tl.cast(at, tl.int64) * x_step + ahead), mask=mask, other=0).to(work)
        # Every lane that counts has seen the same number of elements, so one division serves all.
        share = 1.0 / ((at - start) // N + 1).to(work)
        delta = tl.where(mask, value - means, 0.0)
        means += delta * share
        squares += tl.where(mask, delta * (value - means), 0.0)
    count = (stop - start + N - 1 - tl.arange(0, N)) // N
    mean, square = _across_moments(count.to(work)[None, :], means, squares, (stop - start).to(work))
    last = True
    if counters is not None:
        own = parts + split.to(tl.int64) * 2 * rows + row
        tl.store(own, mean, mask=row < rows)
        tl.store(own + rows, square, mask=row < rows)
        last = arrive(counters + tl.program_id(0)) == tl.num_programs(1) - 1
    if last:
        if counters is not None:
            seen = tl.zeros((1, S), work)
            centres = tl.zeros((M, S), work)
            spreads = tl.zeros((M, S), work)
            for first in range(0, tl.num_programs(1), S):
                part = (first + tl.arange(0, S))[None, :]
                inside = part < tl.num_programs(1)
                mask = (row < rows)[:, None] & inside
                place = parts + part.to(tl.int64) * 2 * rows + row[:, None]
                size = tl.where(inside, tl.minimum(length - part * split_length, split_length), 0).to(work)
                delta = tl.where(inside, tl.load(place, mask=mask, other=0.0, cache_modifier=".cg") - centres, 0.0)
                spreads += tl.load(place + rows, mask=mask, other=0.0, cache_modifier=".cg")
                share = size / tl.maximum(seen + size, 1.0)
                spreads += tl.where(seen > 0, delta * delta * seen * share, 0.0)  # else the square of a large mean may be infinite
                centres += delta * share
                seen += size
            mean, square = _across_moments(seen, centres, spreads, tl.cast(length, work))
            tl.store(counters + tl.program_id(0), 0)
        var = square / tl.maximum(tl.cast(length, work) - correction, 0.0)
        place = placed(row, inner, out_outer, out_inner, TURNED)
        tl.store(var_out + place, var.to(var_out.dtype.element_ty), mask=row < rows)
        tl.store(mean_out + place, mean.to(mean_out.dtype.element_ty), mask=row < rows)


def var_mean(
    self: torch.Tensor, dim: Sequence[int] | None = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ (x − mean)² / (n − correction), and the mean"""
    if not self.is_floating_point():
        raise Unsupported("var_mean of floats only")
    x, f = fold(self, dim, keepdim, turn=True)
    var, mean = (empty(f.shape, x.dtype, x.device) for _ in range(2))
    if f.rows == 0 or f.length == 0:
        return var.fill_(float("nan")), mean.fill_(float("nan"))
    correction = float(1 if correction is None else correction)
    cut = f.lines.cut()
    n = max(1, min(cut.N, 2048 // cut.M))  # two numbers for each element
    part = blocks(blocks(f.length, cut.splits), n) * n
    programs, splits = blocks(f.rows, cut.M), blocks(f.length, part)
    kept = torch.float64 if x.dtype is torch.float64 else torch.float32
    parts, counters = meeting(x.device, programs, splits, 2 * f.rows, kept)
    inner, *walk = f.numbered
    _moments((programs, splits), x, parts, counters, var, mean, f.rows, inner, f.length, part, *walk, *f.apart, correction,
             DOUBLE=kept is torch.float64, M=cut.M, N=n,
             S=max(1, min(next_power(splits), _JOINED // (2 * cut.M * kept.itemsize))), FLAT=inner == 1,
             TURNED=f.turned is not None, STAGES=cut.stages, OF=f.of, warps=cut.warps)  # fmt: skip
    return var, mean
