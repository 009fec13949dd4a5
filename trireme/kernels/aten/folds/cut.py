"""How rows are cut into tiles on this chip: rules that an H200 taught, each beside what it gained.
Knows how many rows there are, how long they are and how they lie; which kernel asks is all one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from trireme.kernels import chips
from trireme.kernels.launch import blocks, next_power

WIDE = 512  # rows of a tile of very many short ones, four for each thread of four warps
_AT_ONCE = 512  # bytes that the threads of a warp take at once
MANY = 1 << 14  # rows beside each other of which a program takes a narrow strip
LONG = 4096  # elements of a row beside others from which on it is cut differently
# Of rows, of elements of a row, and of those of a matrix that is read in lines: kernels count them in 32 bits, and up to a tile too
# far in each part.
MOST_COUNTED = 2**31 - 2**23
CHOICE = ("M", "N", "warps", "splits", "unroll", "stages")
# Tiles and warps that are worth trying for rows side by side, many and short or not, and for rows that lie one after the other.
_SHORT = [(256, 1, 4), (128, 1, 4), (512, 1, 4), (256, 1, 2)]
_ACROSS = [(64, 16, 2), (64, 32, 4), (32, 32, 4), (64, 8, 2), (64, 16, 4), (32, 64, 4), (128, 16, 4), (128, 8, 2)]
_ALONG = [(4, 256, 4), (16, 64, 4), (32, 32, 4), (1, 1024, 4), (8, 128, 8), (8, 32, 4), (1, 2048, 8), (64, 16, 4), (1, 4096, 8)]


class Way(NamedTuple):
    """How a program goes through rows: the size of a tile, its warps, tiles that a loop asks for before it folds the first, and
    tiles that it has on their way, more than one of them through shared memory."""

    rows: int
    columns: int
    warps: int
    unroll: int = 1
    stages: int = 1


@dataclass(frozen=True)
class Cut:
    """Tiles for rows: their size, how many a program has on their way, and how many programs share a row."""

    rows: int
    length: int
    itemsize: int  # bytes of an element
    across: bool  # neighbours in memory are elements of different rows
    beside: int  # rows that then lie side by side
    even: bool  # lines of memory begin where a thread may take several elements at once
    common: int  # the power of two up to eight that divides where lines of rows side by side begin; 1 if sixteen does, or none
    paired: bool  # if not, then where it may take two or a few, of many long rows side by side
    anywhere: bool  # rows are contiguous, one after the other, and begin anywhere
    matrix: bool  # those side by side are the columns of a matrix that lies together
    measured: tuple[int, ...] = ()  # rows, columns, warps, splits, unroll and stages that were measured to do best; else rules tell

    def by(self, choice: Mapping[str, int]) -> Cut:
        """The same, cut as was measured; without a choice as the rules say."""
        return replace(self, measured=tuple(choice[name] for name in CHOICE)) if choice else self

    def choices(self) -> Iterator[dict[str, int]]:
        """What a measurement may put in the place of the rules, the likeliest first."""
        processors, longest = chips.current().multiprocessors, next_power(self.length)
        for m, n, warps in (*(_SHORT if self.length <= 64 else ()), *_ACROSS) if self.across else _ALONG:
            if n > longest or m > next_power(self.rows) or (self.shifted and n >= self.length):
                continue
            if n == 1:  # each thread its own row, and all of it
                parts, ahead = {1}, [(1, 1), (self.asked(16), 1)]
            else:
                parts = {1, max(1, min(4 * processors // blocks(self.rows, m), blocks(self.length, n)))}
                ahead = [(1, 1), (2, 1), *([(1, 3)] if self.even else [])]  # asked for in registers, or through shared memory
            for splits, asked in itertools.product(sorted(parts), ahead):
                yield dict(zip(CHOICE, (m, n, warps, splits, *asked), strict=True))

    @functools.cached_property
    def wide(self) -> bool:
        """Whether there are so many short rows side by side that every thread may fold its own: what several warps fold together
        meets in shared memory, all of it in one bank (7 x 300000 of bool took 29 µs on an H200)."""
        many = self.rows >= (60000 if self.length > 32 else 16384 if self.even else 30000)
        longest = 64 if self.even or self.itemsize in (1, 8) else 32  # 273 x 56 x 527 halves took 9.0 µs, in tiles 4.4
        return self.across and self.length <= longest and many and not chips.current().interpreted

    @functools.cached_property
    def byte_pairs(self) -> bool:
        """Whether there are many rows of bytes side by side, neither short nor very long, in lines that begin at even places."""
        enough = (32 if self.rows < 60000 else 16) < self.length < LONG and self.rows >= 4096 and self.beside >= 64
        return self.across and self.itemsize == 1 and self.common == 2 and not self.even and enough

    @functools.cached_property
    def half_pairs(self) -> bool:
        """Whether there is much of two bytes in short rows side by side, in lines that begin at even places: sums of 5000 x 70 x 70
        took 17.2 µs one by one, in pairs 12.1 (torch 13.9), of 3000 x 50 x 130 11.0 and 7.7 (torch 9.1)."""
        short = self.across and self.large and 40 < self.length <= 160
        return short and self.itemsize == 2 and self.common == 2 and not self.even and self.beside >= 64

    @functools.cached_property
    def eights(self) -> bool:
        """Whether lines that are even begin at eights at least, as copies into shared memory like it."""
        return self.common in (1, 8)

    @property
    def many(self) -> bool:
        """Whether so many rows lie side by side that a program takes a narrow strip of them."""
        return self.rows >= MANY

    @functools.cached_property
    def bare(self) -> bool:
        """Whether finding elements, and asking which there are, costs more than folding them: 489 maxima side by side of 33980
        floats took 34 µs, so 21; whether any of 1000 x 20000 are true 11.0 and 6.3. But 1000 x 20000 sums of bfloat16 7.7 and
        10.2."""
        several = self.tile[1] > 1 or self.tile[0] == 64
        return self.across and several and (not self.even or self.itemsize in (1, 4))

    @functools.cached_property
    def odd(self) -> bool:
        """Whether there are many rows that begin anywhere, and none is very long."""
        longest = 256 if self.itemsize == 8 else 400 if self.itemsize == 1 else 4096
        return self.anywhere and 32 < self.length <= longest and self.rows >= 2048

    @functools.cached_property
    def shifted(self) -> bool:
        """Whether rows begin anywhere and are so long that a program does well to start where it can take much at once."""
        if self.rows < 2048:
            return self.anywhere and self.length > chips.current().fold_tile
        # 2696 x 806 bytes took 4.5 µs in lines, so 2.2; as many bfloat16 2.7 and 2.2.
        return self.anywhere and self.length > {1: 400, 2: 768}.get(self.itemsize, 1024)

    @functools.cached_property
    def large(self) -> bool:
        """Whether there is more than a cache holds, so that more of it must be on its way."""
        return self._bytes > 1 << 25

    @functools.cached_property
    def _bytes(self) -> int:
        return self.rows * self.length * self.itemsize

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of one tile: long along whichever is contiguous."""
        return self.way.rows, self.way.columns

    @property
    def warps(self) -> int:
        """Of the program that folds a tile into numbers of 32 bits."""
        return self.way.warps

    @property
    def unroll(self) -> int:
        return self.way.unroll

    @property
    def stages(self) -> int:
        return self.way.stages

    def asked(self, most: int) -> int:
        """Elements of a row that are asked for together, at most so many, and about as many each time: 18 are two times nine, where
        of two times sixteen every other thread would ask for nothing (18 x 634019 took 13.1 µs, so 7.3)."""
        return blocks(self.length, blocks(self.length, most))

    @functools.cached_property
    def whole(self) -> tuple[int, int, int]:
        """Rows, columns and warps of a tile that holds whole rows, unless they are long."""
        size = chips.current().fold_tile
        if self.odd and self.length <= 64:
            # One warp for rows that begin anywhere: several would share each, and meet in shared memory (100000 sums of 33 took 9.5
            # µs on an H200, so 4.8).
            return 32, 64, 1
        n = min(next_power(self.length), size)
        most = (size // 4 if self.itemsize == 8 else size) // n  # rows: of eight bytes fewer, which fill registers
        if n <= (32 if self.even else 16) and not self.across:
            # So many that starting programs does not take longer than reading: 524288 x 4 took 10.5 µs with 64, so 2.6.
            m = 512 if n <= 4 else 256 if n == 8 or (self.even and n == 16) else 128
            if blocks(self.rows, m) >= 2 * chips.current().multiprocessors:
                return min(m, most), n, 4 if n <= 4 else 8
        if self.length > size:  # or smaller ones, if these leave less of the last one empty: 5120 are 5 of 1024, 2 of 4096
            # Of eight bytes only as many as leave room for other programs: 5000000 took 16.5 µs, so 13.
            size //= 4 if self.itemsize == 8 else 1
            covered = {n: blocks(self.length, n) * n for n in (size, size // 2, size // 4)}
            n = next(n for n, count in covered.items() if count <= 1.1 * min(covered.values()))
            return 1, n, 8 if n >= 2048 else 4
        m = 1 if self.shifted else max(1, min(most, next_power(self.rows), 64))
        return m, n, 8 if m * n >= 4096 else 4

    @functools.cached_property
    def way(self) -> Way:
        if self.measured:
            m, n, warps, _, unroll, stages = self.measured
            return Way(m, n, warps, unroll, stages)
        if self.across:
            return self._wide() if self.wide else self._strips() if self.strips else self._across()
        return self.apiece or self._usual(*self._along())

    def _usual(self, m: int, n: int, warps: int) -> Way:
        """Three tiles on their way, unless shared memory is too small, or elements come one by one, for which it is slow (2049 sums
        of 513 floats took 38 µs on an H200), or other programs fill the time anyway (42912 sums side by side of 139 floats 8.2 µs,
        so 5.7)."""
        fits = 4 * m * n * self.itemsize <= chips.current().shared_memory
        enough = 2 if self.across and self.length <= 512 else 4
        filled = blocks(self.rows, m) >= enough * chips.current().multiprocessors and self.length <= 16384 and not self.large
        ahead = (self.even or (self.shifted and m == 1)) and fits and not filled
        return Way(m, n, warps, self._unrolled(m, n, warps, ahead), 3 if ahead else 1)

    def _unrolled(self, m: int, n: int, warps: int, ahead: bool) -> int:
        if self.across:
            most = 2048 if self.itemsize == 1 or (not self.even and self.itemsize < 8) else 1024
            heavy = self.itemsize == 8 and not self.even and warps == 4
            # 107 x 42992 bfloat16 took 4.7 µs with one, so 4.3.
            return 2 if m >= 16 and m * n <= most and not (ahead or heavy) else 1
        if not self.shifted or m == 1 or (self.itemsize == 2 and self.length <= 4096):
            return 1  # 5865 sums of 2085 bfloat16 took 6.1 µs with two, so 5.0
        return 4 if self.itemsize == 8 else 2  # a warp has half a line of eight bytes at once

    def _along(self) -> tuple[int, int, int]:
        """Rows, columns and warps of a tile of rows one after the other."""
        size = chips.current().fold_tile
        if self.shifted and self.rows >= 64:
            # Each warp a row, as much of it at once as it can take: 5865 places of a maximum of 2085 took 24.5 µs on an H200 where
            # several warps met for each, so 10.3.
            if self.itemsize == 8:  # of long ones a program a row: 356 sums of 21310 took 19.6 µs, so 16.3
                return (8, 32, 8) if self.length <= 4096 else (1, 1024, 4)
            warps = 4 if self.length <= 4096 else 8
            return warps, 256 if self.length <= 1024 else _AT_ONCE // self.itemsize, warps
        if self.odd and self.length > 48:
            # Each warp its own rows, a line at a time: 27185 sums of 139 floats took 10.1 µs in tiles that hold them whole, so 4;
            # whether any of 19039 x 52 is true 7.5 and 2.0.
            return 16 if self.length <= 128 else 8, 32, 4
        if size < self.length <= 4 * size and self.rows >= 4 * chips.current().multiprocessors:
            return 1, size // 4, 4  # 2048 sums of 5120 bfloat16 took 4.3 µs, in tiles of four rows 5.9
        return self.whole

    @functools.cached_property
    def apiece(self) -> Way | None:
        """Of many even rows that would leave a tile of powers of two partly empty: a way on which each warp has its own, and none
        meets another (7281 sums of 2304 bfloat16 took 8.4 µs in tiles that hold one, so 5.4; places of a maximum 20.6 and 11.4;
        whether all of 8288 x 2160 are true 12.5 and 6.3)."""
        # A tile of bytes is cheap, and much of four bytes is no faster so: 30393 sums of 1104 floats took 31.2 µs, so 32.3.
        most = 0.8 if self.itemsize == 1 else 0.95
        light = self.itemsize <= 2 or (self.itemsize == 4 and self.length <= 1024 and not self.large)
        fits = 128 < self.length <= min(chips.current().fold_tile, most * next_power(self.length))
        if self.across or not (self.even and light and fits):
            return None
        if self.length <= 480 and self.rows >= 1 << 14:
            return Way(32, 32, 4, unroll=2)
        if self.length <= 1792 and self.rows >= 1 << 13:  # 4096 sums of 1280 took 3.4 µs so, as below 2.7
            return Way(16, 64, 4, unroll=2)
        return Way(4, 256, 4, unroll=2) if self.length > 480 and self.rows >= 2048 else None

    def _wide(self) -> Way:
        m, warps = self._wide_rows()
        if self.itemsize == 1 and (self.even or self.length <= 16):
            return Way(m, 1, warps, unroll=self.asked(9))
        # 40 x 421320 floats took 20.6 µs with 14 at once, so 17.6; 696 x 16 x 464 of int64 9.6 with 16, so 6.7.
        eight = self.itemsize == 8 and m == WIDE // 2
        few = self._few_warps or (self.even and (eight or (self.itemsize == 4 and self.large and self.length > 32)))
        return Way(m, 1, warps, unroll=self.asked(8 if few else 20 if self.itemsize == 1 else 16))

    def _wide_rows(self) -> tuple[int, int]:
        """Rows of a program, and its warps."""
        if not self.even:  # of single elements fewer for each thread, unless there are so few that starting programs takes longer
            if self.itemsize == 1 and self.length > 16:  # 40 x 302780 took 10.3 µs with 128, so 7.3
                return WIDE // 8, 2
            if self.length <= (2 if self.itemsize == 8 else 8):  # 8557 x 4 x 165 of int64 took 17.9 µs with 512, so 14.1
                return WIDE, 4
            few = self.rows < 1 << 17 or self.itemsize == 8  # 20 x 463023 of int64 25.9 and 20.0
            return WIDE // (4 if few else 2), 4
        if self.length <= 2:
            return 4 * WIDE, 8
        if self.itemsize == 8:
            # One for each thread: 24 x 424432 took 24.9 µs with two, so 21.4. But two where a cache nearly holds them: 34 x 141888
            # took 13.4 with one, so 7.3.
            return WIDE // (2 if self._held and self.rows >= 1 << 17 else 4), 4
        if self._few_warps:
            return WIDE // 2, 2
        # 17 x 646688 floats took 16.1 µs with four for a thread, with two 11.0; 25 x 171122, of which it takes two at once, 5.7 and
        # 3.7.
        return WIDE // 2 if self.rows < 1 << 17 or self.itemsize >= 4 else WIDE, 4

    @functools.cached_property
    def _few_warps(self) -> bool:
        """Whether fewer warps do better with very many rows, as long as a cache nearly holds them: 24 x 424432 floats took 11.6 µs
        with four, each thread with two rows, so 6.5; but 17 x 646688 10.3 and 15.6."""
        return self.even and self.large and self._held and self.itemsize == 4 and 2 < self.length <= 32

    @functools.cached_property
    def _held(self) -> bool:
        """Whether a cache nearly holds them, even as tiles go through it side by side."""
        return self._bytes <= 40 << 20

    @functools.cached_property
    def strips(self) -> bool:
        """Whether there are so many rows side by side that a program takes a narrow strip of them; elements of eight bytes only if
        there is much of them."""
        many = self.even and self.length > 32 and self.many and not self.wide
        return self.across and many and (self.itemsize < 8 or self.large)

    def _across(self) -> Way:
        size, processors = chips.current().fold_tile, chips.current().multiprocessors
        if self.paired:
            # 548 x 31222 bfloat16 took 9.9 µs one by one, so 6.8; but of more than fill the chip once smaller programs: 259 x 86108
            # took 12.0, so 8.6.
            return Way(64, 32, 4, unroll=2) if self.rows < 56000 else Way(64, 16, 2, unroll=2)
        if self.itemsize == 8:
            return self._usual(*self._doubles())
        if self.even and 32 < self.length <= 512 and self.rows >= 64 * processors and not self.large:
            return self._usual(32, 32, 4)  # 156 x 13648 halves took 5.3 µs, so 2.6
        if not self.even and self.rows > 8 and self.length > (32 if self.many and self.itemsize > 1 else 64):
            return self._singles()
        # Whole sectors, and few numbers for one program to join: 20.0 µs for 8192 x 4096 on an H200, with 64 or 128 20.8 and 24.4.
        m = min(next_power(self.rows), max(32, size // next_power(self.length) if self.length <= 64 else 1))
        n = max(1, min(next_power(self.length), size // m))
        return self._usual(m, n, 8 if m * n >= 4096 and (not self.even or blocks(self.rows, m) < 4 * processors) else 4)

    def _singles(self) -> Way:
        """Of single elements whole warps of neighbours: 413 x 26981 floats took 23.2 µs unshared, so 11.6. But few of them if there
        are few: 50000 x 100 floats took 10.5 µs so, 6.7 in tiles of 32 (11754 x 199 in those of 16 10.9, so 4.8)."""
        if self.rows < (1024 if self.itemsize > 1 else 256):  # 4000 x 1000 bfloat16 took 6.1 µs in tiles of 64, so 5.1
            return self._usual(*((16, 128, 4) if self.rows <= 16 else (32, 64, 4)))
        if self.beside < 64:  # 14359 x 90 x 20 of bool took 19.7 µs in tiles of 32, so 7.6
            return self._usual(*((64, 8, 2) if self.length <= 256 else (32, 64, 4)))
        if self.length <= 64 and self.itemsize == 4:
            return Way(128, 8, 4)  # 19 x 56 x 11015 floats took 11.8 µs in tiles of 64 by 16, so 7.8
        if self.length <= 64 and self.itemsize == 2:
            return Way(64, 8, 2, unroll=4)  # 40 x 302782 bfloat16 6.0 and 5.4
        return self._usual(64, 16, 2 if self.length <= 256 else 4)

    def _strips(self) -> Way:
        """One warp or two, so that few meet for each row: 150 x 140000 bfloat16 took 11.3 µs with four, so 7.8 (torch 8.0)."""
        fewer = self.rows < 1 << 16
        if self.itemsize == 8:  # 2955 x 100 x 16 maxima took 9.7 µs with one stage, so 6.8
            return Way(32, 8 if self.length <= 128 else 16, 2, stages=3)
        if 16 <= self.beside <= 32 and self.itemsize > 1:
            # 4630 x 382 x 16 floats took 35.8 µs with 64 rows, of four matrices; so 28.0.
            if self.itemsize == 2:
                return Way(32, 16, 2)
            if self.length <= 192 and self.beside > 16:
                return Way(64, 16, 2, unroll=2)  # 2000 x 100 x 20 floats took 5.6 µs in the tiles below, so 3.7
            return Way(16, 64, 2, unroll=2) if self.beside == 16 else Way(32, 32, 2, stages=3)
        slow = self.itemsize == 4 and not self.eights  # through shared memory: 290 x 40004 took 10.0 µs, so 8.2
        if self.length > (256 if slow else 400) and fewer:
            # 420 x 120000 bfloat16 took 31.4 µs so, as below 25.7; 600 x 20000 floats with one stage 11.0, so 9.4.
            return Way(32, 32, 4, stages=3) if self.itemsize == 4 and not slow else Way(32, 32, 4, unroll=4)
        if self.itemsize == 1:
            return Way(64, 8, 2, unroll=4)  # whether any of 400 x 70000 is true took 12.7 µs with one warp, so 7.4
        if self.rows >= 3 << 16 and self.itemsize == 2:
            return Way(128, 8, 2, unroll=4)  # 66 x 300000 took 10.6 µs with 64, so 8.6
        if self.itemsize == 4 and 64 < self.length <= 128 and (self._held or self.length > 96):
            # 360 x 120 x 208 took 7.6 µs in tiles of 8, so 6.5; 24 x 128 x 4004 12.7 and 10.2. But 112 x 70 x 1600 10.6 and 14.0.
            return Way(64, 16, 2, unroll=2)
        short = self.eights and not fewer and (self.itemsize == 2 or self.rows >= 1 << 17)
        if self.length <= (256 if short else 128) or (slow and self.length > 256):
            # 256 x 65536 halves took 7.2 µs in tiles of 16, so 6.1; 400 x 100004 floats 42.2 and 40.1.
            return Way(64, 8, 2, unroll=4 if self.itemsize == 2 else 1)
        # 400 x 70000 bfloat16 took 18.7 µs in tiles of 8, so 15.3; 250 x 90000 floats 24.0 and 22.9. Lines of which a thread may
        # take four at once are slower that way: 148 x 62444 floats 8.5 µs, so 6.1.
        return Way(64, 16, 2, stages=3) if self.eights else Way(64, 16, 2, unroll=2)

    def _doubles(self) -> tuple[int, int, int]:
        """Smaller tiles for elements of eight bytes, of which fewer fit into registers and on their way."""
        if self.even and self.rows >= 16:
            # 1000 x 2048 took 5.2 µs in tiles of 32 by 128, so 3.7; 64 x 50048 6.6, so 4.5. 186 x 15360 took 6.1 in tiles of 128,
            # so 4.3; but 2000 x 4096 16.9 and in tiles of 64 19.4.
            many = self.many or (self.rows >= 4096 and self.length <= 1024)
            return 16, min(64 if many else 128, next_power(self.length)), 4 if many else 8
        if self.rows >= 1024 and self.beside >= 64:
            # 10 x 1600 x 981 took 58 µs with four warps, so 34; 64 x 77 x 999 with eight 8.3, so 5.9.
            return 64, min(16, next_power(self.length)), 2
        if self.rows >= 1024:
            return 32, min(64, next_power(self.length)), 4
        m = min(16, next_power(self.rows))
        return m, max(1, min(1024 // m, next_power(self.length))), 8  # 524288 x 4 took 13.3 µs with four times as many, so 5.5

    @functools.cached_property
    def splits(self) -> int:
        """How many programs share a row, so that the whole chip works on a few long ones."""
        return self.measured[3] if self.measured else self.shares(*self.tile)

    def shares(self, m: int, n: int, each: int = 2) -> int:
        """The same for tiles of another size, of which a processor has at least so many if there is much to read."""
        processors = chips.current().multiprocessors
        tracks, tiles = blocks(self.rows, m), blocks(self.length, n)
        most = min(4 * processors // tracks, tiles, 1024)
        if self.wide or self.odd or m == 128:  # which short rows have
            return 1
        if self.across and not self.even and m == 64:
            # As many as fit, but none for little: 579 x 15477 floats took 11.7 µs unshared, by four 8.1; 200 x 25000 bfloat16 3.9
            # and by two 4.8.
            least = 32 if self.paired else 8 if tracks >= 2 * processors else 4
            return max(1, min(8 * processors // tracks, tiles // least, 1024))
        if most < 2:
            return 1
        if self.across and self.even:
            # As few as take hardly longer than any number: joining them costs, too (32768 x 64 9.6 µs with 512, with 64 4.4).
            fewest = max(1, min(most, each * processors // tracks)) if self.large else 1
            spent = {parts: blocks(parts * tracks, processors) * blocks(tiles, parts) for parts in range(fewest, most + 1)}
            return next(parts for parts, time in spent.items() if time <= 1.1 * min(spent.values()))
        if self.across or self.anywhere:
            return most
        # 100 rows of 50000 floats took 6.0 µs shared, so 4.5; smaller tiles of eight bytes leave room for more.
        few = 4 * tracks <= processors or self.itemsize == 8
        return max(1, min(most, blocks(tiles, 4), most if few else processors // tracks))

    @functools.cached_property
    def part(self) -> int:
        """Elements of a row that one of its programs folds: whole tiles."""
        n = self.tile[1]
        return blocks(blocks(self.length, self.splits), n) * n
