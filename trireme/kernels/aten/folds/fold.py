"""How a tensor is seen as rows × length for folding some of its dimensions. Knows shapes and strides, never values."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trireme.kernels.aten.elementwise.layout import normalise
from trireme.kernels.aten.folds.cut import MOST_COUNTED, Lines
from trireme.kernels.launch import Unsupported, shared_by
from trireme.kernels.scalar import multiple

_folds: dict[tuple[object, ...], Fold] = {}
_MOST_FOLDS = 4096


@triton.jit
def begins(row, inner, outer_stride, inner_stride, FLAT: tl.constexpr):
    """Where rows begin; FLAT: all are outer ones, and no division hides from the compiler that they lie side by side"""
    if FLAT:
        at = row.to(tl.int64) * outer_stride
    else:  # rows are counted in 32 bits: a division of 64 is a hundred instructions
        at = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    return at


@triton.jit
def lined_up(rows, inner, outer_stride, step, OF: tl.constexpr, FLAT: tl.constexpr):
    """Sizes of rows side by side, of which the compiler now knows that OF divides where their lines begin and end"""
    rows, step = multiple(rows, OF), multiple(step, OF)
    if not FLAT:
        inner, outer_stride = multiple(inner, OF), multiple(outer_stride, OF)
    return rows, inner, outer_stride, step


@triton.jit
def placed(row, inner, outer_place, inner_place, TURNED: tl.constexpr):
    """Where rows leave their results"""
    if TURNED:
        row = (row // inner) * outer_place + (row % inner) * inner_place
    return row


@triton.jit
def aligned(begin, length):
    """Of rows that begin anywhere: the first element at a multiple of 16, how many come before that, and how many whole sixteens
    follow. Those a thread can take 16 bytes at once"""
    first = (begin + 15) // 16 * 16
    head = (first - begin).to(tl.int32)
    return first, head, (length - head) // 16 * 16


@triton.jit
def ends(head, even, length):
    """Where the elements before and after the `aligned` ones lie, seen from the first of these, and which of 32 there are; for one
    row, or a column of several"""
    place = tl.arange(0, 32)[None, :]
    at = tl.where(place < 16, place - 16, even + place - 16)
    return at, tl.where(place < 16, at >= -head, at < length - head)


@dataclass(frozen=True)
class Fold:
    """Row r starts at (r // inner) · outer_stride + (r % inner) · inner_stride; its elements lie `step` apart."""

    rows: int
    inner: int
    length: int
    walk: tuple[int, int, int]  # strides of the outer rows, of the inner rows, of the elements
    shape: tuple[int, ...]  # of the result
    itemsize: int  # bytes of an element
    copied: bool = False  # the numbers are those of a contiguous copy, reduced dimensions last
    turned: tuple[int, int] | None = None  # how far apart results of outer and inner rows lie; None: as the rows are counted

    @property
    def step(self) -> int:
        return self.walk[2]

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
        beside = self.inner > 1 or 0 < self.walk[0] < self.step or (self.length == 1 and self.walk[0] == 1)
        return self.step != 1 and self.rows > 1 and beside

    @functools.cached_property
    def of(self) -> int:
        """The power of two up to eight that divides where lines of rows side by side begin and end, for `lined_up`; 1 where sixteen
        does, which the compiler finds itself, where none does, and for elements of eight bytes, which gain nothing."""
        if not self.across or self.itemsize == 8:
            return 1
        inner, outer, _, step = self.numbered
        return shared_by(self.rows, step) if inner == 1 else shared_by(inner, outer, step)

    @functools.cached_property
    def vector(self) -> int:
        """Elements of a line of memory that a thread can take at once."""
        inner, outer, inner_stride, step = self.numbered
        if self.across:
            common = math.gcd(self.rows, step) if inner == 1 else math.gcd(inner, outer, step)
        elif self.step != 1:
            common = 1
        else:
            common = math.gcd(16, *((outer, inner_stride) if self.rows > 1 else ()))
        return math.gcd(common, max(1, 16 // self.itemsize))

    @functools.cached_property
    def shifted(self) -> bool:
        """Whether rows are contiguous, begin anywhere, and are long enough for a program to start each where it can take much at
        once."""
        return self.step == 1 and self.numbered[0] == 1 and self.vector * self.itemsize < 16 and self.length > 1024

    @functools.cached_property
    def lines(self) -> Lines:
        """These rows as memory holds them, for whoever cuts them into tiles."""
        vector = max(1, 16 // self.itemsize) if self.shifted else self.vector
        return Lines(self.rows, self.length, self.itemsize, self.across, vector)


def fold(x: torch.Tensor, dims: Sequence[int] | int | None, keepdim: bool, turn: bool = False) -> tuple[torch.Tensor, Fold]:
    """`x` and how `dims` of it (all if None or empty) fold; a copy only where kept and reduced dimensions interleave too much.
    `turn`: rows may be counted as they lie in memory, and dimensions folded in any order; results then lie as `turned` says."""
    key = (x.shape, x.stride(), dims if dims is None or isinstance(dims, int) else tuple(dims), keepdim, turn, x.element_size())
    known = _folds.get(key)
    if known is None:
        if len(_folds) >= _MOST_FOLDS:
            _folds.clear()
        known = _folds[key] = _fold(x, dims, keepdim, turn)
    if max(known.rows, known.length) > MOST_COUNTED:
        raise Unsupported(f"{known.rows} rows of {known.length} elements")
    if known.copied:
        chosen = normalise(dims, x.dim())
        kept = [d for d in range(x.dim()) if d not in chosen]
        # One reduced dimension stays in its place, so that the result of the same shape walks alike.
        x = x.contiguous() if len(chosen) == 1 else x.permute([*kept, *chosen]).contiguous()
    return x, known


def _fold(x: torch.Tensor, dims: Sequence[int] | int | None, keepdim: bool, turn: bool) -> Fold:
    rank, itemsize = x.dim(), x.element_size()
    chosen = normalise(dims, rank)
    kept = [d for d in range(rank) if d not in chosen]
    shape = tuple((1 if d in chosen else x.shape[d]) for d in range(rank) if keepdim or d not in chosen)
    rows, length = (math.prod([x.shape[d] for d in dimensions]) for dimensions in (kept, chosen))
    if x.numel() == 0:
        return Fold(rows, 1, length, (length, 0, 1), shape, itemsize)
    reduced = _merge(x, _as_they_lie(x, chosen) if turn else chosen)
    outer = _merge(x, [d for d in kept if not chosen or d < min(chosen)])
    inner = _merge(x, [d for d in kept if chosen and d > min(chosen)])
    if turn and reduced is not None:
        turned = _turned(x, kept)
        if turned is not None and (outer is None or inner is None or 0 < outer[1] < inner[1]):
            (_, outer_stride, outer_place), (inner_rows, inner_stride, inner_place) = turned
            strides = (outer_stride, inner_stride, reduced[1])
            return Fold(rows, inner_rows, length, strides, shape, itemsize, turned=(outer_place, inner_place))
    if reduced is None or outer is None or inner is None:
        if len(chosen) == 1:
            again = _fold(x.contiguous(), dims, keepdim, turn)
            return Fold(again.rows, again.inner, again.length, again.walk, shape, itemsize, copied=True)
        return Fold(rows, 1, length, (length, 0, 1), shape, itemsize, copied=True)
    if inner[0] == 1:
        return Fold(rows, 1, length, (outer[1], 0, reduced[1]), shape, itemsize)
    return Fold(rows, inner[0], length, (outer[1], inner[1], reduced[1]), shape, itemsize)


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
