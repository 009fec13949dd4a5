"""y = α x wᵀ + β bias of few rows: a matrix streamed once past them, or each of a batch past its own.
Knows how to split the stream over the chip and to add parts in a fixed order; which operand has few rows is `matmul`'s business."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trireme.kernels import chips
from trireme.kernels.aten.calls import tune
from trireme.kernels.aten.counters import arrive, workspace
from trireme.kernels.aten.products.streamed_cuts import Few
from trireme.kernels.launch import Unsupported, blocks, kernel, next_power, shared_by
from trireme.kernels.scalar import multiple


@triton.jit
def asked(bias, row, column, rows, n, bias_m, bias_n, LINE: tl.constexpr):
    """The bias of a tile, or of all its rows if it is one LINE for them; asked for before a sum that leaves room for it, so that
    nothing waits for it at the end"""
    if LINE:
        found = tl.load(bias + column.to(tl.int64) * bias_n, mask=column < n, other=0.0)[None, :]
    else:
        place = row[:, None].to(tl.int64) * bias_m + column[None, :].to(tl.int64) * bias_n
        found = tl.load(bias + place, mask=(row < rows)[:, None] & (column < n)[None, :], other=0.0)
    return found


@triton.jit
def settle(total, added, parts, counters, y, row, column, rows, n, y_m, y_n, alpha, beta, SPLITS: tl.constexpr):
    """Stores α total + β what is added; of several splits the one that arrives last adds all parts, always in the same order. Items
    of a batch, the grid's third number, have their own parts and counters."""
    mask = (row < rows)[:, None] & (column < n)[None, :]
    last = True
    if SPLITS > 1:
        parts += tl.program_id(2).to(tl.int64) * SPLITS * rows * n
        counters += tl.program_id(2) * tl.num_programs(0)
        at = row[:, None] * n + column[None, :]
        tl.store(parts + tl.program_id(1).to(tl.int64) * rows * n + at, total, mask=mask)
        last = arrive(counters + tl.program_id(0)) == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros_like(total)
            at = row[:, None] * n + column[None, :]
            for split in range(SPLITS):
                total += tl.load(parts + tl.cast(split, tl.int64) * rows * n + at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counters + tl.program_id(0), 0)
        if added is not None:
            total = total * alpha + beta * added.to(tl.float32)
        to = row[:, None].to(tl.int64) * y_m + column[None, :].to(tl.int64) * y_n
        tl.store(y + to, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def in_lines(outer, inner, length, k, ALONG: tl.constexpr, OF: tl.constexpr):
    """Strides and sizes of a matrix [length, k], of which the compiler now knows that OF divides where its lines begin and end"""
    if ALONG:
        outer, k = multiple(outer, OF), multiple(k, OF)
    else:
        inner, length = multiple(inner, OF), multiple(length, OF)
    return outer, inner, length, k


@kernel
def _lanes(
    x, w, y, bias, parts, counters, rows, n, k, part, x_item, x_m, x_k, w_item, w_n, w_k, y_item, y_m, y_n, bias_m, bias_n,
    alpha, beta, LINE: tl.constexpr, ALONG: tl.constexpr, X_ALONG: tl.constexpr, X_OF: tl.constexpr, W_OF: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = w x for one row or a few, each lane summing its own columns until the end; lines begin and end at multiples of X_OF and
    W_OF"""
    chips.begin(EARLY, OPEN=False)
    item = tl.program_id(2).to(tl.int64)
    x, w, y = x + item * multiple(x_item, X_OF), w + item * multiple(w_item, W_OF), y + item * y_item
    x_m, x_k, rows, x_end = in_lines(x_m, x_k, rows, k, X_ALONG, X_OF)
    w_n, w_k, columns, w_end = in_lines(w_n, w_k, n, k, ALONG, W_OF)
    column = tl.program_id(0) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, k)
    row = tl.arange(0, ROWS)
    added = None
    if bias is not None:
        added = asked(bias, row, column, rows, n, bias_m, bias_n, LINE)
    base = w + column[:, None].to(tl.int64) * w_n
    # One row is not written as one of several: the compiler would read the matrix by single elements then (0.7 of the speed).
    total = tl.zeros((N, K) if ROWS == 1 else (ROWS, N, K), tl.float32)
    for at in range(start, stop, K):
        here = at + inner
        mask = (column < columns)[:, None] & (here < w_end)[None, :]
        weights = tl.load(base + (here * w_k)[None, :], mask=mask, other=0.0).to(tl.float32)
        if ROWS == 1:
            total += weights * tl.load(x + here * x_k, mask=here < x_end, other=0.0).to(tl.float32)[None, :]
        else:
            there = (row < rows)[:, None] & (here < x_end)[None, :]
            values = tl.load(x + row[:, None] * x_m + (here * x_k)[None, :], mask=there, other=0.0).to(tl.float32)
            total += weights[None, :, :] * values[:, None, :]
    total = tl.sum(total, 1)[None, :] if ROWS == 1 else tl.sum(total, 2)
    settle(total, added, parts, counters, y, row, column, rows, n, y_m, y_n, alpha, beta, SPLITS)


@kernel
def _tensor(
    x, w, y, bias, parts, counters, rows, n, k, part, x_item, x_m, x_k, w_item, w_n, w_k, y_item, y_m, y_n, bias_m, bias_n,
    alpha, beta, LINE: tl.constexpr, X_COPIED: tl.constexpr, W_COPIED: tl.constexpr, ALONG: tl.constexpr, X_ALONG: tl.constexpr,
    X_OF: tl.constexpr, W_OF: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """yᵀ = w xᵀ on the tensor cores, the streamed matrix as the tall operand; what is COPIED is a descriptor of all items, w's of
    wᵀ unless it lies ALONG the summed dimension; what is not has lines that begin and end at multiples of X_OF and W_OF"""
    chips.begin(EARLY, OPEN=False)
    item = tl.program_id(2)
    x_item, w_item = multiple(x_item, X_OF), multiple(w_item, W_OF)
    x_m, x_k, rows, x_end = in_lines(x_m, x_k, rows, k, X_ALONG, X_OF)
    w_n, w_k, columns, w_end = in_lines(w_n, w_k, n, k, ALONG, W_OF)
    column = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, K)
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, k)
    added = None
    if bias is not None:
        added = asked(bias, row, column, rows, n, bias_m, bias_n, LINE)
    total = tl.zeros((N, ROWS), tl.float32)
    if not W_COPIED:
        base = w + item.to(tl.int64) * w_item + column[:, None].to(tl.int64) * w_n
    if not X_COPIED:
        few = x + item.to(tl.int64) * x_item + row[None, :] * x_m
    for at in range(start, stop, K):
        here = at + inner
        if not W_COPIED:
            mask = (column < columns)[:, None] & (here < w_end)[None, :]
            weights = tl.load(base + (here * w_k)[None, :], mask=mask, other=0.0)
        elif ALONG:
            weights = w.load([item * n + tl.program_id(0) * N, at])
        else:
            weights = w.load([item * k + at, tl.program_id(0) * N]).T
        if X_COPIED:
            values = x.load([item * rows, at]).T
        else:
            values = tl.load(few + (here * x_k)[:, None], mask=(row < rows)[None, :] & (here < x_end)[:, None], other=0.0)
        total = tl.dot(weights, values, total, input_precision=PRECISION)
    y += item.to(tl.int64) * y_item
    settle(tl.trans(total), added, parts, counters, y, row, column, rows, n, y_m, y_n, alpha, beta, SPLITS)


def describable(x: torch.Tensor, outer: int, inner: int) -> bool:
    """Whether a descriptor can say where the elements of a matrix lie, which has these dimensions of a tensor."""
    stride = x.stride(outer)
    near = x.stride(inner) == 1 and stride >= x.shape[inner]
    return near and stride * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def one_matrix(x: torch.Tensor, outer: int, inner: int) -> torch.Tensor | None:
    """A batch's matrices, which have these dimensions, as one, if they lie one below the other and a descriptor can say where."""
    height, stride = x.shape[outer], x.stride(outer)
    if not describable(x, outer, inner) or (x.shape[0] > 1 and x.stride(0) != height * stride):
        return None
    return x.as_strided((x.shape[0] * height, x.shape[inner]), (stride, 1))


def in_tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix, to be copied in tiles of so many rows and columns."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _lies_along(w: torch.Tensor) -> bool:
    """Whether a matrix [n, k], or each of a batch, is to be read along the summed dimension."""
    return w.stride(-1) == 1 or w.stride(-2) != 1


def _shared(walk: tuple[int, ...], length: int, k: int) -> int:
    """A number of which all lines of matrices [item, length, k] begin and end at multiples, whichever way they lie."""
    item, outer, inner = walk
    return shared_by(k, item, outer) if inner == 1 else shared_by(length, item, inner) if outer == 1 else 1


def streams(rows: int, w: torch.Tensor) -> bool:
    """Whether few rows go past matrices [items, n, k] as fast as torch's do."""
    (items, n, k), along = w.shape, _lies_along(w)
    lines = w if along else w.transpose(1, 2)
    copyable = chips.current().descriptors and one_matrix(lines, 1, 2) is not None
    return Few(items, rows, n, k, along, w.element_size(), copyable).ours(lines.stride(1))


def few_rows(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, alpha: float, beta: float, precision: str
) -> None:
    """y[item, rows, n] = α x[item, rows, k] w[item, n, k]ᵀ + β bias[rows, n], w read once; all strides are free."""
    (items, rows, k), n = x.shape, w.shape[1]
    x_walk, w_walk, y_walk = ((part.stride(0) if items > 1 else 0, *part.stride()[1:]) for part in (x, w, y))
    if rows == 1:  # any stride will do, but two of 1 would hide which way it lies
        x_walk = (x_walk[0], 0, x_walk[2])
    if max(rows * n, rows * x_walk[1], k * x_walk[2], k * w_walk[2]) >= 2**31:
        raise Unsupported("rows, or elements that are summed, farther apart than 32 bits tell")
    along = _lies_along(w)
    bias_walk = (0, 0) if bias is None else bias.stride()
    copies = chips.current().descriptors and items * max(n, k) < 2**31
    all_w = one_matrix(w if along else w.transpose(1, 2), 1, 2) if copies else None
    few = Few(items, rows, n, k, along, x.element_size(), all_w is not None)
    by_lanes = few.by_lanes
    room = next_power(rows) if by_lanes else max(16, next_power(rows))
    # A copy of rows that are not there takes its time.
    all_x = one_matrix(x, 1, 2) if copies and not by_lanes and rows == room else None
    x_of, w_of = (_shared(walk, length, k) for walk, length in ((x_walk, rows), (w_walk, n)))

    def run(config: dict[str, Any]) -> None:
        tile_n, tile_k, splits = config["N"], config["K"], config["splits"]
        part = blocks(blocks(k, splits), tile_k) * tile_k
        splits = blocks(k, part)
        grid = (blocks(n, tile_n), splits, items)
        parts, counters = workspace(x.device, splits * items * rows * n, items * grid[0]) if splits > 1 else (None, None)
        constants = {"N": tile_n, "K": tile_k, "SPLITS": splits, "warps": config["warps"], "stages": config["stages"]}
        constants |= {"ALONG": along, "X_ALONG": x_walk[2] == 1, "X_OF": x_of, "ROWS": room, "LINE": bias_walk[0] == 0}
        sizes = (rows, n, k, part, *x_walk, *w_walk, *y_walk, *bias_walk, alpha, beta)
        if by_lanes:
            _lanes(grid, x, w, y, bias, parts, counters, *sizes, W_OF=w_of, **constants)
            return
        tall = all_w if config.get("copied") and tile_k <= few.longest else None
        thin = all_x if tall is not None else None
        streamed = w if tall is None else in_tiles(tall, *((tile_n, tile_k) if along else (tile_k, tile_n)))
        low = x if thin is None else in_tiles(thin, room, tile_k)
        _tensor(grid, low, streamed, y, bias, parts, counters, *sizes, X_COPIED=thin is not None, W_COPIED=tall is not None,
                W_OF=1 if tall is not None else w_of, PRECISION=precision, **constants)  # fmt: skip

    name, shape = f"rows.{room}.{x.element_size()}.{int(along)}", tune.shape_class(n, k)
    if items > 1:
        name, shape = f"{name}.batched.{min(few.longest, 256)}", tune.shape_class(items, n, k)
    if copies and not by_lanes and all_w is None:
        name += ".apart"  # lines that no descriptor takes want cuts of their own
    config = tune.remembered(name, shape)
    if config is None:
        config = tune.choose(name, shape, few.cut(), few.candidates(), run)
    run(config)
