"""How the sequences of a decode step are cut into spans of their keys, so that long and short ones fill the chip evenly.

`plan` cuts every sequence into spans of equal length and lists them, once a step, on the device, so that a captured graph follows
the lengths of the moment. A program that takes a span and a KV head leaves its partial (maximum, sum, weighted values). `join`, at
the end of a program, joins those of neighbouring spans if it is their last, and so on up to the sequence. Knows lengths; nothing of
pages, keys or layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.kernels import chips
from trireme.kernels.launch import blocks, kernel_of_any
from trireme.kernels.steps.attention import lanes

JOINED = 2048  # values of partials that a warp holds while it joins, 64 a thread; a program holds twice as many at most
ALONE_AT_LEAST = tl.constexpr(8)  # up to so many spans, or two blocks of them, are joined by one program
MIN_SPAN = 64  # shorter spans cost more in joining than they win in width
PROGRAMS = 4  # that a multiprocessor holds at these tile sizes
COLUMNS = 8  # that a product of matrix units has at least
PROGRAMS_OF_FEWER_BITS = 8  # a warp each, since every warp unpacks what it multiplies


@dataclass
class DecodePlan:
    """The spans of one step. All on the device, all of fixed size: a graph may be captured around it."""

    target: int  # how many spans of one KV head each fill the chip
    num_spans: int  # how many there can be: the target, and one more for every sequence; the rest are empty
    sequence: Tensor  # [num_spans] int32: whose span it is, -1 for none
    begin: Tensor  # [num_spans] int32: its first position
    info: Tensor  # [1 + sequences] int32: the span length, then how many spans each sequence has
    counters: Tensor  # [num_spans, kv_heads] int32: who has come to join; zero between launches
    partial: Tensor  # [num_spans, heads, head_dim + 2] float32: weighted values, maximum, sum


@kernel_of_any("num_sequences", "num_spans", "target")
def _plan(
    query_starts, contexts, sequence, begin, info, num_sequences, num_spans, target, window,
    LEAST: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Spans of ceil(total / target) tokens, a multiple of LEAST: sequence[s], begin[s] for every span s, in order.

    They are up to a quarter longer where there are no more than the target then, so that all of them run at once.
    """
    i = tl.arange(0, SEQUENCES)
    live = i < num_sequences
    first = tl.load(query_starts + i, mask=live, other=0)
    after = tl.load(query_starts + i + 1, mask=live, other=0)
    length = tl.load(contexts + i, mask=live & (after - first == 1), other=0)
    hidden = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    total = tl.sum(length - hidden)
    span = tl.maximum(tl.cdiv(tl.cdiv(total, target), LEAST), 1) * LEAST
    longer, step = span, tl.cdiv(span, 64 * LEAST) * LEAST
    if tl.sum((length > 0).to(tl.int32)) <= target:
        while longer * 4 <= span * 5 and tl.sum(tl.cdiv(length, longer) - hidden // longer) > target:
            longer += step
    span = tl.where(longer * 4 <= span * 5, longer, span)
    count = tl.cdiv(length, span) - hidden // span  # spans that hold a visible token
    end = tl.cumsum(count)
    tl.store(info, span)
    tl.store(info + 1 + i, count, mask=live)
    for start in range(0, num_spans, SEQUENCES):  # spans that nobody has
        s = start + i
        tl.store(sequence + s, -1, mask=(s >= tl.sum(count)) & (s < num_spans))
    for j in range(tl.max(count)):
        tl.store(sequence + end - count + j, i, mask=j < count)
        tl.store(begin + end - count + j, (hidden // span + j) * span, mask=j < count)


@triton.constexpr_function
def _block(group, width, held):
    """How many spans a program takes at a time while it joins."""
    return max(held // (triton.next_power_of_2(group) * width), 1)


@triton.jit
def _is_last(counter, count):
    """Whether this program is the last of `count` that come here; then the counter is 0 again."""
    tl.debug_barrier()  # every thread's partial is written before the count says so
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _joined(
    cell, step, count, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr
):  # fmt: skip
    """(maximum, sum, weighted values) of GROUP heads of the partials cell, cell + step spans ..., a block of them at a time."""
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    SPANS: tl.constexpr = _block(GROUP, WIDTH, HELD)
    g, d, i = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, SPANS)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, SPANS):
        there = (start + i < count)[:, None] & (g < GROUP)[None, :]
        at = cell + ((start + i)[:, None] * step * HEADS + g[None, :]) * (DIM + 2)
        # around the first-level cache, which may hold lines from before the other programs wrote
        peak = tl.load(at + DIM, mask=there, other=float("-inf"), cache_modifier=".cg")
        weight = tl.load(at + DIM + 1, mask=there, other=0.0, cache_modifier=".cg")
        real = there[:, :, None] & (d < DIM)[None, None, :]
        part = tl.load(at[:, :, None] + d[None, None, :], mask=real, other=0.0, cache_modifier=".cg")
        top = tl.maximum(best, tl.max(peak, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)  # rows that pad the group
        old, new = tl.exp2(best - safe), tl.exp2(peak - safe[None, :])
        total = total * old + tl.sum(weight * new, 0)
        acc = acc * old[:, None] + tl.sum(part * new[:, :, None], 0)
        best = top
    return best, total, acc


@triton.jit
def join(
    partial, out, counters, mine, first, count, head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Joins the partials of a sequence's spans [first, first + count), of which `mine` was just written, into out[head + g].

    The last program of a run of neighbouring spans joins these, in the place of the run's first; all runs at the same time. The
    last of those programs joins the runs. Few spans are one run.
    counters: [spans, axis 0 of the grid], 0 between launches
    """
    ALONE: tl.constexpr = max(ALONE_AT_LEAST, 2 * _block(GROUP, WIDTH, HELD))
    run = tl.where(count > ALONE, tl.ceil(tl.sqrt(count.to(tl.float32))).to(tl.int32), count)
    begin, num_runs = (mine - first) // run * run, tl.cdiv(count, run)
    done, programs = counters + tl.program_id(0), tl.num_programs(0)
    if not _is_last(done + (first + begin) * programs, tl.minimum(run, count - begin)):
        return
    cell = partial + (first * HEADS + head) * (DIM + 2)
    run_cell = cell + begin * HEADS * (DIM + 2)
    best, total, acc = _joined(run_cell, 1, tl.minimum(run, count - begin), HEADS, GROUP, DIM, WIDTH, HELD)
    g, d = tl.arange(0, triton.next_power_of_2(GROUP)), tl.arange(0, WIDTH)
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    if num_runs > 1:
        at = run_cell + g * (DIM + 2)
        tl.store(at[:, None] + d[None, :], acc, mask=real)
        tl.store(at + DIM, best, mask=g < GROUP)
        tl.store(at + DIM + 1, total, mask=g < GROUP)
        if not _is_last(done + (first + 1) * programs, num_runs):  # no run begins at the second span
            return
        best, total, acc = _joined(cell, run, num_runs, HEADS, GROUP, DIM, WIDTH, HELD)
    tl.store(out + (head + g)[:, None] * DIM + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


def together(heads: int, kv_heads: int) -> int:
    """How many KV heads in fewer bits a program takes: as many as fill the columns of its products with query heads."""
    return math.gcd(max(COLUMNS * kv_heads // heads, 1), kv_heads)


def held(warps: int) -> int:
    """How many values of partials a program holds while it joins."""
    return JOINED * min(warps, 2)


def make_plan(
    num_sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device, *, fewer_bits: bool = False, target: int = 0
) -> DecodePlan:
    """Room for the spans of a step of `num_sequences`; `plan` fills it."""
    programs, side = (PROGRAMS_OF_FEWER_BITS, kv_heads // together(heads, kv_heads)) if fewer_bits else (PROGRAMS, kv_heads)
    target = target or blocks(programs * chips.current().multiprocessors, side)
    num_spans = num_sequences + target
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    return DecodePlan(
        target,
        num_spans,
        torch.empty(num_spans, **integers),
        torch.empty(num_spans, **integers),
        torch.empty(1 + num_sequences, **integers),
        torch.zeros((num_spans, kv_heads), **integers),
        torch.empty((num_spans, heads, head_dim + 2), dtype=torch.float32, device=device),
    )


def plan(into: DecodePlan, query_starts: Tensor, contexts: Tensor, window: int = 0, min_span: int = MIN_SPAN) -> None:
    """Lists the spans of every sequence that has exactly one new token."""
    n = contexts.shape[0]
    # fmt: off
    _plan(
        (1,), query_starts, contexts, into.sequence, into.begin, into.info, n, into.num_spans, into.target, window,
        LEAST=min_span, SEQUENCES=lanes(n), warps=4,
    )
    # fmt: on
