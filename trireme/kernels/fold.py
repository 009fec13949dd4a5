"""How a tensor is seen as rows × length for folding some of its dimensions. Knows shapes and strides, never values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.launch import Unsupported, blocks, next_power

_folds: dict[tuple[object, ...], Fold] = {}
_MOST_FOLDS = 4096
WIDE = 512  # rows of a tile of many short ones, four for each thread of four warps
_MOST_COUNTED = (
    2**31 - 2**23
)  # of rows, and of elements of a row: kernels count them in 32 bits, and up to a tile too far in each part


@triton.jit
def begins(row, inner, outer_stride, inner_stride, FLAT: tl.constexpr):
    """Where rows begin; FLAT: all are outer ones, and no division hides from the compiler that they lie side by side"""
    if FLAT:
        at = row.to(tl.int64) * outer_stride
    else:  # rows are counted in 32 bits: a division of 64 is a hundred instructions
        at = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    return at


@triton.jit
def placed(row, inner, outer_place, inner_place, TURNED: tl.constexpr):
    """Where rows leave their results"""
    if TURNED:
        row = (row // inner) * outer_place + (row % inner) * inner_place
    return row


class Fold:
    """Row r starts at (r // inner) · outer_stride + (r % inner) · inner_stride; its elements lie `step` apart."""

    def __init__(
        self,
        rows: int,
        inner: int,
        length: int,
        strides: tuple[int, int, int],
        shape: tuple[int, ...],
        copied: bool = False,
        turned: tuple[int, int] | None = None,
    ) -> None:
        self.rows, self.inner, self.length = rows, inner, length
        self.walk = strides  # of the outer rows, of the inner rows, of the elements
        self.step = strides[2]
        self.shape = shape  # of the result
        self.copied = copied  # the numbers are those of a contiguous copy, reduced dimensions last
        self.turned = turned  # how far apart the results of outer and of inner rows lie; None: as the rows are counted

    @functools.cached_property
    def numbered(self) -> tuple[int, int, int, int]:
        """`inner` and the strides for kernels that number rows: where all are inner ones, they go as outer ones."""
        if self.inner == self.rows > 1:
            return 1, self.walk[1], 0, self.step
        return self.inner, *self.walk

    @functools.cached_property
    def apart(self) -> tuple[int, int]:
        """How far apart the results of outer and inner rows lie, for kernels that ask; others are as rows are counted."""
        return self.turned or (0, 0)

    @functools.cached_property
    def across(self) -> bool:
        """Whether neighbours in memory are elements of different rows."""
        return self.step != 1 and self.rows > 1 and (self.inner > 1 or 0 < self.walk[0] < self.step)

    @functools.cached_property
    def wide(self) -> bool:
        """Whether there are so many short rows side by side that every thread may fold its own: what several warps fold together
        meets in shared memory, all of it in one bank (7 x 300000 of bool took 29 µs on an H200)."""
        return self.across and self.length <= 64 and self.rows >= 256 * WIDE and not chips.current().interpreted

    @functools.cached_property
    def even(self) -> bool:
        """Whether all lines of memory begin at multiples of 16 elements; of others a thread takes single elements."""
        return (self.step if self.across else self.walk[0] if self.rows > 1 else 0) % 16 == 0

    @functools.cached_property
    def filling(self) -> bool:
        """Whether each row can have a program of its own."""
        return self.rows >= 4 * chips.current().multiprocessors

    def stages(self, itemsize: int) -> int:
        """Tiles that a loop has on their way: three through shared memory, unless that is too small, or elements come one by one,
        for which it is slow (2049 sums of 513 floats took 38 µs on an H200)."""
        fits = 4 * math.prod(self.tile) * itemsize <= chips.current().shared_memory
        return 3 if self.even and fits and not self.wide else 1

    @functools.cached_property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of one tile: long along whichever is contiguous."""
        size = chips.current().fold_tile
        if self.wide:
            return WIDE, 1
        if self.across:
            return self._tile_across(size)
        n = min(next_power(self.length), size)
        if self.lone:
            n = next_power(self.length)
            return 2048 // n, n
        if size < self.length <= 4 * size and self.filling:
            return 1, size // 4  # 2048 sums of 5120 bfloat16 took 4.3 µs, in tiles of four rows 5.9
        if self.length > size:  # or smaller ones, if these leave less of the last one empty: 5120 are 5 of 1024, 2 of 4096
            covered = {n: blocks(self.length, n) * n for n in (size, size // 2, size // 4)}
            n = next(n for n, count in covered.items() if count <= 1.1 * min(covered.values()))
        return max(1, min(size // n, next_power(self.rows), 64)), n

    def _tile_across(self, size: int) -> tuple[int, int]:
        if not self.even and self.rows >= 256 * chips.current().multiprocessors and self.length > 64:
            return 128, 16  # of single elements only whole warps of neighbours: 64 x 77 x 999 took 5.4 µs, as below 6.5
        # Whole sectors, and few numbers for one program to join: 20.0 µs for 8192 x 4096 on an H200, with 64 or 128 20.8 and 24.4.
        wide = next_power(self.rows) if self.rows <= 32 else 64 if 48 < self.rows <= 64 else 32
        m = min(next_power(self.rows), max(wide, size // next_power(self.length) if self.length <= 64 else 1))
        return m, max(1, min(next_power(self.length), size // m))

    @functools.cached_property
    def lone(self) -> bool:
        """Whether one warp folds rows by itself: of short rows whose elements come one by one, several would share each, and meet
        in shared memory (100000 sums of 33 took 9.5 µs on an H200, so 4.8)."""
        beside = self.step == 1 and self.numbered[0] == 1 and not self.across
        return beside and not self.even and 32 < self.length <= 128 and self.rows >= 2048

    @functools.cached_property
    def warps(self) -> int:
        """Of the program that folds a tile into numbers of 32 bits."""
        if self.lone:
            return 1
        m, n = self.tile
        return 8 if (m * n >= 4096 and not (self.across and self.even)) or (m, n) == (128, 16) else 4

    @functools.cached_property
    def splits(self) -> int:
        """How many programs share a row, so that the whole chip works on a few long ones."""
        chip = chips.current()
        m, n = self.tile
        wanted = 4 * chip.multiprocessors // blocks(self.rows, m)
        if wanted < 2 or self.wide:
            return 1
        uneven = self.rows > 1 and self.walk[0] % 8 != 0  # rows whose elements come one by one
        return max(1, min(wanted, blocks(self.length, n if self.across or uneven else 4 * n), 1024))

    @functools.cached_property
    def part(self) -> int:
        """Elements of a row that one of its programs folds: whole tiles."""
        n = self.tile[1]
        return blocks(blocks(self.length, self.splits), n) * n


def fold(x: torch.Tensor, dims: Sequence[int] | int | None, keepdim: bool, turn: bool = False) -> tuple[torch.Tensor, Fold]:
    """`x` and how `dims` of it (all if None or empty) fold; a copy only where kept and reduced dimensions interleave too much.
    `turn`: rows may be counted as they lie in memory, and dimensions folded in any order; results then lie as `turned` says."""
    key = (x.shape, x.stride(), dims if dims is None or isinstance(dims, int) else tuple(dims), keepdim, turn)
    known = _folds.get(key)
    if known is None:
        if len(_folds) >= _MOST_FOLDS:
            _folds.clear()
        known = _folds[key] = _fold(x, dims, keepdim, turn)
    if max(known.rows, known.length) > _MOST_COUNTED:
        raise Unsupported(f"{known.rows} rows of {known.length} elements")
    if known.copied:
        chosen = normalise(dims, x.dim())
        kept = [d for d in range(x.dim()) if d not in chosen]
        # One reduced dimension stays in its place, so that the result of the same shape walks alike.
        x = x.contiguous() if len(chosen) == 1 else x.permute([*kept, *chosen]).contiguous()
    return x, known


def _fold(x: torch.Tensor, dims: Sequence[int] | int | None, keepdim: bool, turn: bool) -> Fold:
    rank = x.dim()
    chosen = normalise(dims, rank)
    kept = [d for d in range(rank) if d not in chosen]
    shape = tuple((1 if d in chosen else x.shape[d]) for d in range(rank) if keepdim or d not in chosen)
    rows, length = (math.prod([x.shape[d] for d in dimensions]) for dimensions in (kept, chosen))
    if x.numel() == 0:
        return Fold(rows, 1, length, (length, 0, 1), shape)
    reduced = _merge(x, _as_they_lie(x, chosen) if turn else chosen)
    outer = _merge(x, [d for d in kept if not chosen or d < min(chosen)])
    inner = _merge(x, [d for d in kept if chosen and d > min(chosen)])
    if turn and reduced is not None:
        turned = _turned(x, kept)
        if turned is not None and (outer is None or inner is None or 0 < outer[1] < inner[1]):
            (_, outer_stride, outer_place), (inner_rows, inner_stride, inner_place) = turned
            strides = (outer_stride, inner_stride, reduced[1])
            return Fold(rows, inner_rows, length, strides, shape, turned=(outer_place, inner_place))
    if reduced is None or outer is None or inner is None:
        if len(chosen) == 1:
            again = _fold(x.contiguous(), dims, keepdim, turn)
            return Fold(again.rows, again.inner, again.length, again.walk, shape, copied=True)
        return Fold(rows, 1, length, (length, 0, 1), shape, copied=True)
    if inner[0] == 1:
        return Fold(rows, 1, length, (outer[1], 0, reduced[1]), shape)
    return Fold(rows, inner[0], length, (outer[1], inner[1], reduced[1]), shape)


def _as_they_lie(x: torch.Tensor, dims: Sequence[int]) -> list[int]:
    """Dimensions from the largest stride to the smallest."""
    return sorted(dims, key=x.stride().__getitem__, reverse=True)


def _turned(x: torch.Tensor, kept: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Outer and inner rows as they lie in memory, each with their number, stride and how far apart their results lie; None unless
    two groups of dimensions are enough."""
    places, place = {}, 1
    for d in reversed(kept):
        places[d], place = place, place * x.shape[d]
    groups: list[tuple[int, int, int]] = []
    for d in _as_they_lie(x, kept):
        size, stride = x.shape[d], x.stride(d)
        if size == 1:
            continue
        if groups and groups[-1][1] == size * stride and groups[-1][2] == size * places[d]:
            groups[-1] = (groups[-1][0] * size, stride, places[d])
        else:
            groups.append((size, stride, places[d]))
    return groups if len(groups) == 2 else None


def normalise(dims: Sequence[int] | int | None, rank: int) -> list[int]:
    """Sorted non-negative dimensions; None and the empty list mean all."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return list(range(rank))
    result = []
    for dim in dims:
        if not -max(rank, 1) <= dim < max(rank, 1):
            bounds = f"[{-max(rank, 1)}, {max(rank, 1) - 1}]"
            raise IndexError(f"Dimension out of range (expected to be in range of {bounds}, but got {dim})")
        result.append(dim % max(rank, 1))
    if len(set(result)) != len(result):
        raise RuntimeError(f"dim {result} appears multiple times in the list of dims")
    return sorted(d for d in result if d < rank)


def _merge(x: torch.Tensor, dims: Sequence[int]) -> tuple[int, int] | None:
    """Size and stride of these dimensions as one, or None if no single stride walks them."""
    # Stride 0 for nothing: a stride of 1 would hide from the compiler that rows begin aligned.
    size, stride = 1, 0
    for d in reversed(dims):
        if x.shape[d] == 1:
            continue
        if size == 1:
            size, stride = x.shape[d], x.stride(d)
        elif x.stride(d) == size * stride:
            size *= x.shape[d]
        else:
            return None
    return size, stride
