"""The radix tree against a plain dict that maps every cached whole-page prefix to its last page."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from trireme.sched.pages import numbers
from trireme.sched.radix import Node, RadixTree, Root

SEQUENCES = st.lists(st.integers(0, 2), max_size=14)
SALTS = st.sampled_from([Root(), Root("tenant"), Root(adapter="law"), Root(version=1)])


class TreeAgainstDict(RuleBasedStateMachine):
    """`model[salt, prefix] = page` for every cached whole-page prefix."""

    locks = Bundle("locks")

    @initialize(page_size=st.sampled_from([1, 2, 3]))
    def begin(self, page_size: int) -> None:
        self.tree, self.size = RadixTree(page_size), page_size
        self.model: dict[tuple[Root, tuple[int, ...]], int] = {}
        self.locked: list[tuple[Node, Root, tuple[int, ...]]] = []
        self.next_page = 0

    def _prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    @rule(salt=SALTS, tokens=SEQUENCES)
    def insert(self, salt: Root, tokens: list[int]) -> None:
        prefixes = self._prefixes(tokens)
        pages = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(pages)
        inserted = self.tree.insert(salt, numbers(tokens[: len(pages) * self.size]), numbers(pages))
        known = [(salt, prefix) in self.model for prefix in prefixes]
        assert inserted.num_covered == len(pages)
        assert inserted.num_new == known.count(False)
        for prefix, page in zip(prefixes, pages, strict=True):
            self.model.setdefault((salt, prefix), page)

    @rule(salt=SALTS, tokens=SEQUENCES, limit=st.integers(0, 14))
    def match(self, salt: Root, tokens: list[int], limit: int) -> None:
        expected = self._cached(salt, tokens)[:limit]
        assert list(self.tree.match(salt, numbers(tokens), limit).pages) == expected

    @rule(target=locks, salt=SALTS, tokens=SEQUENCES)
    def lock(self, salt: Root, tokens: list[int]) -> tuple[Node, Root, tuple[int, ...]]:
        match = self.tree.match(salt, numbers(tokens), len(tokens))
        held = (self.tree.lock(match), salt, tuple(tokens[: len(match.pages) * self.size]))
        self.locked.append(held)
        return held

    @rule(held=locks)
    def unlock(self, held: tuple[Node, Root, tuple[int, ...]]) -> None:
        if any(one is held for one in self.locked):
            self.locked = [one for one in self.locked if one is not held]
            self.tree.unlock(held[0])

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        evictable = self.tree.num_evictable
        freed = set(self.tree.evict(count))
        assert len(freed) == min(count, evictable)
        gone = [key for key, page in self.model.items() if page in freed]
        assert len(gone) == len(freed), "evicted a page that was not cached"
        for key in gone:
            del self.model[key]
        for salt, prefix in gone:
            longer = [other for s, other in self.model if s == salt and other[: len(prefix)] == prefix]
            assert not longer, "evicted from the middle"

    def _cached(self, salt: Root, tokens: list[int]) -> list[int]:
        pages = []
        for prefix in self._prefixes(tokens):
            if (salt, prefix) not in self.model:
                break
            pages.append(self.model[salt, prefix])
        return pages

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check()
        assert self.tree.num_pages == len(self.model)
        held = {(salt, prefix) for _, salt, tokens in self.locked for prefix in self._prefixes(list(tokens))}
        assert held <= set(self.model), "a locked page was evicted"
        assert self.tree.num_locked == len(held)


TreeAgainstDict.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestTreeAgainstDict = TreeAgainstDict.TestCase


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=2, max_size=6, unique_by=tuple))
def test_eviction_takes_the_least_recently_used_first(sequences: list[list[int]]) -> None:
    tree = RadixTree(4)
    for page, tokens in enumerate(sequences):
        tree.insert(Root(), numbers(tokens), numbers([page]))
    tree.unlock(tree.lock(tree.match(Root(), numbers(sequences[0]), 1)))  # the first is now the latest used
    assert list(tree.evict(len(sequences))) == [*range(1, len(sequences)), 0]


def test_a_match_changes_nothing() -> None:
    tree = RadixTree(2)
    tree.insert(Root(), numbers([1, 2, 3, 4]), numbers([7, 8]))
    nodes = [(list(node.tokens), node.locks, node.stamp) for node in tree.nodes()]
    assert list(tree.match(Root(), numbers([1, 2, 9, 9]), 2).pages) == [7]
    assert nodes == [(list(node.tokens), node.locks, node.stamp) for node in tree.nodes()]


def test_a_digest_that_lies_is_not_believed(monkeypatch) -> None:
    """Two first pages under one digest: the second is neither matched with the first nor put in its place."""
    tree = RadixTree(2)
    monkeypatch.setattr(tree, "_digest", lambda tokens, at: b"always the same")
    tree.insert(Root(), numbers([1, 2]), numbers([0]))
    assert not tree.match(Root(), numbers([3, 4]), 1).pages
    inserted = tree.insert(Root(), numbers([3, 4]), numbers([1]))
    assert inserted.num_covered == 0 and not inserted.num_new
    tree.check()


def test_digests_differ_from_boot_to_boot() -> None:
    assert RadixTree(2)._digest(numbers([1, 2]), 0) != RadixTree(2)._digest(numbers([1, 2]), 0)
