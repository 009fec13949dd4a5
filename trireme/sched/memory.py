"""Who holds which page: the pool, the radix tree, one holding per row, and leases. Knows no queue and no step.

A page may have several holders: the tree, every row in whose page table it stands, every lease. Whoever holds a page that the
tree holds locks its node, so a page that can be evicted has the tree alone as its holder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trireme.sched.pages import Numbers, PagePool, numbers
from trireme.sched.radix import Match, Node, RadixTree, Root
from trireme.sched.states import NO_STATE
from trireme.sched.tails import Tail, Tails
from trireme.sched.windows import Begun, Copy, Windows

UNBOUNDED = 1 << 60  # tokens: the limit for a model without KV cache


class Holding:
    """Pages in the order of their tokens, held by a row or a lease. The radix tree has the tokens of the first `depth` pages, in
    the same pages or, `doubled`, in others."""

    __slots__ = ("depth", "doubled", "node", "pages", "root")

    def __init__(self, root: Root, node: Node | None, pages: Numbers, depth: int, doubled: bool = False):
        self.root, self.node, self.pages, self.depth, self.doubled = root, node, pages, depth, doubled


@dataclass(frozen=True, eq=False)
class Lease:
    """What a row has computed up to `length`, held for other rows to go on from, even when that row has ended."""

    holding: Holding
    length: int
    tail: Tail


@dataclass(frozen=True)
class Found:
    """What a new row need not compute: a cached prefix, or the part of its prompt that its group's lease holds."""

    length: int = 0  # tokens
    num_pages: int = 0  # whole pages, shared with other holders
    num_unlocked: int = 0  # how many of these pages could be evicted until they are locked
    match: Match | None = None
    spelled: int = 0  # tokens equal to cached ones; more than `length` if not all can be resumed
    lease: Lease | None = None


NOTHING = Found()


@dataclass(frozen=True)
class Opened:
    """With what a row begins: its pages by band, the copies that must be made of pages not full, and (row, place) of a state."""

    begun: list[Begun]
    copies: list[Copy]
    resumes: list[tuple[int, int]]


class Memory:
    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool, tails: Tails | None = None):
        self.page_size, self.num_pages = page_size, num_pages
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size) if prefix_cache else None
        self.holdings: dict[int, Holding] = {}  # by row
        self.leases: list[Lease] = []
        self.tails = Tails(Windows((), page_size, 0), None, 0, 0) if tails is None else tails
        self.windows = self.tails.windows

    @property
    def available(self) -> int:
        """How many pages can be allocated without pausing a request: free pages and evictable ones."""
        return len(self.pool) + (self.tree.num_evictable if self.tree else 0)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) if self.num_pages else 0

    def reach(self, row: int, num_held: int) -> int:
        """How many tokens a row could have with its own pages and all available ones."""
        reach = (num_held + self.available) * self.page_size if self.num_pages else UNBOUNDED
        return min(reach, self.windows.reach(row)) if self.windows else reach

    def match(self, root: Root, keys: Numbers) -> Found:
        """The cached prefix of `keys`, without the last key: at least one token is always computed. Changes nothing."""
        if self.tree is None:
            return NOTHING
        match = self.tree.match(root, keys, (len(keys) - 1) // self.page_size)
        spelled, resumed = len(match.pages) * self.page_size, self.tails.resume(match.pages)
        if resumed < len(match.pages):
            match = self.tree.match(root, keys, resumed)
        return Found(len(match.pages) * self.page_size, len(match.pages), match.num_unlocked, match, spelled)

    def leased(self, lease: Lease) -> Found:
        """What a lease holds, as a match."""
        return Found(lease.length, lease.length // self.page_size, lease=lease)

    def open(self, row: int, root: Root, found: Found, limit: int) -> Opened:
        """Starts a row's holdings with the matched pages. The row may have `limit` tokens at most."""
        match = found.match
        node = self.tree.lock(match) if self.tree and match else None
        pages = match.pages if match else numbers()
        self.pool.hold(pages)
        self.holdings[row] = Holding(root, node, pages, len(pages))
        return self._opened(row, found.length, self.tails.after(pages), limit)

    def grow(self, rows: list[int]) -> Numbers:
        """Appends one new page for each entry of `rows`, where a row may occur several times. So many pages must be available."""
        pages = self._take(len(rows))
        holdings = self.holdings
        for row, page in zip(rows, pages, strict=True):
            holdings[row].pages.append(page)
        return pages

    def share(self, row: int, keys: Numbers, num_computed: int) -> None:
        """Adds the row's computed whole pages to the tree while the row goes on using them.

        It stops at the first page that has another holder: every holder of a page in the tree must lock it.
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
        holding.node, holding.depth, holding.doubled = inserted.node, inserted.num_covered, True
        self.merge(row)
        if self.tails and holding.depth:
            self.tails.leave(row, holding.node.pages[-1], holding.depth * self.page_size)
            for length in self.tails.milestones(row, holding.depth * self.page_size):
                self.tails.leave_aside(row, self._cached_page(holding, length // self.page_size - 1), length)

    @staticmethod
    def _cached_page(holding: Holding, at: int) -> int:
        """The tree's page in the place of a holding's page, which may be another that spells the same."""
        node, begin = holding.node, holding.depth
        while node is not None:
            begin -= len(node.pages)
            if at >= begin:
                return int(node.pages[at - begin])
            node = node.parent
        raise AssertionError(f"page {at} of a row is not in the tree")

    def merge(self, row: int) -> None:
        """Puts the row's own pages into the tree in the place of others that spell the same and that nobody else holds. Those
        become free: the row would keep them from eviction without using them."""
        holding = self.holdings[row]
        node, end, holding.doubled = holding.node, holding.depth, False
        while node is not None and node.pages:
            begin = end - len(node.pages)
            for at in range(begin, end) if node.pages != holding.pages[begin:end] else ():
                theirs, ours = node.pages[at - begin : at - begin + 1], holding.pages[at : at + 1]
                if theirs == ours:
                    continue
                if self.pool.num_alone(theirs + ours) < 2:
                    holding.doubled = True
                    continue
                node.pages[at - begin] = ours[0]
                self.pool.hold(ours)
                self.pool.give(theirs)
                self.tails.rename(theirs[0], ours[0])
            node, end = node.parent, begin

    def merge_all(self) -> None:
        """Does so for all rows, where it was not possible before."""
        for row, holding in self.holdings.items():
            if holding.doubled:
                self.merge(row)

    def fork(self, lease: Lease, row: int, limit: int) -> Opened:
        """Starts a row's holdings from a lease. Whole pages are shared. The last page, if it is not full, must be copied to a new
        page, and one must be available for it."""
        length, whole = lease.length, lease.length // self.page_size
        self.holdings[row] = self._second(lease.holding, whole)
        copies = [(0, lease.holding.pages[whole], self.grow([row])[0])] if whole * self.page_size < length else []
        if copies:
            enough = self.tails.make_room(1)
            assert enough, "a row was let in beside leases that leave no page of a window for it"
        opened = self._opened(row, length, lease.tail, limit)
        return Opened(opened.begun, copies + opened.copies, opened.resumes)

    def _opened(self, row: int, length: int, tail: Tail, limit: int) -> Opened:
        """The pages and the state of a row whose holding of band 0 exists."""
        begun, copies = self.windows.open(row, length, tail.spans, limit)
        if tail.state != NO_STATE and self.tails.states is not None:
            self.tails.states.read(row, length, tail.state)
        resumes = [(row, tail.state)] if tail.state != NO_STATE else []
        return Opened([Begun(0, 0, self.holdings[row].pages), *begun], copies, resumes)

    def trim(self, row: int, length: int) -> int:
        """Gives back the row's pages after `length`; returns how many are left."""
        holding, keep = self.holdings[row], self.pages_for(length)
        if keep < holding.depth and self.tree and holding.node is not None:
            node = self.tree.lock(self.tree.above(holding.node, holding.depth - keep))
            self.tree.unlock(holding.node)
            holding.node, holding.depth = node, keep
        self.pool.give(holding.pages[keep:])
        del holding.pages[keep:]
        self.windows.trim(row, keep)
        return len(holding.pages)

    def lease(self, row: int, length: int) -> Lease | None:
        """Leases what the row has up to `length`: it stays after the row has ended, until `release`. None if the row has not got
        all that is needed to go on there."""
        tail = self.tails.lease(row, length)
        if tail is None:
            return None
        self.leases.append(Lease(self._second(self.holdings[row], self.pages_for(length)), length, tail))
        return self.leases[-1]

    def release(self, lease: Lease) -> None:
        """Ends a lease."""
        self.leases.remove(lease)
        self.tails.end(lease.tail)
        self._give(lease.holding)

    def close(self, row: int, keys: Numbers, num_computed: int, keep: bool) -> None:
        """Ends a row's holding. With `keep`, its computed whole pages stay in the tree for later requests."""
        if keep:
            self.share(row, keys, num_computed)
        self.tails.close(row)
        self._give(self.holdings.pop(row))

    def check(self) -> None:
        """Raises if a page's holder count is wrong, or if an evictable page has a holder other than the tree."""
        self.pool.check(self._held())
        self.tails.check({page for node in self.tree.nodes() for page in node.pages} if self.tree else set())
        if self.tree is None:
            return
        self.tree.check()
        for node in self.tree.nodes():
            alone = self.pool.num_alone(node.pages) == len(node.pages)
            assert node.locks or alone, "a page that can be evicted has another holder than the tree"

    def _held(self) -> Iterator[Numbers]:
        yield from (node.pages for node in (self.tree.nodes() if self.tree else ()))
        yield from (holding.pages for holding in (*self.holdings.values(), *(lease.holding for lease in self.leases)))

    def _second(self, first: Holding, num_pages: int) -> Holding:
        """Makes a second holding of the first pages of an existing one."""
        pages, depth, node = first.pages[:num_pages], min(first.depth, num_pages), first.node
        if self.tree and node is not None:
            node = self.tree.lock(self.tree.above(node, first.depth - depth))
        self.pool.hold(pages)
        return Holding(first.root, node, pages, depth, first.doubled)

    def _give(self, holding: Holding) -> None:
        self.pool.give(holding.pages)
        if self.tree and holding.node is not None:
            self.tree.unlock(holding.node)

    def _take(self, count: int) -> Numbers:
        lacking = count - len(self.pool)
        if lacking > 0 and self.tree:
            evicted = self.tree.evict(lacking)
            self.tails.forget(evicted)
            self.pool.give(evicted)
        return self.pool.take(count)
