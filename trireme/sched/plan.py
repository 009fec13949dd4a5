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

    def put_ones(self, rows: list[int]) -> None:
        """One token for each of `rows`."""
        self.rows += rows
        self.counts += [1] * len(rows)
        self.budget -= len(rows)

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


def launch(draft: Draft, table: Rows, step: int, release: list[int]) -> tuple[Plan, Flight]:
    """Seals the draft: the plan for the workers and its record. Moves `scheduled` and `total` of its rows."""
    rows = np.array(draft.rows, np.int64)
    starts, counts = table.scheduled[rows], np.array(draft.counts, np.int64)
    ends, total = starts + counts, table.total[rows]
    samples = (ends == total) & (total < table.max_total[rows])
    scoring = np.flatnonzero(table.scoring[rows] & (starts < table.num_prompt[rows]))
    logits = samples.astype(np.int64)
    logits[scoring] = counts[scoring]
    table.scheduled[rows] = ends
    table.total[rows] = total + samples
    seated, chosen = table.tasks, samples.tolist()
    tasks: list[Task] = [seated[row] for row in draft.rows]  # type: ignore[misc]
    sampling = [task for task, sample in zip(tasks, chosen, strict=True) if sample]
    plan = Plan(
        step=step,
        release=release,
        admit=draft.admit,
        page_rows=draft.page_rows,
        page_ids=draft.page_ids,
        rows=draft.rows,
        starts=starts.tolist(),
        counts=draft.counts,
        logits=logits.tolist(),
        samples=chosen,
    )
    return plan, Flight(step, rows, starts, ends, table.epoch[rows], tasks, sampling, scoring.tolist())
