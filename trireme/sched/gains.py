"""What requests get from a step's answer: tokens, log-probabilities, an end. Knows tasks and notes; nothing of rows or memory."""

from __future__ import annotations

from collections.abc import Callable

from trireme.ipc.messages import RowNote, Sampled
from trireme.sched.plan import Flight
from trireme.sched.request import Task
from trireme.types import FinishReason, Progress

Finish = Callable[[Task, FinishReason], None]


def noted(flight: Flight, notes: list[RowNote]) -> dict[Task, RowNote]:
    """Maps each task to the note about its row."""
    tasks = dict(zip(flight.rows.tolist(), flight.tasks, strict=True))
    return {tasks[note.row]: note for note in notes}


def failures(notes: dict[Task, RowNote], finish: Finish) -> list[Progress]:
    """Ends the requests whose own row failed."""
    progress = []
    for task, note in notes.items():
        if note.error is not None and task.finish is None:
            finish(task, FinishReason.ERROR)
            progress.append(Progress(id=task.id, finish=FinishReason.ERROR, error=note.error))
    return progress


def scores(flight: Flight, notes: dict[Task, RowNote]) -> list[Task]:
    """Collects prompt logprobs; returns the tasks whose prompt logprobs are now complete."""
    complete = []
    for index in flight.scoring:
        task, start, end = flight.tasks[index], int(flight.starts[index]), int(flight.ends[index])
        note = notes.get(task)
        if task.scores.done or task.finish is not None or (note is None and end < task.num_prompt):
            continue
        if note is not None and note.prompt_logprobs and len(task.scores.entries) == start:
            task.scores.entries += note.prompt_logprobs[: task.num_prompt - 1 - start]
        if end >= task.num_prompt:
            task.scores.done = True
            complete.append(task)
    return complete


def extend(flight: Flight, sampled: Sampled, finish: Finish) -> list[Progress]:
    """Appends the sampled tokens and ends the requests they complete. Requests that have already ended are skipped."""
    if sampled.counts:
        return _extend_by_count(flight, sampled, finish)
    progress: list[Progress] = []
    for task, token in zip(flight.sampling, sampled.tokens, strict=True):
        if task.finish is not None:
            continue
        task.tokens.append(token)
        progress.append(Progress(id=task.id, tokens=[token]))
        if token in task.stops or len(task.tokens) >= task.mark:
            _mark(task, token, progress[-1], finish)
    return progress


def _extend_by_count(flight: Flight, sampled: Sampled, finish: Finish) -> list[Progress]:
    """The same for steps with drafts, where a row may gain several tokens. Tokens after one that ends a request are dropped."""
    progress: list[Progress] = []
    tokens, end = sampled.tokens, 0
    for task, count in zip(flight.sampling, sampled.counts, strict=True):
        begin, end = end, end + count
        if task.finish is not None:
            continue
        fresh = tokens[begin:end]
        item = Progress(id=task.id, tokens=fresh)
        progress.append(item)
        if len(task.tokens) + count < task.mark and task.stops.isdisjoint(fresh):
            task.tokens.fromlist(fresh)
        else:
            item.tokens = _extend_one(task, fresh, item, finish)
    return progress


def _extend_one(task: Task, fresh: list[int], progress: Progress, finish: Finish) -> list[int]:
    """Appends tokens up to one that ends the request; returns those that were appended."""
    for at, token in enumerate(fresh):
        task.tokens.append(token)
        if token in task.stops or len(task.tokens) >= task.mark:
            _mark(task, token, progress, finish)
        if task.finish is not None:
            return fresh[: at + 1]
    return fresh


def _mark(task: Task, token: int, progress: Progress, finish: Finish) -> None:
    """Handles what happens only at a request's first or last token."""
    if task.num_generated == 1:
        progress.cached_tokens = task.cached
    task.mark = task.max_total
    progress.finish = task.ends(token)
    if progress.finish is not None:
        finish(task, progress.finish)


def unsampled(flight: Flight, finish: Finish) -> list[Progress]:
    """Ends the requests that only wanted their prompt to be computed."""
    progress = []
    if len(flight.sampling) < len(flight.tasks):
        for task, end in zip(flight.tasks, flight.ends.tolist(), strict=True):
            if task.finish is None and task.max_total == task.num_prompt == end:
                finish(task, FinishReason.LENGTH)
                progress.append(Progress(id=task.id, finish=FinishReason.LENGTH, cached_tokens=task.cached))
    return progress


def annotate(progress: list[Progress], notes: dict[Task, RowNote], scored: list[Task]) -> None:
    """Adds logprobs to the progress of the requests that asked for them."""
    by_id, whole = {task.id: note for task, note in notes.items()}, {task.id: task for task in scored}
    for item in progress:
        note = by_id.get(item.id)
        if note is not None and note.logprobs is not None and item.tokens:
            item.logprobs = note.logprobs[: len(item.tokens)]
        task = whole.get(item.id)
        if task is not None:
            item.prompt_logprobs = [None, *task.scores.entries]
