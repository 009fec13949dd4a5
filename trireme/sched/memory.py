"""Who holds which page: the pool, the radix tree, one holding per row, and leases. Knows no queue and no step.

A page may have several holders: the tree, every row in whose page table it stands, every lease. Whoever holds a page that the
tree holds locks its node, so a page that can be evicted has the tree alone as its holder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trireme.sched.pages import Numbers, PagePool, numbers
from trireme.sched.radix import Match, Node, RadixTree, Root
from trireme.sched.windows import Windows

Copy = tuple[int, int, int]  # band, from page, to page
UNBOUNDED = 1 << 60  # tokens, of a model that keeps nothing of them


class Holding:
    """Pages in the order of their tokens, held by a row or a lease. The tree spells the first `depth` of them, by pages of its own
    where it knew them before."""

    __slots__ = ("depth", "node", "pages", "root")

    def __init__(self, root: Root, node: Node | None, pages: Numbers, depth: int):
        self.root, self.node, self.pages, self.depth = root, node, pages, depth


@dataclass(frozen=True)
class Found:
    """What a newcomer need not compute: a cached prefix, or what a lease of its group holds."""

    length: int = 0  # tokens
    num_pages: int = 0  # whole pages, which others hold too
    num_unlocked: int = 0  # of them, those that could be evicted as long as nobody locks them
    match: Match | None = None
    spelled: int = 0  # tokens that agree with cached ones: more than `length` where the rest cannot be resumed
    lease: Holding | None = None


NOTHING = Found()


class Memory:
    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool, windows: Windows | None = None):
        self.page_size, self.num_pages = page_size, num_pages
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size) if prefix_cache else None
        self.holdings: dict[int, Holding] = {}  # by row
        self.leases: list[Holding] = []
        self.windows = Windows((), page_size, 0) if windows is None else windows

    @property
    def available(self) -> int:
        """Pages that can be had without pausing anybody."""
        return len(self.pool) + (self.tree.num_evictable if self.tree else 0)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) if self.num_pages else 0

    def reach(self, row: int, num_held: int) -> int:
        """How many tokens a row has room for with the pages it holds and all that are available."""
        reach = (num_held + self.available) * self.page_size if self.num_pages else UNBOUNDED
        return min(reach, self.windows.reach(row)) if self.windows else reach

    def match(self, root: Root, keys: Numbers) -> Found:
        """The cached prefix of `keys`, short of the last one: a full hit still computes one. Changes nothing."""
        if self.tree is None:
            return NOTHING
        match = self.tree.match(root, keys, (len(keys) - 1) // self.page_size)
        spelled, resumed = len(match.pages) * self.page_size, self.windows.resume(match.pages)
        if resumed < len(match.pages):
            match = self.tree.match(root, keys, resumed)
        return Found(len(match.pages) * self.page_size, len(match.pages), match.num_unlocked, match, spelled)

    def leased(self, lease: Holding, length: int) -> Found:
        """The first `length` tokens of what a lease holds."""
        return Found(length, length // self.page_size, lease=lease)

    def open(self, row: int, root: Root, found: Found) -> Numbers:
        """Starts a row's holding with the matched pages; returns them."""
        match = found.match
        node = self.tree.lock(match) if self.tree and match else None
        pages = match.pages if match else numbers()
        self.pool.hold(pages)
        self.holdings[row] = Holding(root, node, pages, len(pages))
        return pages

    def grow(self, rows: list[int]) -> Numbers:
        """Appends one new page to each of `rows` (a row may stand there several times); as many must be available."""
        pages = self._take(len(rows))
        holdings = self.holdings
        for row, page in zip(rows, pages, strict=True):
            holdings[row].pages.append(page)
        return pages

    def share(self, row: int, keys: Numbers, num_computed: int) -> None:
        """Gives the row's computed whole pages to the tree while the row goes on using them.

        Only as far as nobody else holds them: a page of the tree must be locked by all its holders.
        """
        if self.tree is None:
            return
        holding = self.holdings[row]
        full = num_computed // self.page_size
        end = holding.depth + self.pool.num_alone(holding.pages[holding.depth : full])
        inserted = self.tree.insert(holding.root, keys[: end * self.page_size], holding.pages[:end])
        self.tree.lock_node(inserted.node)
        if holding.node is not None:
            self.tree.unlock(holding.node)
        self.pool.hold(holding.pages[end - inserted.num_new : end])
        holding.node, holding.depth = inserted.node, inserted.num_covered
        if self.windows and holding.depth:
            self.windows.leave(row, holding.node.pages[-1], holding.depth)

    def fork(self, parent: Holding, row: int, length: int) -> list[Copy]:
        """Starts a row's holding with what another holds up to `length`. Both hold the whole pages; the one that is not full is to
        be copied to a new page, which must be available."""
        whole = length // self.page_size
        self.holdings[row] = self._second(parent, whole)
        if whole * self.page_size == length:
            return []
        return [(0, parent.pages[whole], self.grow([row])[0])]

    def trim(self, row: int, length: int) -> int:
        """Gives back the row's pages behind `length`; returns how many are left."""
        holding, keep = self.holdings[row], self.pages_for(length)
        if keep < holding.depth and self.tree and holding.node is not None:
            node = self.tree.lock(self.tree.above(holding.node, holding.depth - keep))
            self.tree.unlock(holding.node)
            holding.node, holding.depth = node, keep
        self.pool.give(holding.pages[keep:])
        del holding.pages[keep:]
        self.windows.trim(row, keep)
        return len(holding.pages)

    def lease(self, row: int, length: int) -> Holding:
        """Holds the row's pages up to `length` beyond the row's own end, until `release`."""
        self.leases.append(self._second(self.holdings[row], self.pages_for(length)))
        return self.leases[-1]

    def release(self, lease: Holding) -> None:
        """Ends a lease."""
        self.leases.remove(lease)
        self._give(lease)

    def close(self, row: int, keys: Numbers, num_computed: int, keep: bool) -> None:
        """Ends a row's holding. With `keep`, its computed whole pages stay in the tree for whoever comes next."""
        if keep:
            self.share(row, keys, num_computed)
        self.windows.close(row)
        self._give(self.holdings.pop(row))

    def check(self) -> None:
        """Raises unless every page has the holders that are counted, and those that can be evicted no other than the tree."""
        self.pool.check(self._held())
        self.windows.check({page for node in self.tree.nodes() for page in node.pages} if self.tree else set())
        if self.tree is None:
            return
        self.tree.check()
        for node in self.tree.nodes():
            alone = self.pool.num_alone(node.pages) == len(node.pages)
            assert node.locks or alone, "a page that can be evicted has another holder than the tree"

    def _held(self) -> Iterator[Numbers]:
        yield from (node.pages for node in (self.tree.nodes() if self.tree else ()))
        yield from (holding.pages for holding in (*self.holdings.values(), *self.leases))

    def _second(self, first: Holding, num_pages: int) -> Holding:
        """A second holding of the first pages of another."""
        pages, depth, node = first.pages[:num_pages], min(first.depth, num_pages), first.node
        if self.tree and node is not None:
            node = self.tree.lock(self.tree.above(node, first.depth - depth))
        self.pool.hold(pages)
        return Holding(first.root, node, pages, depth)

    def _give(self, holding: Holding) -> None:
        self.pool.give(holding.pages)
        if self.tree and holding.node is not None:
            self.tree.unlock(holding.node)

    def _take(self, count: int) -> Numbers:
        lacking = count - len(self.pool)
        if lacking > 0 and self.tree:
            evicted = self.tree.evict(lacking)
            self.windows.forget(evicted)
            self.pool.give(evicted)
        return self.pool.take(count)
