"""The scheduler: which tokens are computed in the next step, and where their KV lives. Knows counts, no tensors, no text.

There are no phases: a row has tokens that are not yet computed, and a step computes some of them. Requests stand in one order,
by rank and then by arrival. A row may take pages from any row behind it, never from one before it, so the first always goes on.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trireme.config import ScheduleOptions
from trireme.errors import BadRequest, Overloaded
from trireme.ipc.messages import Admit, Plan, RowNote, Sampled
from trireme.sched.door import Door
from trireme.sched.memory import Memory
from trireme.sched.pace import Pace
from trireme.sched.plan import Draft, Flight, launch, repeat
from trireme.sched.policy import Policy, policy_by_name
from trireme.sched.radix import Match
from trireme.sched.request import NO_ROW, Task, Waiting
from trireme.sched.rows import Rows
from trireme.types import FinishReason, Progress, Request

RANK_SPAN = 1 << 40  # arrivals within one rank
MAX_RANK = 1 << 20
LEARNED = frozenset({FinishReason.STOP, FinishReason.LENGTH})  # ends that tell how long answers are


@dataclass(frozen=True)
class Stats:
    """Where the scheduler stands, and what it has done since it began."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int  # in the prefix cache, in use or not
    pages_owned: int  # by running requests alone
    pages_locked: int  # of the cached, those in use
    cache_queries: int  # prompt tokens looked up
    cache_hits: int  # prompt tokens found
    preemptions: int
    steps: int
    tokens_scheduled: int
    tokens_generated: int
    masked_rows: int  # rows computed for a request that had ended meanwhile
    oldest_wait: float  # seconds the first in the queue has been in the house


class Scheduler:
    def __init__(
        self,
        options: ScheduleOptions,
        *,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        prefix_cache: bool = True,
        step_seconds: float = 0.0,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ):
        self.options, self.policy, self._clock = options, policy or policy_by_name(options.policy), clock
        self._static = page_size == 0
        page_size = page_size or max_model_len
        # A request that outgrows the whole memory has filled its context as surely as one that outgrows the model.
        self.max_model_len = min(max_model_len, num_pages * page_size)
        self.memory = Memory(num_pages, page_size, prefix_cache and not self._static)
        self.rows = Rows(options.max_running)
        self._waiting = Waiting()
        self._tasks: dict[str, Task] = {}
        self._flights: deque[Flight] = deque()
        self._last: Flight | None = None  # the newest, answered or not
        self._release: list[int] = []
        self._random = random.Random(seed)
        self.pace = Pace(step_seconds)
        self._step = self._answered = self._arrivals = 0
        self._cache_queries = self._cache_hits = self._preemptions = 0
        self._tokens_scheduled = self._tokens_generated = self._masked_rows = 0

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request. Refuses one that could never be computed, and any when the queue is full."""
        if request.id in self._tasks:
            raise BadRequest(f"A request with the id {request.id!r} is already here.", "give every request its own id", "id")
        if not request.tokens:
            raise BadRequest("The prompt is empty.", "give at least one token", "prompt")
        if len(request.tokens) >= self.max_model_len:
            cause = f"The prompt has {len(request.tokens)} tokens; prompt and answer together may have {self.max_model_len}."
            raise BadRequest(cause, "shorten the prompt, or serve with a larger max_model_len and kv_tokens", "prompt")
        if len(self._waiting) >= self.options.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already.", "try again later, or raise max_waiting")
        rank = max(-MAX_RANK, min(MAX_RANK, self.policy.rank(request)))
        self._arrivals += 1
        seed = request.sampling.seed if request.sampling.seed is not None else self._random.getrandbits(63)
        key = rank * RANK_SPAN + self._arrivals
        task = Task(request, key, self.max_model_len, seed, self._random.random())
        task.group_open = self.memory.tree is None
        task.arrival = request.arrival or self._clock()
        self._tasks[request.id] = task
        self._waiting.put(task)

    def abort(self, id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Ends a request at once, whatever is in flight; says whether it was there. No Progress follows."""
        task = self._tasks.get(id)
        if task is None:
            return False
        self._finish(task, reason)
        return True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._tasks) or bool(self._flights)

    # ---- schedule

    def schedule(self) -> Plan | None:
        """The next step, or None if there is nothing to compute before an answer comes."""
        last = self._last
        if last is not None and last.repeats and last.changes == self.rows.changes and not self._waiting:
            return self._launched(*repeat(last, self.rows, self._step + 1))
        if self._flights and self.pace.is_long(self._flights[-1].prompt_tokens):
            return None
        draft = Draft(self.options.max_step_tokens)
        self._plan_running(draft)
        if not draft.paused:
            self._plan_waiting(draft)
        if not len(draft):
            stuck = len(self.rows) and not self._flights and not draft.paused
            assert not stuck, f"{len(self.rows)} rows wait for memory and nothing moves: {self.stats()}"
            return None
        release, self._release = self._release, []
        return self._launched(*launch(draft, self.rows, self._step + 1, release, self.memory.page_size))

    def _launched(self, plan: Plan, flight: Flight) -> Plan:
        self._step, flight.begun = flight.step, self._clock()
        self._last = flight
        self._flights.append(flight)
        self._tokens_scheduled += flight.num_tokens
        return plan

    def _plan_running(self, draft: Draft) -> None:
        """Gives tokens to the rows in use: first those that want one, then those with more of a prompt to go."""
        rows, order = self.rows, self.rows.order
        wanted = np.minimum(rows.total[order], rows.need[order]) - rows.scheduled[order]
        self._plan_ones(order[wanted == 1][: draft.budget], draft)
        draft.budget = self.pace.prompt_tokens(len(draft), draft.budget)
        for row in order[wanted > 1].tolist():
            if draft.budget and rows.tasks[row] is not None:
                self._plan_prompt(row, draft)

    def _plan_ones(self, ones: np.ndarray, draft: Draft) -> None:
        """One token for each of these rows, pausing rows from the end of the order if memory runs out."""
        rows, memory = self.rows, self.memory
        full = rows.scheduled[ones] >= rows.num_pages[ones] * memory.page_size
        growing = ones[full]
        if len(growing) <= memory.available:
            self._grow(growing.tolist(), draft)
            rows.num_pages[growing] += 1
            draft.put_ones(ones)
            return
        for row, grows in zip(ones.tolist(), full.tolist(), strict=True):
            if rows.tasks[row] is None:
                continue
            if grows and not self._make_room(row, draft):
                continue
            if grows:
                self._grow([row], draft)
                rows.num_pages[row] += 1
            draft.put(row, 1)

    def _plan_prompt(self, row: int, draft: Draft) -> None:
        """As much of the row's prompt as the budget and the memory allow.

        Nobody is paused for it: the door let it in because it fitted beside the others' prompts, so whatever it lacks has gone
        into rows that generate, which will end or be paused.
        """
        rows, memory = self.rows, self.memory
        start, held = int(rows.scheduled[row]), int(rows.num_pages[row])
        room = (held + memory.available) * memory.page_size - start
        count = min(int(min(rows.total[row], rows.need[row])) - start, draft.budget, room)
        if rows.scoring[row]:
            count = min(count, draft.scores)
            draft.scores -= max(count, 0)
        if count > 0:
            lacking = memory.pages_for(start + count) - held
            self._grow([row] * lacking, draft)
            rows.num_pages[row] += lacking
            draft.put(row, count)

    def _grow(self, growing: list[int], draft: Draft) -> None:
        """One more page for each row, as often as it is named."""
        if growing:
            draft.put_pages(growing, self.memory.grow(growing))

    def _make_room(self, row: int, draft: Draft) -> bool:
        """Pauses rows from the end of the order until a page is to be had; False if that reached the row itself."""
        while self.memory.available < 1:
            last = int(self.rows.order[-1])
            task = self.rows.tasks[last]
            assert task is not None
            self._pause(task)
            draft.paused = True
            if last == row:
                return False
        return True

    def _pause(self, task: Task) -> None:
        """Sends a running request back to the queue. Its computed pages stay in the prefix cache as long as they may."""
        self._leave(task, keep=True)
        task.ready_after = self._step
        task.pauses += 1
        self._preemptions += 1
        self._waiting.put(task)

    # ---- admission

    def _plan_waiting(self, draft: Draft) -> None:
        """Admits from the queue, in order, as long as tokens, rows, memory and the policy allow. Nobody overtakes the first."""
        door: Door | None = None
        while draft.budget and self.rows.num_free and self._waiting:
            task = self._waiting.first(self._ready)
            if task is None:
                return
            door = door or Door(self.rows, self.memory, self._static)
            match = self.memory.match(task.salt, task.tokens) if task.scored else None
            admissible = door.admits(task, match, self.policy, len(self._waiting))
            if len(self.rows) and not admissible:
                return
            door.close_behind(task, match)
            self._admit(task, match, draft)

    def _ready(self, task: Task) -> bool:
        """Whether the task need not wait for an unanswered step, nor for its group's leader."""
        if task.ready_after > self._answered:
            return False
        leader = self._tasks.get(task.leader) if task.leader else None
        return leader is None or leader.group_open or leader is task

    def _admit(self, task: Task, match: Match | None, draft: Draft) -> None:
        """Seats the task and gives it its first tokens."""
        self._waiting.remove(task)
        matched = len(match.pages) if match else 0
        row = self.rows.take(task, matched, self.memory.page_size)
        if task.cached < 0:
            task.cached = matched * self.memory.page_size
            self._cache_hits += task.cached
            self._cache_queries += task.num_prompt
        task.prompt_scores = task.prompt_scores if task.scored else []
        pages = self.memory.open(row, task.salt, match)
        draft.put_pages([row] * matched, pages)
        tokens = np.asarray(task.tokens).astype(np.int32).tobytes()
        draft.admit.append(Admit(row, tokens, task.num_prompt, task.sampling, task.seed, task.eos_token_ids))
        self._plan_prompt(row, draft)

    # ---- update

    def update(self, sampled: Sampled) -> list[Progress]:
        """Takes the answer to the oldest plan in flight; returns what each request gained by it."""
        flight = self._flights.popleft()
        assert flight.step == sampled.step, f"the answer to step {sampled.step} came when step {flight.step} was due"
        assert len(flight.sampling) == len(sampled.tokens), f"{len(sampled.tokens)} tokens for {len(flight.sampling)} rows"
        self._answered = flight.step
        self.pace.learn(flight.begun, self._clock(), flight.num_tokens, flight.prompt_tokens)
        notes = dict(self._noted(flight, sampled.notes)) if sampled.notes else {}
        failed = self._fail_noted(notes)
        self._advance(flight)
        scored = self._score(flight, notes) if flight.scoring else []
        progress = self._extend(flight, sampled.tokens)
        progress += self._end_unsampled(flight)
        if notes or scored:
            _annotate(progress, {task.id: note for task, note in notes.items()}, {t.id: t for t in scored})
        return failed + progress

    def _noted(self, flight: Flight, notes: list[RowNote]) -> list[tuple[Task, RowNote]]:
        tasks = dict(zip(flight.rows.tolist(), flight.tasks, strict=True))
        return [(tasks[note.row], note) for note in notes]

    def _fail_noted(self, notes: dict[Task, RowNote]) -> list[Progress]:
        """Ends the requests whose own row failed; what they computed is not trusted to the cache."""
        progress = []
        for task, note in notes.items():
            if note.error is not None and task.finish is None:
                self._finish(task, FinishReason.ERROR)
                progress.append(Progress(id=task.id, finish=FinishReason.ERROR, error=note.error))
        return progress

    def _advance(self, flight: Flight) -> None:
        """Moves `computed`, and gives the prompts that are now whole to the prefix cache."""
        rows = self.rows
        if flight.is_repeat and flight.changes == rows.changes:
            rows.computed[flight.rows] = flight.ends
            return
        ours = rows.epoch[flight.rows] == flight.epochs
        seated, ends = flight.rows[ours], flight.ends[ours]
        rows.computed[seated] = ends
        known = rows.known[seated]
        for row in seated[(flight.starts[ours] < known) & (ends >= known)].tolist():
            task = rows.tasks[row]
            assert task is not None
            rows.brought[row] = self.memory.share(row, task.tokens, int(rows.computed[row]))
            task.group_open = True

    def _score(self, flight: Flight, notes: dict[Task, RowNote]) -> list[Task]:
        """Gathers prompt logprobs; returns the tasks that now have them all."""
        complete = []
        for index in flight.scoring:
            task, start, end = flight.tasks[index], int(flight.starts[index]), int(flight.ends[index])
            note = notes.get(task)
            if task.scored or task.finish is not None or (note is None and end < task.num_prompt):
                continue
            if note is not None and note.prompt_logprobs and len(task.prompt_scores) == start:
                task.prompt_scores += note.prompt_logprobs[: task.num_prompt - 1 - start]
            if end >= task.num_prompt:
                task.scored = True
                if task.row != NO_ROW:
                    self.rows.scoring[task.row] = False
                complete.append(task)
        return complete

    def _extend(self, flight: Flight, tokens: list[int]) -> list[Progress]:
        """Appends the sampled tokens and ends the requests they complete."""
        progress: list[Progress] = []
        for task, token in zip(flight.sampling, tokens, strict=True):
            if task.finish is not None:
                self._masked_rows += 1
                continue
            task.tokens.append(token)
            progress.append(Progress(id=task.id, tokens=[token]))
            if token in task.stops or len(task.tokens) >= task.mark:
                self._mark(task, token, progress[-1])
        self._tokens_generated += len(progress)
        return progress

    def _mark(self, task: Task, token: int, progress: Progress) -> None:
        """What only a first or a last token brings."""
        if task.num_generated == 1:
            progress.cached_tokens = task.cached
        task.mark = task.max_total
        progress.finish = task.ends(token)
        if progress.finish is not None:
            self._finish(task, progress.finish)

    def _end_unsampled(self, flight: Flight) -> list[Progress]:
        """Ends the requests that wanted their prompt computed and nothing more."""
        progress = []
        if len(flight.sampling) < len(flight.tasks):
            for task, end in zip(flight.tasks, flight.ends.tolist(), strict=True):
                if task.finish is None and task.max_total == task.num_prompt == end:
                    self._finish(task, FinishReason.LENGTH)
                    progress.append(Progress(id=task.id, finish=FinishReason.LENGTH, cached_tokens=task.cached))
        return progress

    # ---- the end of a request

    def _finish(self, task: Task, reason: FinishReason) -> None:
        task.finish = reason
        del self._tasks[task.id]
        if task.row == NO_ROW:
            self._waiting.remove(task)
        else:
            self._leave(task, keep=reason is not FinishReason.ERROR)
        if reason in LEARNED and task.max_total > task.num_prompt:
            self.policy.finished(task.num_generated)

    def _leave(self, task: Task, keep: bool) -> None:
        """Takes the task off its row; the workers hear of it with the next plan."""
        computed = int(self.rows.computed[task.row])
        row = self.rows.give(task)
        self.memory.close(row, task.tokens, computed, keep)
        self._release.append(row)

    # ---- looking in

    def stats(self) -> Stats:
        tree, pool = self.memory.tree, self.memory.pool
        cached = tree.num_pages if tree else 0
        head = self._waiting.head()
        return Stats(
            running=len(self.rows),
            waiting=len(self._waiting),
            pages_total=pool.num_pages,
            pages_free=len(pool),
            pages_cached=cached,
            pages_owned=sum(holding.num_owned for holding in self.memory.holdings.values()),
            pages_locked=tree.num_locked if tree else 0,
            cache_queries=self._cache_queries,
            cache_hits=self._cache_hits,
            preemptions=self._preemptions,
            steps=self._step,
            tokens_scheduled=self._tokens_scheduled,
            tokens_generated=self._tokens_generated,
            masked_rows=self._masked_rows,
            oldest_wait=self._clock() - head.arrival if head else 0.0,
        )

    def check(self) -> None:
        """Raises AssertionError, with the numbers, if the books do not balance."""
        self.memory.check()
        rows, order = self.rows, self.rows.order
        assert len(order) + rows.num_free == rows.capacity, f"{len(order)} rows used + {rows.num_free} free != {rows.capacity}"
        assert len(order) + len(self._waiting) == len(self._tasks), (
            f"{len(order)} running + {len(self._waiting)} waiting != {len(self._tasks)} requests"
        )
        for row in order.tolist():
            lengths = int(rows.computed[row]), int(rows.scheduled[row]), int(rows.total[row])
            assert lengths[0] <= lengths[1] <= lengths[2], f"row {row}: computed, scheduled, total are {lengths}"
            held = len(self.memory.holdings[row].pages)
            assert held == rows.num_pages[row], f"row {row}: {held} pages held, {rows.num_pages[row]} counted"
            assert held * self.memory.page_size >= lengths[1], f"row {row}: {held} pages for {lengths[1]} tokens"


def _annotate(progress: list[Progress], notes: dict[str, RowNote], scored: dict[str, Task]) -> None:
    """Adds logprobs to the progress of the rows that asked for them."""
    for item in progress:
        note = notes.get(item.id)
        if note is not None and note.logprobs is not None and item.tokens:
            item.logprobs = note.logprobs[: len(item.tokens)]
        task = scored.get(item.id)
        if task is not None:
            item.prompt_logprobs = [None, *task.prompt_scores]
