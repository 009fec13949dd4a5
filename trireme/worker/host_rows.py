"""What the host knows about each running row besides its tokens and pages: one entry per row of the tables. Knows no device."""

from __future__ import annotations

import numpy as np
import torch

from trireme.ipc.messages import NO_PARENT, Plan
from trireme.ops import Choosing
from trireme.ops.choosing import column_type


class HostRows:
    """A row has two slots for the state of its sequence, 2 * row and 2 * row + 1: a step reads one and writes the other, so that it
    may be run twice, as the first step of a captured graph is. Behind them are the kept places that plans name."""

    def __init__(self, count: int, num_bands: int):
        self.first_kept = 2 * count
        self.state_slots = np.arange(count, dtype=np.int32) * 2  # of each row's newest state
        self.lengths = np.zeros(count, dtype=np.int32)  # tokens of each row; below 0 if only the device knows
        self.num_held = np.zeros((num_bands, count), dtype=np.int64)  # pages
        self.num_prompt = np.ones(count, dtype=np.int32)
        self.sampling = {name: torch.zeros(count, dtype=column_type(name)).numpy() for name in Choosing._fields}

    def take(self, plan: Plan, page_size: int) -> None:
        """Notes the rows that a plan admits and forks, and those whose tokens it tells."""
        for admit in plan.admit:
            sampling = admit.sampling
            self.num_held[:, admit.row] = admit.begins or 0
            self.state_slots[admit.row] = 2 * admit.row
            self.lengths[admit.row] = len(admit.tokens) // 4
            self.num_prompt[admit.row] = admit.num_prompt
            for name, column in self.sampling.items():
                column[admit.row] = max(getattr(sampling, name), 0)  # -1 means the same as 0: no limit of top_k
        forks = [fork for fork in plan.forks if fork.parent != NO_PARENT]
        rows, parents = [fork.row for fork in forks], [fork.parent for fork in forks]
        for column in (self.num_prompt, *self.sampling.values()) if forks else ():
            column[rows] = column[parents]  # all are read before any is written
        for fork in forks:
            self.num_held[:, fork.row] = -(-fork.length // page_size)
            self.lengths[fork.row] = fork.length + 1
        for row, place in plan.resumes:
            self.state_slots[row] = self.first_kept + place
        starts = dict(zip(plan.rows, plan.starts, strict=True)) if plan.told_rows else {}
        for row in plan.told_rows:
            self.lengths[row] = starts[row] + 1

    def bounds(self, rows: np.ndarray, ends: np.ndarray, samples: np.ndarray, settled: bool) -> dict[str, np.ndarray]:
        """What the device needs to settle a step; notes how long the rows are after it."""
        before = self.lengths[rows]
        self.lengths[rows] = np.where(samples, -1 if settled else ends + 1, before)
        if not settled:
            return {}
        said = np.where(samples, before, ends)  # what has sampled nothing yet is where the plan says
        return {"ends": ends, "said": said, "grows": samples.astype(np.int32)}

    def states(self, rows: np.ndarray, starts: np.ndarray, keeps: list[tuple[int, int]]) -> dict[str, np.ndarray]:
        """Which state slot each sequence reads and which it writes. A row's first step ignores what is in the slot.

        keeps: (row, place) of states that go to a kept place
        """
        before = self.state_slots[rows]
        after = np.where(before < self.first_kept, before ^ 1, 2 * rows)
        for row, place in keeps:
            after[rows == row] = self.first_kept + place
        self.state_slots[rows] = after
        return {"states_from": np.where(starts > 0, before, np.int32(-1)), "states_to": after}

    def add_pages(self, at: np.ndarray) -> np.ndarray:
        """One page more for each entry, a row's index in `num_held` laid flat; returns which of the row's pages each is."""
        held = self.num_held.reshape(-1)
        places = held[at] + _running_count(at)
        np.add.at(held, at, 1)
        return places


def _running_count(rows: np.ndarray) -> np.ndarray:
    """For each entry, how many equal entries come before it."""
    order = np.argsort(rows, kind="stable")
    ranked = rows[order]
    first = np.searchsorted(ranked, ranked, side="left")
    result = np.empty_like(rows)
    result[order] = np.arange(len(rows)) - first
    return result
