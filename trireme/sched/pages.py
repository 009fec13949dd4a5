"""The page pool: how many holders each page of KV memory has (reference counts), and which pages are free. Knows page numbers only.

Rows, the prefix tree and leases hold pages, and may share one. A page is free when its last holder has given it back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

# Tokens and pages are kept in flat arrays: small, quick to compare, and without objects for the garbage collector to visit.
Numbers = array


def numbers(values: Iterable[int] = ()) -> Numbers:
    return array("q", values)


class PagePool:
    """A stack of free pages; the one freed last is taken first."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.holders = np.zeros(num_pages, np.int32)  # of each page
        self._free = numbers(range(num_pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> Numbers:
        """Takes `count` free pages, each with one holder. So many must be free."""
        assert 0 <= count <= len(self._free), f"took {count} pages of {len(self._free)} free"
        if not count:
            return numbers()
        taken = self._free[-count:]
        del self._free[-count:]
        self.holders[np.asarray(taken)] = 1
        return taken

    def hold(self, pages: Numbers) -> None:
        """Adds one holder to each of these pages. They must all be different, and not free."""
        at = np.asarray(pages)
        assert self.holders[at].all(), "held a page that is free"
        self.holders[at] += 1

    def give(self, pages: Numbers) -> None:
        """Removes one holder from each of these pages, which must all be different. Pages without a holder become free."""
        at = np.asarray(pages)
        left = self.holders[at] - 1
        assert (left >= 0).all(), "gave back a page that nobody holds"
        self.holders[at] = left
        self._free.frombytes(at[left == 0].tobytes())

    def num_alone(self, pages: Numbers) -> int:
        """How many of the leading pages have exactly one holder."""
        shared = self.holders[np.asarray(pages)] != 1
        return int(shared.argmax()) if shared.any() else len(pages)

    def free_pages(self) -> list[int]:
        return self._free.tolist()

    def check(self, held: Iterable[Numbers]) -> None:
        """Raises if the holder counts differ from the given holdings, or if a page without holder is not free.

        held: the pages of each holder
        """
        counted = np.zeros(self.num_pages, np.int32)
        for pages in held:
            assert len(set(pages)) == len(pages), "a holder holds a page twice"
            counted[np.asarray(pages)] += 1
        wrong = np.flatnonzero(counted != self.holders)
        assert not len(wrong), f"page {wrong[0]} has {counted[wrong[0]]} holders, counts {self.holders[wrong[0]]}"
        free = self.free_pages()
        assert sorted(free) == np.flatnonzero(counted == 0).tolist(), f"{len(free)} pages are free, {(counted == 0).sum()} unheld"
