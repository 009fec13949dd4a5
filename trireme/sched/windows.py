"""Windows: each row's pages of layers that keep only the end of a sequence. Knows no queue and no prefix tree.

The page tables of windowed bands are as long as that of band 0, but a row holds only the pages at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from trireme.ipc.messages import BandSize
from trireme.sched.pages import Numbers, PagePool

MILESTONES = 8  # of a window's length: how finely a prompt can be branched off
Copy = tuple[int, int, int]  # band, from page, to page


class Begun(NamedTuple):
    """The pages with which a row begins in one band, and the place in its page table of the first of them."""

    band: int
    first: int
    pages: Numbers


class _Band:
    """The pages of one windowed band. Every row may always have `reserved` pages, and this is enough for it to go on."""

    def __init__(self, index: int, size: BandSize, max_rows: int):
        self.index, self.size, self.pool = index, size, PagePool(size.num_pages)
        self.pages: dict[int, Numbers] = {}  # by row
        self.first = np.zeros(max_rows, np.int64)  # where each row's pages begin in its table
        self.held, self.reserved = np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64)
        self.num_leased = 0  # pages that stand in leases, whether or not a row holds them too

    @property
    def spare(self) -> int:
        """How many pages are neither held by rows nor reserved for them. Only these may be kept in tails and leases."""
        return self.size.num_pages - int(np.maximum(self.held, self.reserved).sum())

    def lowest(self, length: int | np.ndarray) -> int | np.ndarray:
        """The first page of the table that a row still reads when it goes on after this many tokens."""
        keep = self.size.keep
        first = length // keep * keep if self.size.chunked else np.maximum(length - keep + 1, 0)
        return first // self.size.page_size

    def give(self, row: int, count: int) -> None:
        """Gives back the first pages of a row."""
        pages = self.pages[row]
        self.pool.give(pages[:count])
        del pages[:count]
        self.first[row] += count
        self.held[row] -= count


class Windows:
    def __init__(self, bands: Sequence[BandSize], page_size: int, max_rows: int):
        self.page_size = page_size
        self.bands = [_Band(index, size, max_rows) for index, size in enumerate(bands) if size.keep > 0]

        longest = max((band.size.keep for band in self.bands), default=0)
        self.apart = max(longest // MILESTONES // page_size, 1) * page_size

    def __bool__(self) -> bool:
        return bool(self.bands)

    def resumable(self, row: int) -> int:
        """A length from which on the row still holds what is needed to go on."""
        return max(int(band.first[row]) * self.page_size + (band.size.keep - 1 if band.first[row] else 0) for band in self.bands)

    def fits(self, length: int) -> bool:
        """Whether there are enough pages for one more row that may become this long."""
        return all(band.size.pages_of_row(length) <= band.spare - band.num_leased for band in self.bands)

    def open(self, row: int, length: int, spans: Sequence[Numbers], limit: int) -> tuple[list[Begun], list[Copy]]:
        """Starts a row after `length` tokens, whose pages are `spans`, by band. Whole pages are shared. Where the last one is not
        full, the row gets a page of its own, to which it must be copied. So one page must be free in every band.

        limit: the most tokens the row may have
        """
        begun, copies = [], []
        for band, span in zip(self.bands, spans, strict=True):
            held = span[:]
            if length % self.page_size:
                (held[-1],) = band.pool.take(1)
                copies.append((band.index, span[-1], held[-1]))
                band.pool.hold(held[:-1])
            else:
                band.pool.hold(held)
            band.pages[row], band.held[row] = held, len(held)
            band.first[row] = -(-length // self.page_size) - len(held)
            band.reserved[row] = band.size.pages_of_row(limit)
            begun.append(Begun(band.index, int(band.first[row]), held))
        return begun, copies

    def reach(self, row: int) -> int:
        """How many tokens the row can have with the pages it may get, if no lease is ended for it."""
        ends = [
            int(band.first[row] + np.maximum(band.held[row], band.reserved[row])) + band.spare - band.num_leased
            for band in self.bands
        ]
        return min(ends) * self.page_size

    def lacks(self, count: int) -> bool:
        """Whether fewer than `count` pages are free in some band."""
        return any(len(band.pool) < count for band in self.bands)

    def grow(self, rows: list[int]) -> list[tuple[int, Numbers]]:
        """Appends one page for each entry of `rows` in every band, where a row may occur several times. Returns them by band. So
        many pages must be free."""
        grown = []
        for band in self.bands:
            pages = band.pool.take(len(rows))
            for row, page in zip(rows, pages, strict=True):
                band.pages[row].append(page)
            np.add.at(band.held, rows, 1)
            grown.append((band.index, pages))
        return grown

    def slide(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """Gives back pages that have slid out of the window, now that this much of each row is computed. A row keeps what it needs
        to go on from its last whole page, where a tail may be left."""
        whole = computed // self.page_size * self.page_size
        for band in self.bands:
            passed = band.lowest(whole) - band.first[rows]
            for at in np.flatnonzero((passed > 0) & (band.held[rows] > 0)).tolist():
                band.give(int(rows[at]), min(int(passed[at]), int(band.held[rows[at]])))

    def trim(self, row: int, num_pages: int) -> None:
        """Gives back the row's pages after its first `num_pages`."""
        for band in self.bands:
            pages = band.pages[row]
            keep = max(num_pages - int(band.first[row]), 0)
            band.pool.give(pages[keep:])
            del pages[keep:]
            band.held[row] = len(pages)

    def spans(self, row: int, length: int) -> list[Numbers] | None:
        """The row's pages, by band, that are needed to go on after its first `length` tokens; None if it does not hold them all."""
        spans, end = [], -(-length // self.page_size)
        for band in self.bands:
            first = int(band.first[row])
            low, high = int(band.lowest(length)) - first, end - first
            if low < 0 or high > band.held[row]:
                return None
            spans.append(band.pages[row][low:high])
        return spans

    def hold(self, spans: Iterable[Numbers]) -> None:
        """Adds a holder to pages by band."""
        for band, pages in zip(self.bands, spans, strict=True):
            band.pool.hold(pages)

    def give(self, spans: Iterable[Numbers]) -> None:
        """Removes a holder from pages by band."""
        for band, pages in zip(self.bands, spans, strict=True):
            band.pool.give(pages)

    def close(self, row: int) -> None:
        """Gives back all pages of the row."""
        for band in self.bands:
            band.pool.give(band.pages.pop(row))
            band.held[row] = band.reserved[row] = band.first[row] = 0

    def check(self, others: Sequence[Sequence[Numbers]]) -> None:
        """Raises if a holder count is wrong or a row lacks its reserved pages.

        others: pages by band of each holder that is no row
        """
        for at, band in enumerate(self.bands):
            band.pool.check([*band.pages.values(), *(spans[at] for spans in others)])
            assert all(band.held[row] == len(pages) for row, pages in band.pages.items()), "held pages are miscounted"
            assert band.spare >= 0, f"rows were promised {-band.spare} pages of a window too many"
