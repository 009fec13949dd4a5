"""The plan in the making, and the record of a plan in flight. Knows rows and counts, never why they were chosen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from trireme.ipc.messages import Admit, Plan
from trireme.sched.request import Task
from trireme.sched.rows import Rows


@dataclass
class Draft:
    """What the next step will hold so far."""

    budget: int  # tokens that may still be given out
    ones: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # rows of one token each; they come first
    rows: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    admit: list[Admit] = field(default_factory=list)
    page_rows: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    paused: bool = False  # memory ran out: nobody is admitted in this step

    def put(self, row: int, count: int) -> None:
        self.rows.append(row)
        self.counts.append(count)
        self.budget -= count

    def put_ones(self, rows: np.ndarray) -> None:
        """One token for each of `rows`, all at a time."""
        self.ones = rows
        self.budget -= len(rows)

    def __len__(self) -> int:
        return len(self.ones) + len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.ones) + sum(self.counts)

    def put_pages(self, rows: list[int], pages: Iterable[int]) -> None:
        self.page_rows += rows
        self.page_ids.extend(pages)


@dataclass
class Flight:
    """A plan that has been handed out and not yet answered, with whose rows they were then."""

    step: int
    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    epochs: np.ndarray
    tasks: list[Task]
    sampling: list[Task]
    scoring: list[int]  # indices of rows that bring prompt logprobs
    num_tokens: int
    prompt_tokens: int  # of them, those in rows with more than one
    begun: float = 0.0  # when it was handed out


def launch(draft: Draft, table: Rows, step: int, release: list[int]) -> tuple[Plan, Flight]:
    """Seals the draft: the plan for the workers and its record. Moves `scheduled` and `total` of its rows."""
    rows = np.concatenate((draft.ones, np.array(draft.rows, np.int64)))
    counts = np.ones(len(rows), np.int64)
    counts[len(draft.ones) :] = draft.counts
    starts = table.scheduled[rows]
    ends, total = starts + counts, table.total[rows]
    samples = (ends == total) & (total < table.max_total[rows])
    scoring = np.flatnonzero(table.scoring[rows] & (starts < table.num_prompt[rows]))
    table.scheduled[rows] = ends
    table.total[rows] = total + samples
    seated, numbers = table.tasks, rows.tolist()
    tasks: list[Task] = [seated[row] for row in numbers]
    if samples.all() and not len(scoring):
        sampling, logits, chosen = tasks, [1] * len(tasks), [True] * len(tasks)
    else:
        sampling = [tasks[index] for index in np.flatnonzero(samples)]
        wanted = samples.astype(np.int64)
        wanted[scoring] = counts[scoring]
        logits, chosen = wanted.tolist(), samples.tolist()
    plan = Plan(
        step=step,
        release=release,
        admit=draft.admit,
        page_rows=draft.page_rows,
        page_ids=draft.page_ids,
        rows=numbers,
        starts=starts.tolist(),
        counts=[1] * len(draft.ones) + draft.counts,
        logits=logits,
        samples=chosen,
    )
    prompt_tokens = sum(count for count in draft.counts if count > 1)
    epochs = table.epoch[rows]
    return plan, Flight(step, rows, starts, ends, epochs, tasks, sampling, scoring.tolist(), draft.num_tokens, prompt_tokens)
