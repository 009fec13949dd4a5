"""How products of few rows are cut, and which of them are left to torch: tiles, parts of the sum, warps, stages.
Knows sizes and the chip's figures; nothing of tensors or kernels.
Shapes are rows x summed elements x columns, after a batch's items."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from trireme.kernels import chips
from trireme.kernels.launch import blocks, next_power

_SPLITS_MOST = 16
# What measurements try: columns and summed elements of a tile, warps, stages.
_TILES = [(32, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 3), (128, 128, 4, 3)]
_COPIED = [(32, 256, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 4), (128, 64, 4, 3), (128, 64, 4, 5), (256, 128, 4, 3)]
_SMALL = [(16, 64, 2, 3), (16, 128, 2, 3), (32, 64, 4, 3), (32, 128, 2, 4), (64, 32, 2, 2), (64, 64, 4, 1), (128, 16, 4, 2)]
_LANES = [(2, 1024, 4, 2), (4, 512, 4, 2), (8, 512, 8, 2), (8, 256, 4, 2), (16, 256, 4, 2), (2, 2048, 8, 2)]
_LANES_ACROSS = [(16, 128, 4, 2), (32, 32, 1, 2), (32, 128, 4, 2), (64, 16, 2, 2), (128, 16, 1, 2), (512, 4, 2, 2)]


class Few(NamedTuple):
    """A product of few rows: `along`: the streamed matrices are contiguous along the summed dimension; `copyable`: descriptors may
    bring their tiles; `size`: bytes of an element."""

    items: int
    rows: int
    n: int
    k: int
    along: bool
    size: int
    copyable: bool

    @property
    def longest(self) -> int:
        """The longest tile that may be copied: across the summed dimension of a batch one that ends with its item."""
        return self.k & -self.k if self.items > 1 and not self.along else 1 << 30

    @property
    def copied(self) -> bool:
        return self.copyable and self.size == 2 and self.longest >= min(64, max(16, next_power(self.k)))

    @property
    def by_lanes(self) -> bool:
        """Whether each lane sums its own columns, where tiles for the tensor cores would be nearly empty: of one row, and of two to
        four past lines whose elements come one by one."""
        items, rows, n, k, along, size, _ = self
        if rows > 1:
            return along and rows <= 4 and size == 2 and not self.copyable and k > 192 and (k % 8 > 0 or rows * n <= 20)
        if along:
            fit = items * blocks(n, 64) <= chips.current().multiprocessors
            return items == 1 or k % 8 > 0 or n <= 8 or k <= 16 or (k >= 512 and fit)
        return items > 1 and (n <= 16 or k <= 32 or n % 8 > 0 or k % 8 > 0)

    def cut(self) -> dict[str, Any]:
        """The rule: so many tiles that every processor has about one program, or two where much is to be read at once."""
        if chips.current().interpreted:
            splits = 2 if self.k > 64 else 1
            return _config(max(16, min(64, next_power(self.n))), max(16, min(512, next_power(self.k))), splits, 4, 1)
        if self.by_lanes:
            return self._lanes()
        return self._copies() if self.copied else self._pointers()

    def _parts(self, tile_n: int, programs: int, least: int, most: int) -> int:
        """Programs that share a sum: so many in all, each with `least` elements and more."""
        return max(1, min(programs // (self.items * blocks(self.n, tile_n)), self.k // least, most))

    def _lanes(self) -> dict[str, Any]:
        """About 2048 elements at once: as much of the summed dimension as there is if lines lie along it, else of the columns."""
        n, k, several = self.n, self.k, 4 * chips.current().multiprocessors
        if self.along:
            longest = 2048 if k >= 8192 else 1024 if k >= 2048 else 512 if k >= 512 else 256
            tile_k = min(max(16, next_power(k)), longest if self.rows == 1 else 512)
            held = 4096 if tile_k == 2048 else 2048 if self.items == 1 or k >= 512 else 1024
            tile_n = max(1, min(held // (tile_k * (1 if self.rows == 1 else 2)), next_power(n)))
            warps = 8 if held == 4096 else 4 if held == 2048 else 1
            return _config(tile_n, tile_k, self._parts(tile_n, several // 2, 2 * tile_k, _SPLITS_MOST), warps, 2)
        width, depth = max(8, next_power(n)), max(2, next_power(k))
        if k <= 32:
            return _config(min(128, width), min(16, depth), 1, 1, 2)
        if width <= 16:
            return _config(width, min(depth, 2048 // width), self._parts(width, several, 256, _SPLITS_MOST), 4, 2)
        return _config(32, min(128, depth), self._parts(32, several, 384, _SPLITS_MOST), 4, 2)

    def _copies(self) -> dict[str, Any]:
        """Tiles that descriptors bring. Where narrow ones fit the chip at once, a program has its processor alone and all shared
        memory in flight; else wide ones, which read the few rows less often."""
        chip, room, k = chips.current(), max(16, next_power(self.rows)), self.k
        tile_n = min(64, max(16, next_power(self.n)))
        tiles, tile_k = self.items * blocks(self.n, tile_n), min(self.longest, max(16, next_power(k)))
        if tiles <= chip.multiprocessors:
            if tiles <= 8 and k >= 2048:
                tile_n = min(32, tile_n)
            most = 8 if tiles <= 8 else 4 if room == 16 else 3
            parts = self._parts(tile_n, chip.multiprocessors, 512 if tiles < 32 else 1024, most)
            tile_k = min(tile_k, 128 if blocks(k, parts) % 256 else 256)
            stages = max(2, min(4, blocks(k, tile_k) - 1, chip.shared_memory // ((tile_n + room) * tile_k * 2)))
            return _config(tile_n, tile_k, parts, 4 if tile_n == 64 else 2, stages, True)
        if tile_n < 64 or k <= 128:
            width = min(128, max(16, next_power(self.n)))
            return _config(width, min(tile_k, 64), 1, 1 if width <= 32 else 4, 2 if k <= 128 else 3, True)
        if k <= 1600 or tile_k < 128:
            return _config(128 if self.items * blocks(self.n, 128) > chip.multiprocessors else 64, min(tile_k, 64), 1, 4, 3, True)
        # Of narrow and wide tiles those that leave less of the last round of programs idle; two narrow ones lie on a processor.
        wide = (256, 128) if self.along else (128, 64)
        rounds = {(64, 128): tiles / (2 * chip.multiprocessors), wide: self.items * blocks(self.n, wide[0]) / chip.multiprocessors}
        idle = {shape: math.ceil(count) / count for shape, count in rounds.items()}
        return _config(*min(idle, key=lambda shape: idle[shape]), 1, 4, 3, True)

    def _pointers(self) -> dict[str, Any]:
        """Tiles by plain loads, of lines that no descriptor takes, or of items too small for one."""
        processors, n, k = chips.current().multiprocessors, self.n, self.k
        if self.size == 4:
            return _config(64, 64, self._parts(64, 2 * processors, 128, _SPLITS_MOST), 4, 4)
        if self.items == 1:
            if blocks(n, 64) <= 40:
                return _config(32, 128, self._parts(32, 4 * processors, 144, 8), 4, 2)
            return _config(64, 64, self._parts(64, 4 * processors, 600, 8), 4, 3)
        height = min(64, max(16, next_power(n)))
        tile_k = min(32 if k <= 256 else 64, max(16, next_power(k)))
        if height < 64:
            return _config(height, tile_k, self._parts(height, 3 * processors, 384, 4), 1 if k <= 256 else 2, 2 if k <= 256 else 3)
        if k <= 128 and n > 128:
            return _config(128, min(tile_k, 32), 1, 4, 2)
        return _config(64, tile_k, self._parts(64, processors, 384, 4), 4, 2 if k <= 256 else 3)

    def candidates(self) -> list[dict[str, Any]]:
        """What is worth timing; parts follow from how many programs the columns give."""
        processors, result = chips.current().multiprocessors, []
        copied = [(cut, True) for cut in _COPIED if self.copied and cut[1] <= self.longest]
        plain = (_LANES if self.along else _LANES_ACROSS) if self.by_lanes else [*_TILES, *(_SMALL if self.items > 1 else [])]
        for (a, b, warps, stages), by_copies in itertools.chain(((cut, False) for cut in plain), [] if self.by_lanes else copied):
            if self.by_lanes and self.rows * a * b > 8192:
                continue
            once = self._parts(a, processors, 2 * b, _SPLITS_MOST)
            for parts in dict.fromkeys((1, once, self._parts(a, 2 * processors, 2 * b, _SPLITS_MOST))):
                result.append(_config(a, b, parts, warps, stages, by_copies))
        return result

    def ours(self, line: int) -> bool:
        """Whether these kernels are to do it; `line`: elements from one line of a matrix to the next. Torch's take 16 bytes at once
        where sizes are multiples of 8; ours by descriptors, or where lines begin at multiples of 16 elements."""
        items, rows, n, k, along, size, copyable = self
        suits_torch = n % 8 == k % 8 == line % 8 == 0
        if items == 1 and rows == 1:
            return along or (copyable and n > 512 and (size == 2 or k >= 1024))
        if items == 1:
            many = rows > 16 or (along and 2 * blocks(n, 64) > chips.current().multiprocessors)
            long = rows > 16 and 128 < n <= 2048 and k >= 8192
            return not (long or (many and suits_torch and line % 16 > 0))
        if not suits_torch or k <= (600 if rows <= 16 else 256) or (rows <= 16 and n <= 448 and k <= 2048):
            return True
        return (self.copied and n > 32) if rows > 16 else self.copied or line % 16 == 0


def _config(n: int, k: int, splits: int, warps: int, stages: int, copied: bool = False) -> dict[str, Any]:
    return {"N": n, "K": k, "splits": splits, "warps": warps, "stages": stages} | ({"copied": True} if copied else {})
