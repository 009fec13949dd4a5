"""The scheduler's columns, with one entry for each row (batch slot): the place of one running sequence in the workers' tables.

Knows lengths, never tokens or pages' numbers.

For every row in use:  computed <= scheduled <= total.  `total` counts the tokens known and those being sampled now.
They are numpy columns, so that planning a step of a thousand rows takes a few array operations.
"""

from __future__ import annotations

import numpy as np

from trireme.ipc.messages import AHEAD
from trireme.sched.request import NO_ROW, Task


class FixedColumns:
    """The columns that do not change as long as a task has the row."""

    def __init__(self, capacity: int):
        self.key = np.zeros(capacity, np.int64)  # the row's place in the order
        self.known = np.zeros(capacity, np.int64)  # tokens at admission; when so many are computed, the prompt is done
        self.need = np.zeros(capacity, np.int64)  # how many positions will ever be computed
        self.max_total = np.zeros(capacity, np.int64)
        self.num_prompt = np.zeros(capacity, np.int64)
        self.matched = np.zeros(capacity, np.int64)  # pages taken over at admission: from the cache or from the row's group
        self.draw = np.zeros(capacity, np.float64)


class Rows:
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.tasks: list[Task | None] = [None] * capacity
        self.order = np.empty(0, np.int64)  # rows in use, in the scheduling order
        self._free = list(range(capacity - 1, -1, -1))
        self._released: list[int] = []  # rows given back that the workers have not yet been told of
        self.fixed = FixedColumns(capacity)
        self.computed = np.zeros(capacity, np.int64)
        self.scheduled = np.zeros(capacity, np.int64)
        self.total = np.zeros(capacity, np.int64)
        self.num_pages = np.zeros(capacity, np.int64)  # in the page table
        self.scoring = np.zeros(capacity, bool)  # prompt logprobs are wanted and not yet delivered
        self.waits = np.zeros(capacity, bool)  # the row waits for its answer: these workers must be told what was sampled
        self.epoch = np.zeros(capacity, np.int64)  # how often the row has changed hands
        self.changes = 0  # how often any row has changed hands

    def __len__(self) -> int:
        return len(self.order)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, task: Task, computed: int, num_matched: int) -> int:
        """Gives the task a row. `computed` tokens of it are computed already; `num_matched` of its pages have other holders too."""
        row = self._free.pop()
        self.changes += 1
        task.row, self.tasks[row] = row, task
        fixed, order, key = self.fixed, self.order, task.arrival.key
        self.computed[row] = self.scheduled[row] = computed
        self.total[row] = fixed.known[row] = len(task.tokens)
        fixed.need[row], fixed.max_total[row] = task.need, task.max_total
        fixed.num_prompt[row], fixed.draw[row] = task.num_prompt, task.arrival.draw
        self.num_pages[row] = fixed.matched[row] = num_matched
        self.scoring[row] = not task.scores.done
        fixed.key[row] = key
        at = np.searchsorted(fixed.key[order], key)
        self.order = np.concatenate((order[:at], (row,), order[at:]))
        return row

    def wanted(self) -> np.ndarray:
        """How many tokens of each row in use are still to be computed, in the scheduling order."""
        order = self.order
        wanted = np.minimum(self.total[order], self.fixed.need[order]) - self.scheduled[order]
        if self.waits.any():
            unknown = (self.scheduled[order] >= self.fixed.known[order]) & (self.scheduled[order] > self.computed[order])
            wanted[self.waits[order] & unknown] = 0
        return wanted

    def drafts(self, rows: np.ndarray, most: int) -> np.ndarray:
        """How many drafts each of these rows may carry: none before it has sampled here, and none beyond its end or beyond what
        windows have pages for, of which a part is left for the single tokens of further steps."""
        ahead = AHEAD * 3 // 4 - 1 - (self.scheduled[rows] - self.computed[rows])
        room = np.minimum(np.minimum(self.fixed.max_total[rows] - self.total[rows] - 1, ahead), most)
        sampled = (self.scheduled[rows] >= self.fixed.known[rows]) & ~self.waits[rows]
        return np.where(sampled, np.maximum(room, 0), 0)

    def give(self, task: Task) -> int:
        """Frees the task's row."""
        row = task.row
        self.tasks[row] = None
        task.row = NO_ROW
        self.epoch[row] += 1
        self.changes += 1
        self.order = self.order[self.order != row]
        self._free.append(row)
        self._released.append(row)
        return row

    def take_released(self) -> list[int]:
        """The rows given back since the last call."""
        released, self._released = self._released, []
        return released
