"""The page pool: which pages of KV memory nobody holds. Knows pages as numbers, never what is in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

# Tokens and pages are kept as flat numbers: small, quick to compare, and nothing for the garbage collector to walk.
Numbers = array


def numbers(values: Iterable[int] = ()) -> Numbers:
    return array("q", values)


class PagePool:
    """A stack of free pages; the one freed last is taken first."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = numbers(range(num_pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> Numbers:
        """Removes `count` free pages; there must be as many."""
        assert 0 <= count <= len(self._free), f"took {count} pages of {len(self._free)} free"
        if not count:
            return numbers()
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Puts pages back."""
        self._free.extend(pages)

    def free_pages(self) -> list[int]:
        return self._free.tolist()
