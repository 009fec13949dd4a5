"""Tails: what layers that do not keep every token need to go on from a point: pages of their windows, and a state.

They stand at the ends of cached prefixes, which can be resumed only there, and in leases. Of the prefix tree this knows only the
pages after which there is a tail; of rows, where a tail is wanted.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from trireme.sched.pages import Numbers, numbers
from trireme.sched.states import NO_STATE, States
from trireme.sched.windows import Windows


class Tail(NamedTuple):
    spans: list[Numbers]  # by windowed band
    state: int  # its kept place


class Tails:
    """spacing: how many tokens may lie between two kept states of a sequence, in whole pages; 0: there is no prefix cache"""

    def __init__(self, windows: Windows, states: States | None, max_rows: int, spacing: int):
        self.windows, self.states, self.spacing = windows, states, spacing
        self.by_page: OrderedDict[int, Tail] = OrderedDict()  # the page of band 0 at whose end it is; least recently used first
        self._leased: list[Tail] = []
        self._points: dict[int, list[int]] = {}  # by row: lengths at which a tail is wanted, ascending
        self._next = np.zeros(max_rows, np.int64)  # the first of them; 0: none

    def __bool__(self) -> bool:
        """Whether there are layers that do not keep every token."""
        return bool(self.windows) or self.states is not None

    # ---- where a prefix can be resumed

    def resume(self, pages: Numbers) -> int:
        """How many of these pages of band 0, from the first, can be resumed: the last of them has a tail."""
        if not self:
            return len(pages)
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self.by_page), 0)

    def after(self, pages: Numbers) -> Tail:
        """The tail after these pages of band 0; there must be one."""
        if not (self and pages):
            return Tail([numbers() for _ in self.windows.bands], NO_STATE)
        self.by_page.move_to_end(pages[-1])
        return self.by_page[pages[-1]]

    def leave(self, row: int, page: int, length: int) -> None:
        """Keeps a tail after the row's first `length` tokens, if the row still has what is needed. `page` is the last one of them
        in the tree."""
        if page in self.by_page:
            self.by_page.move_to_end(page)
        elif (tail := self._of(row, length)) is not None:
            self.by_page[page] = tail

    def milestones(self, row: int, length: int) -> range:
        """Lengths up to `length` at which a row with windows also leaves tails, where another prompt may branch off. They cost no
        page beside those that the row would slide past, and are the first to be dropped."""
        if self.states is not None or not self.windows:
            return range(0)
        apart, first = self.windows.apart, self.windows.resumable(row)
        return range(-(-max(first, 1) // apart) * apart, length, apart)

    def leave_aside(self, row: int, page: int, length: int) -> None:
        """As `leave`, for a milestone."""
        if page not in self.by_page and (tail := self._of(row, length)) is not None:
            self.by_page[page] = tail
            self.by_page.move_to_end(page, last=False)

    def rename(self, page: int, other: int) -> None:
        """Notes that another page has taken the place of a page in the tree."""
        if page in self.by_page:
            self.by_page[other] = self.by_page.pop(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Drops the tails of pages that the tree has evicted."""
        for page in pages:
            if page in self.by_page:
                self._drop(page)

    def make_room(self, count: int) -> bool:
        """Drops tails until so many pages are free in every windowed band; returns whether they are."""
        while self.by_page and self.windows.lacks(count):
            self._drop(next(iter(self.by_page)))
        return not self.windows.lacks(count)

    # ---- leases

    def lease(self, row: int, length: int) -> Tail | None:
        """The row's tail after `length` tokens, held until `end`; None if the row has not got all of it."""
        tail = self._of(row, length)
        if tail is not None:
            self._leased.append(tail)
            for band, span in zip(self.windows.bands, tail.spans, strict=True):
                band.num_leased += len(span)
        return tail

    def end(self, tail: Tail) -> None:
        """Ends a lease."""
        self._leased.remove(tail)
        for band, span in zip(self.windows.bands, tail.spans, strict=True):
            band.num_leased -= len(span)
        self._give(tail)

    # ---- rows

    def want(self, row: int, start: int, length: int, branch: int, fork_at: int) -> None:
        """Notes where tails are wanted in a row that begins at `start`: where it branches off a cached prefix, where others of its
        group will go on, and for states also at the last whole page of the `length` tokens it has, and in between.

        branch, fork_at: 0 if there is no such point
        """
        points = {branch}
        if self.states is not None:
            points.add(fork_at)
            if self.spacing:
                points.update(range(start + self.spacing, length, self.spacing))
                points.add((length - 1) // self.windows.page_size * self.windows.page_size)
        found = sorted(point for point in points if point > start)
        if found:
            self._points[row], self._next[row] = found, found[0]

    def cut(self, row: int, start: int, count: int) -> int:
        """How many tokens of a prompt's chunk to compute at once: the chunk is cut where a tail is wanted."""
        points = self._points.get(row, ())
        at = bisect_right(points, start)
        return min(count, points[at] - start) if at < len(points) else count

    def keep(self, row: int, length: int) -> list[tuple[int, int]]:
        """(row, place) for the state after `length` tokens of the row, with which a step will end; nothing if it is not wanted
        there or no place can be had."""
        if self.states is None or length not in self._points.get(row, ()):
            return []
        while self.by_page and not len(self.states.pool):
            self._drop(next(iter(self.by_page)))
        return [(row, self.states.take(row, length))] if len(self.states.pool) else []

    def keep_generating(self, rows: np.ndarray, scheduled: np.ndarray) -> list[tuple[int, int]]:
        """The same for rows that generate one token each: the states of a long answer are kept at the same distance."""
        if self.states is None or not self.spacing:
            return []
        kept = []
        for at in np.flatnonzero((scheduled + 1) % self.spacing == 0):
            row, length = int(rows[at]), int(scheduled[at]) + 1
            points = self._points.setdefault(row, [])
            insort(points, length)
            self._next[row] = points[0]
            kept += self.keep(row, length)
        return kept

    def steps_before(self, scheduled: np.ndarray) -> int:
        """How many steps of one token these lengths are away from the next step whose states are to be kept."""
        if self.states is None or not self.spacing:
            return 1 << 30
        return int((self.spacing - 1 - scheduled % self.spacing).min())

    def reached(self, rows: np.ndarray, ends: np.ndarray) -> list[int]:
        """Those of the rows that have been computed up to a point where a tail is wanted."""
        first, reached = self._next[rows], []
        for at in np.flatnonzero((first > 0) & (first <= ends)).tolist():
            row, end = int(rows[at]), int(ends[at])
            points = self._points[row]
            passed = bisect_right(points, end)
            if points[passed - 1] == end:
                reached.append(row)
            del points[:passed]
            self._next[row] = points[0] if points else 0
        return reached

    def slide(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """Gives back what these rows do not need any more, now that this much of each is computed."""
        self.windows.slide(rows, computed)
        if self.states is not None and self.states.held:
            for row, length in zip(rows.tolist(), computed.tolist(), strict=True):
                self.states.slide(row, length)

    def close(self, row: int) -> None:
        """Gives back all that the row holds."""
        self._points.pop(row, None)
        self._next[row] = 0
        self.windows.close(row)
        if self.states is not None:
            self.states.close(row)

    def check(self, cached: set[int]) -> None:
        """Raises if a holder count is wrong, or if a tail's page is not in the tree."""
        assert self.by_page.keys() <= cached, "a tail at the end of a page that the tree does not hold"
        tails = [*self.by_page.values(), *self._leased]
        self.windows.check([tail.spans for tail in tails])
        if self.states is not None:
            self.states.check([tail.state for tail in tails if tail.state != NO_STATE])

    def _of(self, row: int, length: int) -> Tail | None:
        """The row's tail after `length` tokens, with one holder more; None if the row has not got all of it."""
        spans = self.windows.spans(row, length)
        state = self.states.at(row, length) if self.states is not None and length else NO_STATE
        if spans is None or (self.states is not None and length and state == NO_STATE):
            return None
        self.windows.hold(spans)
        if state != NO_STATE and self.states is not None:
            self.states.pool.hold(numbers([state]))
        return Tail(spans, state)

    def _drop(self, page: int) -> None:
        self._give(self.by_page.pop(page))

    def _give(self, tail: Tail) -> None:
        self.windows.give(tail.spans)
        if tail.state != NO_STATE and self.states is not None:
            self.states.pool.give(numbers([tail.state]))
