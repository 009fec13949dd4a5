"""The scheduler's columns: one entry per row of the workers' tables. Knows lengths, never tokens or pages' numbers.

For every row in use:  computed <= scheduled <= total.  `total` counts the tokens known and those being sampled now.
Columns, so that a step of a thousand rows is a few array operations.
"""

from __future__ import annotations

import numpy as np

from trireme.sched.request import NO_ROW, Task


class Rows:
    def __init__(self, capacity: int):
        self.capacity = capacity
        self.tasks: list[Task | None] = [None] * capacity
        self.order = np.empty(0, np.int64)  # rows in use, first to go first
        self._free = list(range(capacity - 1, -1, -1))
        self.computed = np.zeros(capacity, np.int64)
        self.scheduled = np.zeros(capacity, np.int64)
        self.total = np.zeros(capacity, np.int64)
        self.known = np.zeros(capacity, np.int64)  # tokens at admission: when they are computed, the prompt is
        self.need = np.zeros(capacity, np.int64)  # positions that will ever be computed
        self.max_total = np.zeros(capacity, np.int64)
        self.num_prompt = np.zeros(capacity, np.int64)
        self.num_pages = np.zeros(capacity, np.int64)  # in the page table
        self.matched = np.zeros(capacity, np.int64)  # of them, those that others held before: cached, or of the row's group
        self.scoring = np.zeros(capacity, bool)  # prompt logprobs are wanted and not yet delivered
        self.waits = np.zeros(capacity, bool)  # a sampled token is told to the workers: no step before its answer has come
        self.draw = np.zeros(capacity, np.float64)
        self.epoch = np.zeros(capacity, np.int64)  # how often the row has changed hands
        self._key = np.zeros(capacity, np.int64)
        self.changes = 0  # how often any row has changed hands

    def __len__(self) -> int:
        return len(self.order)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, task: Task, computed: int, num_matched: int) -> int:
        """Seats the task. So much of it is computed already; the pages that others hold too are `num_matched`."""
        row = self._free.pop()
        self.changes += 1
        task.row, self.tasks[row] = row, task
        known = len(task.tokens)
        self.computed[row] = self.scheduled[row] = computed
        self.total[row] = self.known[row] = known
        self.need[row], self.max_total[row] = task.need, task.max_total
        self.num_prompt[row], self.draw[row] = task.num_prompt, task.draw
        self.num_pages[row] = self.matched[row] = num_matched
        self.scoring[row] = not task.scored
        self._key[row] = task.key
        order = self.order
        at = np.searchsorted(self._key[order], task.key)
        self.order = np.concatenate((order[:at], (row,), order[at:]))
        return row

    def wanted(self) -> np.ndarray:
        """How many tokens each row in use wants to have computed, in their order."""
        order = self.order
        wanted = np.minimum(self.total[order], self.need[order]) - self.scheduled[order]
        if self.waits.any():
            unknown = (self.scheduled[order] >= self.known[order]) & (self.scheduled[order] > self.computed[order])
            wanted[self.waits[order] & unknown] = 0
        return wanted

    def drafts(self, rows: np.ndarray, most: int) -> np.ndarray:
        """How many drafts each of these rows may carry: none before it has sampled here, and none beyond its end."""
        room = np.minimum(self.max_total[rows] - self.total[rows] - 1, most)
        sampled = (self.scheduled[rows] >= self.known[rows]) & ~self.waits[rows]
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
        return row
