"""How rows are cut into tiles: what a warp takes at once, how many programs fill the chip, how many of them share a row.
Knows how many rows there are, how long they are and how they lie, and the chip's figures; never which kernel asks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trireme.kernels import chips
from trireme.kernels.launch import blocks, next_power

# Kernels count rows, and the elements of a row, in 32 bits, and go up to a tile too far.
MOST_COUNTED = 2**31 - 2**23
CHOICE = ("M", "N", "warps", "splits", "unroll", "stages")
_ACCESS = 16  # bytes that a thread takes at once
_TILES_APART = 4  # tiles of a part: with fewer, joining the parts costs more than a fuller chip gives
_TILES = {
    True: [(64, 16, 2), (64, 32, 4), (32, 32, 4), (64, 8, 2), (32, 64, 4), (32, 128, 8), (128, 16, 4), (16, 64, 4)],
    False: [(4, 256, 4), (16, 64, 4), (32, 32, 4), (1, 1024, 4), (8, 128, 8), (8, 32, 4), (1, 2048, 8), (64, 16, 4), (1, 4096, 8)],
}


@dataclass(frozen=True)
class Cut:
    """A tile of M rows by N elements of each, its warps, how many programs share a row, how many tiles a loop asks for before it
    folds the first, and how many are on their way through shared memory (1: none)."""

    M: int
    N: int
    warps: int
    splits: int = 1
    unroll: int = 1
    stages: int = 1

    def by(self, choice: Mapping[str, int]) -> Cut:
        """The same, or what was measured to be faster."""
        return Cut(**{name: choice[name] for name in CHOICE}) if choice else self


@dataclass(frozen=True)
class Lines:
    """Rows as memory holds them."""

    rows: int
    length: int
    itemsize: int  # bytes of an element
    across: bool  # neighbours in memory are elements of different rows
    vector: int  # elements that a thread can take at once

    @property
    def tile(self) -> int:
        """Elements that a program holds: of eight bytes fewer, which fill registers."""
        return chips.current().fold_tile // (4 if self.itemsize == 8 else 1)

    def cut(self) -> Cut:
        """The rule for these rows."""
        return self._across() if self.across else self._along()

    def _along(self) -> Cut:
        """Rows one after the other. Many rows: each warp has its own, in pieces that its lanes take in one access, so that no warp
        meets another. Few: a program takes one row, or several programs share it. What fits a tile is held whole."""
        chip, whole = chips.current(), next_power(self.length)
        line = chip.warp_size * self.vector if chip.warp_size > 1 else self.tile
        crowd = self.rows >= 15 * chip.multiprocessors
        if whole <= self.tile and (whole <= max(32, line) or not crowd or (10 * self.length >= 9 * whole and self.vector > 1)):
            m = max(1, min(self.tile // whole, next_power(blocks(self.rows, 2 * chip.multiprocessors))))
            if self.vector == 1 and whole >= 32:  # single elements: a warp for every few rows
                m = min(m, 32)
            return Cut(m, whole, 8 if m * whole >= 4096 else 4)
        if crowd and self.length <= 4 * chip.fold_tile:
            return Cut(max(4, 512 // line), line, 4, unroll=2)
        sizes = [self.tile, self.tile // 2, self.tile // 4]  # the largest that leaves little of the last tile empty
        covered = {n: blocks(self.length, n) * n for n in sizes}
        n = next(n for n in sizes if covered[n] <= 1.1 * min(covered.values()))
        ahead = self.vector * self.itemsize >= _ACCESS
        warps = 8 if n >= 2048 else 4
        splits = self._splits(self.rows, blocks(self.length, n), warps)
        return Cut(1, n, warps, splits, stages=3 if ahead else 1, unroll=1 if ahead else 4)

    def _across(self) -> Cut:
        """Rows side by side. Very many short ones: each thread folds its own. Else tiles of some neighbours, wide enough for whole
        sectors of memory, and many elements of each, shared where such tiles are too few for the chip."""
        chip = chips.current()
        crowd = self.rows >= 128 * chip.multiprocessors and not chip.interpreted
        if crowd and self.length <= 64:
            return Cut(128 * max(1, min(self.vector, 8 // self.itemsize, 4)), 1, 4, unroll=self.asked(16))
        wide = (64 if crowd or self.vector == 1 else 32) // (2 if self.itemsize == 8 else 1)
        if self.length <= 64 and not crowd:
            wide = max(wide, self.tile // next_power(self.length))
        m = min(next_power(self.rows), wide)
        n = max(1, min(16 if crowd else 32 if self.vector == 1 else 128, self.tile // m, next_power(self.length)))
        if crowd:
            return Cut(m, n, 2, unroll=2)
        warps = 8 if m * n >= 4096 else 4
        splits = self._splits(blocks(self.rows, m), blocks(self.length, n), warps)
        deep = self.length > 4 * n * splits and self.vector * self.itemsize >= 8
        return Cut(m, n, warps, splits, stages=3 if deep else 1, unroll=1 if deep or n == 1 else 2)

    def _splits(self, tracks: int, tiles: int, warps: int) -> int:
        """Programs for each of so many tracks of so many tiles: about 16 warps for a processor, none with less than a few tiles."""
        return max(1, min(16 * chips.current().multiprocessors // (warps * tracks), tiles // _TILES_APART, 1024))

    def asked(self, most: int) -> int:
        """Elements of a row that are asked for together: at most so many, and about as many each time."""
        return blocks(self.length, blocks(self.length, most))

    def choices(self) -> Iterator[dict[str, int]]:
        """What a measurement may put in the place of the rule."""
        processors, longest = chips.current().multiprocessors, next_power(self.length)
        for m, n, warps in _TILES[self.across]:
            if n > longest or m > next_power(self.rows):
                continue
            parts = {1, max(1, min(4 * processors // blocks(self.rows, m), blocks(self.length, n)))}
            for splits, asked in itertools.product(sorted(parts), [(1, 1), (2, 1), (1, 3)]):
                yield dict(zip(CHOICE, (m, n, warps, splits, *asked), strict=True))
        if self.across and self.length <= 64:
            for m, warps in ((256, 4), (128, 4), (512, 4), (256, 2)):
                yield dict(zip(CHOICE, (m, 1, warps, 1, self.asked(16), 1), strict=True))
