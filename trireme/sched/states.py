"""Kept states: places for the states of recurrent layers at points where a sequence may be gone on from. Knows no tokens.

Every row has places of its own for its newest state, of which nothing is said here. A state that others shall go on from is written
to a kept place instead, by the step that ends there, and is never copied: the row's next step reads it there.
"""

from __future__ import annotations

from trireme.sched.pages import Numbers, PagePool, numbers

NO_STATE = -1


class States:
    def __init__(self, num_places: int):
        self.pool = PagePool(num_places)
        # By row: the kept places of its states, by how many tokens the state has seen. A row holds them until the step that reads
        # them is answered.
        self.held: dict[int, dict[int, int]] = {}

    def take(self, row: int, length: int) -> int:
        """A free place for the row's state after `length` tokens. One must be free."""
        (place,) = self.pool.take(1)
        self._put(row, length, place)
        return place

    def read(self, row: int, length: int, place: int) -> None:
        """Notes that the row goes on from this place after `length` tokens."""
        self.pool.hold(numbers([place]))
        self._put(row, length, place)

    def at(self, row: int, length: int) -> int:
        """The place of the row's state after `length` tokens; NO_STATE if it is not kept."""
        return self.held.get(row, {}).get(length, NO_STATE)

    def slide(self, row: int, computed: int) -> None:
        """Gives back the places that the row has gone on from."""
        kept = self.held.get(row, {})
        for length in [length for length in kept if length < computed]:
            self.pool.give(numbers([kept.pop(length)]))
        if not kept:
            self.held.pop(row, None)

    def close(self, row: int) -> None:
        """Gives back all places of the row."""
        for place in self.held.pop(row, {}).values():
            self.pool.give(numbers([place]))

    def check(self, others: list[int]) -> None:
        """Raises if a holder count is wrong.  others: the places of tails and leases"""
        held: list[Numbers] = [numbers([place]) for kept in self.held.values() for place in kept.values()]
        self.pool.check([*held, *(numbers([place]) for place in others)])

    def _put(self, row: int, length: int, place: int) -> None:
        kept = self.held.setdefault(row, {})
        assert length not in kept, f"row {row} keeps its state after {length} tokens already"
        kept[length] = place
