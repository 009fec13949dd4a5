"""The draft of a plan, and the record of a plan in flight. Knows rows and counts, never why they were chosen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from trireme.ipc.messages import Admit, Fork, Plan
from trireme.sched.request import Task
from trireme.sched.rows import Rows

MOST_SCORED = 512  # prompt tokens of a step whose logprobs are wanted: with a vocabulary of 262,144, half a gigabyte


@dataclass
class Draft:
    """What has been planned for the next step so far."""

    budget: int  # how many more tokens the step may compute
    scores: int = MOST_SCORED  # how many of these may be prompt tokens whose log-probabilities are wanted
    generating: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # rows of one token each, and drafts
    drafts: np.ndarray | None = None  # beside `generating`; None: no row has any
    rows: list[int] = field(default_factory=list)  # the others
    counts: list[int] = field(default_factory=list)
    admit: list[Admit] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    trims: list[tuple[int, int, int]] = field(default_factory=list)
    resumes: list[tuple[int, int]] = field(default_factory=list)
    keeps: list[tuple[int, int]] = field(default_factory=list)
    page_rows: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    page_bands: list[int] = field(default_factory=list)
    paused: bool = False  # memory ran out and a row was paused, so no request is admitted in this step

    def put(self, row: int, count: int) -> None:
        self.rows.append(row)
        self.counts.append(count)
        self.budget -= count

    def put_generating(self, rows: np.ndarray, drafts: np.ndarray | None) -> None:
        """Adds one token for each of `rows`, all at once, and its drafts."""
        self.generating, self.drafts = rows, drafts
        self.budget -= len(rows) + (int(drafts.sum()) if drafts is not None else 0)

    def __len__(self) -> int:
        return len(self.generating) + len(self.rows)

    @property
    def num_tokens(self) -> int:
        drafts = int(self.drafts.sum()) if self.drafts is not None else 0
        return len(self.generating) + drafts + sum(self.counts)

    def put_pages(self, rows: list[int], pages: Iterable[int], band: int = 0) -> None:
        self.page_rows += rows
        self.page_ids.extend(pages)
        self.page_bands += [band] * len(rows)


@dataclass(slots=True)
class Flight:
    """A plan that has been sent and not yet answered, and the tasks that had its rows at that time."""

    step: int
    rows: np.ndarray
    starts: np.ndarray  # upper bounds, until the drafts of earlier steps are answered
    ends: np.ndarray
    epochs: np.ndarray
    tasks: list[Task]
    sampling: list[Task]
    scoring: list[int]  # indices of rows whose prompt logprobs the answer carries
    num_tokens: int
    prompt_tokens: int  # how many of these belong to rows that compute more than one token, drafts not counted
    changes: int  # the value of `rows.changes` at that time
    drafts: np.ndarray | None = None  # beside `sampling`; None: no row has any
    sampling_at: np.ndarray | None = None  # indices of the rows that sample, where there are drafts
    repeats: int = 0  # how many more steps of one token per row may follow while no row changes hands
    is_repeat: bool = False
    begun: float = 0.0  # when it was sent


def launch(draft: Draft, table: Rows, step: int, page_size: int) -> tuple[Plan, Flight]:
    """Finishes the draft: returns the plan for the workers and its record. Advances `scheduled` and `total` of its rows."""
    rows = np.concatenate((draft.generating, np.array(draft.rows, np.int64)))
    first = len(draft.generating)
    counts, drafts = np.ones(len(rows), np.int64), np.zeros(len(rows), np.int64)
    counts[first:] = draft.counts
    if draft.drafts is not None:
        drafts[:first] = draft.drafts
        counts[:first] += draft.drafts
    starts = table.scheduled[rows]
    ends, total = starts + counts, table.total[rows]
    samples = (ends - drafts == total) & (total < table.fixed.max_total[rows])
    scoring = np.flatnonzero(table.scoring[rows] & (starts < table.fixed.num_prompt[rows]))
    table.scheduled[rows] = ends
    table.total[rows] = total + samples + drafts
    seated, numbers = table.tasks, rows.tolist()
    tasks: list[Task] = [seated[row] for row in numbers]
    if samples.all() and not len(scoring):
        sampling, chosen = tasks, [True] * len(tasks)
        logits = [1] * len(tasks) if draft.drafts is None else (1 + drafts).tolist()
    else:
        sampling = [tasks[index] for index in np.flatnonzero(samples)]
        wanted = samples + drafts
        wanted[scoring] = counts[scoring]
        logits, chosen = wanted.tolist(), samples.tolist()
    plan = Plan(
        step=step,
        release=table.take_released(),
        admit=draft.admit,
        page_rows=draft.page_rows,
        page_ids=draft.page_ids,
        page_bands=draft.page_bands if any(draft.page_bands) else [],
        rows=numbers,
        starts=starts.tolist(),
        counts=[1] * first + draft.counts if draft.drafts is None else counts.tolist(),
        logits=logits,
        samples=chosen,
        forks=draft.forks,
        trims=draft.trims,
        resumes=draft.resumes,
        keeps=draft.keeps,
    )
    prompt_tokens = sum(count for count in draft.counts if count > 1)
    epochs = table.epoch[rows]
    flight = Flight(
        step, rows, starts, ends, epochs, tasks, sampling, scoring.tolist(), draft.num_tokens, prompt_tokens, table.changes
    )
    waits = table.waits[rows]
    told = np.flatnonzero(waits & (starts >= table.fixed.known[rows])) if waits.any() else waits[:0]
    if len(told):
        plan.told_rows = rows[told].tolist()
        plan.told_tokens = [tasks[at].tokens[start] for at, start in zip(told.tolist(), starts[told].tolist(), strict=True)]
    if draft.drafts is not None and drafts.any():
        plan.drafts = drafts.tolist()
        flight.sampling_at = np.flatnonzero(samples)
        flight.drafts = drafts[flight.sampling_at]
    elif not draft.rows and sampling is tasks and len(rows) == len(table) and not waits.any():
        flight.repeats = _repeats(table, rows, page_size)
    return plan, flight


def _repeats(table: Rows, rows: np.ndarray, page_size: int) -> int:
    """How many more steps of one token these rows can make before one of them needs a page or reaches its end."""
    ends = np.minimum(np.minimum(table.fixed.need[rows], table.fixed.max_total[rows] - 1), table.num_pages[rows] * page_size)
    return int((ends - table.scheduled[rows]).min())


def repeat(last: Flight, table: Rows, step: int) -> tuple[Plan, Flight]:
    """Repeats the step `last`, one token further. Most steps are like this, and it is faster than planning every row again."""
    rows, starts, size = last.rows, last.ends, len(last.tasks)
    ends = starts + 1
    table.scheduled[rows] = ends
    table.total[rows] = ends + 1
    ones = [1] * size
    plan = Plan(step, [], [], [], [], rows.tolist(), starts.tolist(), ones, ones, [True] * size)
    flight = Flight(
        step, rows, starts, ends, last.epochs, last.tasks, last.tasks, [], size, 0, last.changes, repeats=last.repeats - 1
    )
    flight.is_repeat = True
    return plan, flight


def settle(flight: Flight, kept: list[int], table: Rows, behind: Iterable[Flight]) -> None:
    """Subtracts refused drafts from the lengths of their rows and of later flights, which had counted every draft as kept.

    kept: how many tokens each row that sampled has gained
    """
    assert flight.drafts is not None and flight.sampling_at is not None
    refused = flight.drafts + 1 - np.array(kept, np.int64)
    assert (refused >= 0).all() and (refused <= flight.drafts).all(), f"{kept} tokens of {flight.drafts.tolist()} drafts"
    if not refused.any():
        return
    less, seen = np.zeros(table.capacity, np.int64), np.full(table.capacity, -1, np.int64)
    less[flight.rows[flight.sampling_at]] = refused
    seen[flight.rows] = flight.epochs
    flight.ends = flight.ends - less[flight.rows]
    ours = flight.rows[table.epoch[flight.rows] == flight.epochs]
    table.scheduled[ours] -= less[ours]
    table.total[ours] -= less[ours]
    for later in behind:
        same = np.where(seen[later.rows] == later.epochs, less[later.rows], 0)
        later.starts, later.ends = later.starts - same, later.ends - same
