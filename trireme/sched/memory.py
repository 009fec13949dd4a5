"""Who holds which page: the pool, the radix tree, and one holding per row. Knows no queue and no step.

A row's page table, page by page:  [0, matched) found in the tree | [matched, covered) given to the tree, or kept as a
duplicate of what it already had | [covered, end) the row's own.  free + cached + owned == total, always.
"""

from __future__ import annotations

from trireme.sched.pages import Numbers, PagePool, numbers
from trireme.sched.radix import Match, Node, RadixTree


class Holding:
    """The pages of one row."""

    __slots__ = ("duplicates", "node", "num_covered", "pages", "salt")

    def __init__(self, salt: str, node: Node | None, pages: Numbers):
        self.salt, self.node, self.pages = salt, node, pages
        self.num_covered = len(pages)
        self.duplicates = numbers()

    @property
    def num_owned(self) -> int:
        return len(self.pages) - self.num_covered + len(self.duplicates)


class Memory:
    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool):
        self.page_size, self.num_pages = page_size, num_pages
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size) if prefix_cache else None
        self.holdings: dict[int, Holding] = {}

    @property
    def available(self) -> int:
        """Pages that can be had without pausing anybody."""
        return len(self.pool) + (self.tree.num_evictable if self.tree else 0)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, salt: str, tokens: Numbers) -> Match | None:
        """The cached prefix of `tokens`, short of the last token: a full hit still computes one. Changes nothing."""
        if self.tree is None:
            return None
        return self.tree.match(salt, tokens, (len(tokens) - 1) // self.page_size)

    def open(self, row: int, salt: str, match: Match | None) -> Numbers:
        """Starts a row's holding with the matched pages, which it locks."""
        node = self.tree.lock(match) if self.tree and match else None
        pages = match.pages if match else numbers()
        self.holdings[row] = Holding(salt, node, pages)
        return pages

    def grow(self, rows: list[int]) -> Numbers:
        """Appends one new page to each of `rows` (a row may stand there several times); as many must be available."""
        pages = self._take(len(rows))
        holdings = self.holdings
        for row, page in zip(rows, pages, strict=True):
            holdings[row].pages.append(page)
        return pages

    def share(self, row: int, tokens: Numbers, num_computed: int) -> int:
        """Gives the row's computed whole pages to the tree while the row goes on using them; returns how many it brought."""
        holding = self.holdings[row]
        if self.tree is None:
            return 0
        full = num_computed // self.page_size
        before = self.tree.num_pages
        inserted = self.tree.insert(holding.salt, tokens[: full * self.page_size], holding.pages[:full])
        self.tree.lock_node(inserted.node)
        if holding.node is not None:
            self.tree.unlock(holding.node)
        holding.node, holding.num_covered, holding.duplicates = inserted.node, inserted.num_covered, inserted.duplicates
        return self.tree.num_pages - before

    def close(self, row: int, tokens: Numbers, num_computed: int, keep: bool) -> None:
        """Ends a row's holding. With `keep`, its computed whole pages stay in the tree for whoever comes next."""
        if keep:
            self.share(row, tokens, num_computed)
        holding = self.holdings.pop(row)
        self.pool.give(holding.duplicates)
        self.pool.give(holding.pages[holding.num_covered :])
        if self.tree and holding.node is not None:
            self.tree.unlock(holding.node)

    def check(self) -> None:
        """Raises unless every page is free, cached or owned, and only one of them."""
        cached = [page for node in self.tree.nodes() for page in node.pages] if self.tree else []
        owned = [page for holding in self.holdings.values() for page in holding.pages[holding.num_covered :]]
        owned += [page for holding in self.holdings.values() for page in holding.duplicates]
        free = self.pool.free_pages()
        numbers = f"{len(free)} free + {len(cached)} cached + {len(owned)} owned, {self.num_pages} in all"
        assert len(free) + len(cached) + len(owned) == self.num_pages, f"pages do not add up: {numbers}"
        assert len(set(free) | set(cached) | set(owned)) == self.num_pages, f"a page is held twice: {numbers}"
        if self.tree:
            self.tree.check()

    def _take(self, count: int) -> Numbers:
        lacking = count - len(self.pool)
        if lacking > 0 and self.tree:
            self.pool.give(self.tree.evict(lacking))
        return self.pool.take(count)
