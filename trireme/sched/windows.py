"""Windows: each row's pages of sliding-window layers, and tails: window pages that are kept where a cached prompt can be resumed.

The page tables of windowed bands are as long as that of band 0, but a row holds only the pages at the end. Knows no queue; of the
prefix tree it knows only the pages after which there is a tail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from trireme.ipc.messages import BandSize
from trireme.sched.pages import Numbers, PagePool, numbers


class _Band:
    """The pages of one windowed band. Every row may always have `reserved` pages, and this is enough for it to go on."""

    def __init__(self, index: int, size: BandSize, max_rows: int):
        self.index, self.size, self.pool = index, size, PagePool(size.num_pages)
        self.pages: dict[int, Numbers] = {}  # by row
        self.first = np.zeros(max_rows, np.int64)  # where each row's pages begin in its table
        self.held, self.reserved = np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64)

    @property
    def spare(self) -> int:
        """How many pages are neither held by rows nor reserved for them. Only these may be kept in tails."""
        return self.size.num_pages - int(np.maximum(self.held, self.reserved).sum())

    def lowest(self, num_pages: int | np.ndarray) -> int | np.ndarray:
        """The first page of the table that a row still reads when it goes on after this many pages."""
        return np.maximum((num_pages * self.size.page_size - self.size.keep + 1) // self.size.page_size, 0)

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
        self.tails: OrderedDict[int, list[Numbers]] = OrderedDict()  # by the page of band 0 at whose end it is: pages by band
        # By row, the length at which its prompt begins to differ from earlier ones: a tail is wanted there.
        self.branch = np.zeros(max_rows, np.int64)

    def __bool__(self) -> bool:
        return bool(self.bands)

    def resume(self, pages: Numbers) -> int:
        """How many of these pages of band 0, from the first, can be resumed: the last of them has a tail."""
        if not self.bands:
            return len(pages)
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self.tails), 0)

    def fits(self, length: int) -> bool:
        """Whether there are enough pages for one more row that may become this long."""
        return all(band.size.pages_of_row(length) <= band.spare for band in self.bands)

    def open(self, row: int, pages: Numbers, length: int, branch: int) -> list[tuple[int, int, Numbers]]:
        """Starts a row after these pages of band 0. If there are any, there must be a tail after them. Returns the pages with which
        it begins, as (band, first page of the table, pages).

        length: the most tokens the row may have; branch: how many tokens it shares with others, if more than these pages hold
        """
        tail = self.tails[pages[-1]] if pages and self.bands else []
        if tail:
            self.tails.move_to_end(pages[-1])
        begun = []
        for at, band in enumerate(self.bands):
            held = tail[at][:] if tail else numbers()
            band.pool.hold(held)
            band.pages[row], band.held[row] = held, len(held)
            band.first[row] = len(pages) - len(held)
            band.reserved[row] = band.size.pages_of_row(length)
            begun.append((band.index, int(band.first[row]), held))
        self.branch[row] = branch
        return begun

    def reach(self, row: int) -> int:
        """How many tokens the row can have with the pages it may get."""
        ends = [
            int(band.first[row] + band.held[row] + max(band.reserved[row] - band.held[row], 0)) + band.spare for band in self.bands
        ]
        return min(ends) * self.page_size

    def cut(self, row: int, start: int, count: int) -> int:
        """How many tokens of a prompt's chunk to compute at once: the chunk is cut where a tail is wanted."""
        branch = int(self.branch[row])
        return branch - start if start < branch < start + count else count

    def grow(self, rows: list[int]) -> list[tuple[int, Numbers]]:
        """Appends one page for each entry of `rows` in every band, where a row may occur several times. Returns them by band."""
        grown = []
        for band in self.bands:
            while len(band.pool) < len(rows):
                assert self.tails, f"{len(rows)} pages of a window are wanted, {len(band.pool)} are free, and no tail holds any"
                self._drop(next(iter(self.tails)))
            pages = band.pool.take(len(rows))
            for row, page in zip(rows, pages, strict=True):
                band.pages[row].append(page)
            np.add.at(band.held, rows, 1)
            grown.append((band.index, pages))
        return grown

    def slide(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """Gives back pages that have slid out of the window, now that this much of each row is computed. Keeps a tail's pages."""
        for band in self.bands:
            passed = band.lowest(computed // self.page_size) - band.first[rows]
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

    def leave(self, row: int, page: int, count: int) -> None:
        """Keeps a tail after the row's first `count` pages, if the row holds enough of them. `page` is the last one in the tree."""
        if page in self.tails:
            self.tails.move_to_end(page)
            return
        spans = []
        for band in self.bands:
            first = int(band.first[row])
            low, high = int(band.lowest(count)) - first, count - first
            if low < 0 or high > band.held[row]:
                return
            spans.append(band.pages[row][low:high])
        for band, span in zip(self.bands, spans, strict=True):
            band.pool.hold(span)
        self.tails[page] = spans

    def forget(self, pages: Iterable[int]) -> None:
        """Drops the tails of pages that the tree has evicted."""
        for page in pages:
            if page in self.tails:
                self._drop(page)

    def close(self, row: int) -> None:
        """Gives back all pages of the row."""
        for band in self.bands:
            band.pool.give(band.pages.pop(row))
            band.held[row] = band.reserved[row] = band.first[row] = 0

    def check(self, cached: set[int]) -> None:
        """Raises if a holder count is wrong, a tail's page is not in the tree, or a row lacks its reserved pages."""
        assert self.tails.keys() <= cached, "a tail at the end of a page that the tree does not hold"
        for at, band in enumerate(self.bands):
            band.pool.check([*band.pages.values(), *(tail[at] for tail in self.tails.values())])
            assert all(band.held[row] == len(pages) for row, pages in band.pages.items()), "held pages are miscounted"
            assert band.spare >= 0, f"rows were promised {-band.spare} pages of a window too many"

    def _drop(self, page: int) -> None:
        for band, pages in zip(self.bands, self.tails.pop(page), strict=True):
            band.pool.give(pages)
