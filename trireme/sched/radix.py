"""The radix tree (prefix cache): which cached pages hold the KV of which tokens. Knows page numbers, never memory.

Edges are whole pages. Everything that KV depends on beside the tokens is part of the root, so no tenant ever sees another's pages.
A child is found by a keyed hash of its first page, with a key drawn at start, and is used only if its tokens are equal too.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from trireme.sched.pages import Numbers, numbers


class Root(NamedTuple):
    """What the KV of a prefix depends on, beside its tokens."""

    salt: str = ""  # of the tenant; different salts share no pages
    adapter: str = ""  # a name that follows from the adapter's content
    version: int = 0  # of the weights


class Node:
    """A run of pages below its parent. `locks` counts the holders of this node or of any node under it."""

    __slots__ = ("children", "digest", "locks", "pages", "parent", "stamp", "tokens")

    def __init__(self, parent: Node | None, digest: bytes | Root, tokens: Numbers, pages: Numbers):
        self.parent, self.tokens, self.pages = parent, tokens, pages
        self.digest = digest  # its key in the parent's table, or in the tree's table of roots
        self.children: dict[bytes | Root, Node] = {}
        self.locks = 0
        self.stamp = 0


@dataclass(frozen=True)
class Match:
    """A cached prefix: its pages, the node that holds the last of them, and how many of that node's pages belong to it."""

    pages: Numbers
    node: Node
    within: int
    num_unlocked: int  # how many of the pages could be evicted until they are locked


@dataclass(frozen=True)
class Inserted:
    """The node at the end of an inserted prefix, how many pages the tree covers, and how many of the last given pages it took."""

    node: Node
    num_covered: int
    num_new: int


class RadixTree:
    def __init__(self, page_size: int, key: bytes | None = None):
        self.page_size = page_size
        self._key = key or secrets.token_bytes(32)
        self._roots: dict[Root, Node] = {}  # only roots that have children
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # a heap; outdated entries are dropped when they come up
        self._pushes = 0
        self.num_pages = 0
        self.num_locked = 0
        self.num_nodes = 0

    @property
    def num_evictable(self) -> int:
        return self.num_pages - self.num_locked

    def match(self, root: Root, tokens: Numbers, max_pages: int) -> Match:
        """The longest cached prefix of `tokens`. Changes nothing; lock the match before relying on it."""
        node = self._roots.get(root)
        pages = numbers()
        unlocked = within = 0
        if node is None:
            return Match(pages, Node(None, root, numbers(), numbers()), 0, 0)
        limit = max_pages * self.page_size
        while (child := node.children.get(self._digest(tokens, len(pages) * self.page_size))) is not None:
            common = self._common(child, tokens, len(pages) * self.page_size, limit)
            if not common:
                break
            node, within = child, common
            pages += child.pages[:common]
            unlocked += 0 if child.locks else common
            if common < len(child.pages) or len(pages) >= max_pages:
                break
        return Match(pages, node, within, unlocked)

    def lock(self, match: Match) -> Node:
        """Keeps the matched pages from eviction; returns the node to unlock later."""
        node = match.node
        if match.within < len(node.pages):
            node = self._split(node, match.within)
        self.lock_node(node)
        return node

    def lock_node(self, node: Node) -> None:
        self._clock += 1
        at: Node | None = node
        while at is not None:
            if not at.locks:
                self.num_locked += len(at.pages)
            at.locks += 1
            at.stamp = self._clock
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Takes one lock off the node and all above it."""
        at: Node | None = node
        while at is not None:
            assert at.locks > 0, "unlocked a node that nobody had locked"
            at.locks -= 1
            if not at.locks:
                self.num_locked -= len(at.pages)
                self._offer(at)
            at = at.parent

    def insert(self, root: Root, tokens: Numbers, pages: Numbers) -> Inserted:
        """Adds the pages that `tokens` fill. For a prefix that the tree already has, it keeps its own pages."""
        self._clock += 1
        size = self.page_size
        node = self._roots.get(root) or Node(None, root, numbers(), numbers())
        covered = num_new = 0
        while covered < len(pages):
            digest = self._digest(tokens, covered * size)
            child = node.children.get(digest)
            if child is None:
                node = self._grow(node, digest, tokens[covered * size : len(pages) * size], pages[covered:])
                covered, num_new = len(pages), len(pages) - covered
                break
            common = self._common(child, tokens, covered * size, len(pages) * size)
            if not common:
                break  # hash collision: two first pages have one digest, and the new one is not cached
            covered += common
            node = child if common == len(child.pages) else self._split(child, common)
            node.stamp = self._clock
            self._offer(node)
        return Inserted(node, covered, num_new)

    def above(self, node: Node, num_pages: int) -> Match:
        """The match that ends this many pages before the end of a node."""
        while num_pages >= len(node.pages) and node.parent is not None:
            num_pages -= len(node.pages)
            node = node.parent
        return Match(numbers(), node, len(node.pages) - num_pages, 0)

    def evict(self, count: int) -> Numbers:
        """Evicts up to `count` unlocked pages, least recently used leaves first, each from its end; returns the pages."""
        freed = numbers()
        while len(freed) < count and self._leaves:
            stamp, _, node = heapq.heappop(self._leaves)
            if stamp != node.stamp or node.locks or node.children or not node.pages:
                continue
            keep = max(0, len(node.pages) - (count - len(freed)))
            freed += node.pages[keep:]
            self.num_pages -= len(node.pages) - keep
            if keep:
                del node.pages[keep:], node.tokens[keep * self.page_size :]
                self._offer(node)
            else:
                self._drop(node)
        return freed

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, in no order."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raises if the counts disagree with the nodes."""
        nodes = list(self.nodes())
        pages = [page for node in nodes for page in node.pages]
        locked = sum(len(node.pages) for node in nodes if node.locks)
        assert len(pages) == len(set(pages)) == self.num_pages, f"tree holds {len(pages)} pages, counts {self.num_pages}"
        assert locked == self.num_locked, f"tree has {locked} locked pages, counts {self.num_locked}"
        assert len(nodes) == self.num_nodes, f"tree has {len(nodes)} nodes, counts {self.num_nodes}"
        assert all(root.children for root in self._roots.values()), "a root without children was not dropped"
        for node in nodes:
            assert node.pages and len(node.tokens) == len(node.pages) * self.page_size, "a node without whole pages"
            assert node.parent is not None and node.parent.children.get(node.digest) is node, "a node its parent does not know"
            assert node.locks >= max((child.locks for child in node.children.values()), default=0), "a lock not passed upwards"

    def _digest(self, tokens: Numbers, at: int) -> bytes:
        return blake2b(tokens[at : at + self.page_size].tobytes(), digest_size=16, key=self._key).digest()

    def _common(self, node: Node, tokens: Numbers, at: int, end: int) -> int:
        """How many leading pages of the node agree with tokens[at:end]."""
        size = self.page_size
        high = min(len(node.pages), (end - at) // size)
        if node.tokens[: high * size] == tokens[at : at + high * size]:
            return high
        low = 0  # invariant: the first `low` pages agree, the first `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            if node.tokens[low * size : middle * size] == tokens[at + low * size : at + middle * size]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: Node, at: int) -> Node:
        """Cuts the node after `at` pages; returns the new upper part, which takes the node's place and its locks."""
        cut = at * self.page_size
        upper = Node(node.parent, node.digest, node.tokens[:cut], node.pages[:at])
        upper.locks, upper.stamp = node.locks, node.stamp
        assert node.parent is not None
        node.parent.children[node.digest] = upper
        node.digest = self._digest(node.tokens, cut)
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[at:]
        upper.children[node.digest] = node
        self.num_nodes += 1
        return upper

    def _grow(self, parent: Node, digest: bytes, tokens: Numbers, pages: Numbers) -> Node:
        node = parent.children[digest] = Node(parent, digest, tokens, pages)
        node.stamp = self._clock
        if parent.parent is None:
            assert isinstance(parent.digest, Root)
            self._roots[parent.digest] = parent
        self.num_pages += len(pages)
        self.num_nodes += 1
        self._offer(node)
        return node

    def _drop(self, node: Node) -> None:
        """Removes an empty leaf, and also its root if that has no other child."""
        parent = node.parent
        assert parent is not None
        node.pages, node.tokens = numbers(), numbers()
        del parent.children[node.digest]
        self.num_nodes -= 1
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            assert isinstance(parent.digest, Root)
            del self._roots[parent.digest]

    def _offer(self, node: Node) -> None:
        """Adds the node to the heap for eviction if it is an unlocked leaf."""
        if node.locks or node.children or node.parent is None:
            return
        self._pushes += 1
        heapq.heappush(self._leaves, (node.stamp, self._pushes, node))
        if len(self._leaves) > 4 * self.num_nodes + 64:
            leaves = [leaf for leaf in self.nodes() if not leaf.children and not leaf.locks]
            self._leaves = [(leaf.stamp, i, leaf) for i, leaf in enumerate(leaves)]
            heapq.heapify(self._leaves)
