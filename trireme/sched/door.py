"""The door (admission check): whether the next request in the queue fits beside the running batch.

Knows lengths; the policy has the last word. A door is made from the scheduler's columns for each step that admits requests. Every
admission adds one entry to it, so that a step that admits many stays cheap.
"""

from __future__ import annotations

import numpy as np

from trireme.sched.memory import Found, Memory
from trireme.sched.policy import Load, Policy
from trireme.sched.request import Task
from trireme.sched.rows import Rows


class Door:
    def __init__(self, rows: Rows, memory: Memory, static: bool):
        self._memory, self._static = memory, static
        self._size = memory.page_size
        order, count = rows.order, len(rows)
        self._count = count
        total, matched = rows.total[order], rows.fixed.matched[order]
        self._held = np.empty(rows.capacity + 1)
        self._generated = np.empty(rows.capacity + 1, np.int64)
        self._room = np.empty(rows.capacity + 1, np.int64)
        self._draw = np.empty(rows.capacity + 1)
        # A static cache is counted in whole pages, which do not grow. Otherwise each request wastes half a page on average.
        self._held[:count] = 1.0 if static else total - matched * self._size + (self._size - 1) / 2
        self._room[:count] = 0 if static else rows.fixed.max_total[order] - total
        self._generated[:count] = total - rows.fixed.num_prompt[order]
        self._draw[:count] = rows.fixed.draw[order]
        # Pages that the running rows hold or still need for the tokens they have, without pages that are shared with others.
        whole = -(-np.minimum(total, rows.fixed.need[order]) // self._size)
        self._lacking = int(np.maximum(whole - rows.num_pages[order], 0).sum())
        self._available = memory.available
        # Shared pages in use, which no running row counts as its own. Each is counted once.
        own = int((rows.num_pages[order] - matched).sum())
        self._shared = max(0, memory.num_pages - self._available - own)

    def fits(self, task: Task, found: Found) -> bool:
        """Whether there is memory now for the task's known tokens beside those of the running rows."""
        return self._lacking + self._fresh(task, found) <= self._available and self._memory.windows.fits(task.max_total)

    def admits(self, task: Task, found: Found, policy: Policy, num_waiting: int) -> bool:
        """Whether the task fits now and the policy agrees."""
        if not self._memory.num_pages:
            return True
        at, length, size = self._count, len(task.tokens), self._size
        if not self.fits(task, found):
            return False
        self._held[at] = 1.0 if self._static else length - found.num_pages * size + (size - 1) / 2
        self._room[at] = 0 if self._static else task.max_total - length
        self._generated[at], self._draw[at] = length - task.num_prompt, task.arrival.draw
        end, unit = at + 1, 1 if self._static else size
        columns = self._held[:end], self._generated[:end], self._room[:end], self._draw[:end]
        shared, capacity = (self._shared + found.num_unlocked) * unit, self._memory.num_pages * unit
        return policy.admit(Load(*columns, float(shared), float(capacity), num_waiting))

    def close_behind(self, task: Task, found: Found) -> None:
        """Counts the task as running from now on."""
        self._lacking += self._fresh(task, found)
        self._shared += found.num_unlocked
        self._count += 1

    def _fresh(self, task: Task, found: Found) -> int:
        """How many available pages the task would use up: new pages, and matched pages that could otherwise be evicted."""
        return self._memory.pages_for(min(len(task.tokens), task.need)) - found.num_pages + found.num_unlocked
