"""The scheduler: which tokens are computed in the next step, and where their KV lives. Knows counts, no tensors, no text.

There are no phases: a row has tokens that are not yet computed, and a step computes some of them. Requests stand in one order,
by rank and then by arrival. A row (batch slot) that lacks memory may have requests behind it paused (preempted), never one before
it, so the first always goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from trireme.config import ScheduleOptions
from trireme.errors import BadRequest, Overloaded
from trireme.ipc.messages import NO_PARENT, Admit, Fork, Plan, Sampled
from trireme.sched import gains
from trireme.sched.arrivals import Arrivals
from trireme.sched.capacity import Capacity
from trireme.sched.door import Door
from trireme.sched.flights import Flights
from trireme.sched.groups import Groups
from trireme.sched.memory import NOTHING, Found, Memory, Opened
from trireme.sched.pace import Pace
from trireme.sched.plan import Draft, Flight, launch, repeat, settle
from trireme.sched.policy import Policy, policy_by_name
from trireme.sched.radix import Root
from trireme.sched.request import NO_ROW, Task, Waiting
from trireme.sched.rows import Rows
from trireme.sched.stats import Counts, Stats
from trireme.types import FinishReason, Progress, Request

LEARNED = frozenset({FinishReason.STOP, FinishReason.LENGTH})  # finish reasons from which the policy learns answer lengths


class Scheduler:
    def __init__(
        self,
        options: ScheduleOptions,
        capacity: Capacity,
        *,
        step_seconds: float = 0.0,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ):
        self.options, self.policy, self.capacity = options, policy or policy_by_name(options.policy), capacity
        static = capacity.page_size == 0
        caching = capacity.prefix_cache and not (static or capacity.whole_prompts)
        caching = caching and capacity.num_pages > 0
        self.memory = Memory(capacity.num_pages, capacity.slots_per_page, caching, capacity.tails(options.max_running, caching))
        self.rows = Rows(options.max_running)
        self.version = 0  # of the weights; the prefix cache finds only what this version computed
        self.holds = False  # whether requests that have not begun stay in the queue
        self.num_drafts = 0  # how many draft tokens the workers may have for each row that generates
        self._waiting = Waiting()
        self._tasks: dict[str, Task] = {}
        self._groups = Groups(self.memory)
        self._arrivals = Arrivals(self.policy, clock, seed)
        self.pace = Pace(step_seconds)
        self._flights = Flights(self.pace, clock)
        self._counts = Counts()

    # ---- adding and aborting requests

    def add(self, *requests: Request) -> None:
        """Queues the requests of one prompt, all or none. The prompt is computed once for all of them. Raises for requests that
        can never be computed, and for any request when the queue is full."""
        for request in requests:
            self._check(request)
        if len(self._waiting) + len(requests) > self.options.max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already.", "try again later, or raise max_waiting")
        tasks = []
        for request in requests:
            task = self._arrivals.take(request, self.capacity.longest)
            tasks.append(task)
            self._tasks[request.id] = task
            self._waiting.put(task)
        self._groups.form(tasks)

    def _check(self, request: Request) -> None:
        if request.id in self._tasks:
            raise BadRequest(f"A request with the id {request.id!r} is already here.", "give every request its own id", "id")
        self.capacity.check(request, self.options.max_step_tokens)

    def abort(self, id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Ends a request at once, even with steps in flight; returns whether it existed. No Progress follows."""
        task = self._tasks.get(id)
        if task is None:
            return False
        self._finish(task, reason)
        return True

    def begun(self) -> list[str]:
        """The requests of which something has been computed."""
        return [id for id, task in self._tasks.items() if self._has_begun(task)]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._tasks) or bool(self._flights)

    # ---- schedule

    def schedule(self) -> Plan | None:
        """The next step, or None if there is nothing to compute before an answer comes."""
        last = self._flights.last
        if last is not None and last.repeats and last.changes == self.rows.changes and not (self._waiting or self.num_drafts):
            return self._launched(*repeat(last, self.rows, self._flights.step + 1))
        if self._flights.waits_for_long():
            return None
        draft = Draft(self.options.max_step_tokens)
        self._plan_running(draft)
        if not draft.paused:
            self._plan_waiting(draft)
        if not len(draft):
            stuck = len(self.rows) and not self._flights and not draft.paused
            assert not stuck, f"{len(self.rows)} rows wait for memory and nothing moves: {self.stats()}"
            return None
        plan, flight = launch(draft, self.rows, self._flights.step + 1, self.memory.page_size)
        if flight.repeats:
            flight.repeats = min(flight.repeats, self.memory.tails.steps_before(self.rows.scheduled[flight.rows]))
        return self._launched(plan, flight)

    def _launched(self, plan: Plan, flight: Flight) -> Plan:
        self._flights.begin(flight)
        self._counts.tokens_scheduled += flight.num_tokens
        return plan

    def _plan_running(self, draft: Draft) -> None:
        """Plans tokens for the rows in use: first for rows that need a single token, then for rows with more of a prompt to do."""
        rows, order = self.rows, self.rows.order
        wanted = rows.wanted()
        self._plan_generating(order[wanted == 1][: draft.budget], draft)
        draft.budget = self.pace.prompt_tokens(draft.num_tokens, draft.budget)
        for row in order[wanted > 1].tolist():
            if draft.budget and rows.tasks[row] is not None:
                self._plan_prompt(row, draft)

    def _plan_generating(self, generating: np.ndarray, draft: Draft) -> None:
        """One token and its drafts for each of these rows. If memory does not suffice for the tokens alone, the last are paused."""
        rows, memory = self.rows, self.memory
        if not len(generating):
            return
        most = min(self.num_drafts, draft.budget // len(generating) - 1) if memory.tails.states is None else 0
        drafts = rows.drafts(generating, most) if most > 0 else None
        lacking, count = self._lacking(generating, drafts)
        if count > memory.available and drafts is not None:
            drafts = None
            lacking, count = self._lacking(generating, None)
        if count > memory.available:
            self._clear_out(draft)
            lacking, count = self._lacking(generating, None)
        if count <= memory.available:
            if count:
                self._grow(np.repeat(generating, lacking).tolist(), draft)
                rows.num_pages[generating] += lacking
            draft.put_generating(generating, drafts)
            draft.keeps += memory.tails.keep_generating(generating, rows.scheduled[generating])
            return
        for row, grows in zip(generating.tolist(), lacking.tolist(), strict=True):
            if rows.tasks[row] is None:
                continue
            if grows and not self._make_room(row, draft):
                continue
            if grows:
                self._grow([row], draft)
                rows.num_pages[row] += 1
            draft.put(row, 1)
            draft.keeps += memory.tails.keep_generating(np.array([row]), rows.scheduled[[row]])

    def _lacking(self, generating: np.ndarray, drafts: np.ndarray | None) -> tuple[np.ndarray, int]:
        """How many pages each of these rows lacks for its next token and its drafts, and the sum of these."""
        last = self.rows.scheduled[generating]
        last = last if drafts is None else last + drafts
        lacking = np.maximum(last // self.memory.page_size + 1 - self.rows.num_pages[generating], 0)
        return lacking, int(lacking.sum())

    def _plan_prompt(self, row: int, draft: Draft) -> None:
        """Plans as much of the row's prompt as the budget and the memory allow.

        No row is paused for it. The admission check found that it fits beside the other prompts, so the memory it lacks has gone
        to rows that generate, and these will end or be paused.
        """
        rows, memory = self.rows, self.memory
        start, held = int(rows.scheduled[row]), int(rows.num_pages[row])
        count = min(int(min(rows.total[row], rows.fixed.need[row])) - start, draft.budget)
        if start + count > memory.reach(row, held):
            self._give_way()
            count = min(count, memory.reach(row, held) - start)
        count = count if self.capacity.whole_prompts else memory.tails.cut(row, start, count)
        if self.capacity.whole_prompts and start + count < rows.fixed.num_prompt[row]:
            return
        if rows.scoring[row]:
            count = min(count, draft.scores)
            draft.scores -= max(count, 0)
        if count > 0:
            lacking = memory.pages_for(start + count) - held
            self._grow([row] * lacking, draft)
            rows.num_pages[row] += lacking
            draft.put(row, count)
            draft.keeps += memory.tails.keep(row, start + count)

    def _grow(self, growing: list[int], draft: Draft) -> None:
        """Appends one page for each entry of the rows, where a row may occur several times."""
        if growing:
            draft.put_pages(growing, self.memory.grow(growing))
            if not self.memory.tails.make_room(len(growing)):
                self._give_way()
            for band, pages in self.memory.windows.grow(growing):
                draft.put_pages(growing, pages, band)

    def _give_way(self) -> None:
        """Ends leases, and frees cached pages that rows keep from eviction without using them."""
        self._groups.end_leases()
        self.memory.merge_all()

    def _make_room(self, row: int, draft: Draft) -> bool:
        """Pauses rows from the end of the order until a page is available; False if the row itself was paused."""
        while self.memory.available < 1:
            last = int(self.rows.order[-1])
            task = self.rows.tasks[last]
            assert task is not None
            self._pause(task)
            draft.paused = True
            draft.trims = [trim for trim in draft.trims if trim[0] != last]
            if last == row:
                return False
        return True

    def _clear_out(self, draft: Draft) -> None:
        """Gives back memory that no row needs: also pages of refused drafts."""
        self._give_way()
        rows, order = self.rows, self.rows.order
        needed = -(-rows.scheduled[order] // self.memory.page_size)
        for row in order[rows.num_pages[order] > needed].tolist():
            rows.num_pages[row] = self.memory.trim(row, int(rows.scheduled[row]))
            kept = int(rows.num_pages[row])
            draft.trims += [(row, band, kept) for band in (0, *(window.index for window in self.memory.windows.bands))]

    def _pause(self, task: Task) -> None:
        """Sends a running request back to the queue (preemption). Its computed pages stay in the prefix cache until evicted."""
        self._leave(task, keep=True)
        task.ready_after = self._flights.step
        task.pauses += 1
        self._counts.preemptions += 1
        self._waiting.put(task)

    # ---- admission

    def _plan_waiting(self, draft: Draft) -> None:
        """Admits requests in queue order while tokens, rows, memory and the policy allow. None overtakes one that does not fit."""
        door: Door | None = None
        while draft.budget and self.rows.num_free and self._waiting:
            task = self._waiting.first(self._ready)
            if task is None or not self._has_budget(task, draft):
                return
            door = door or Door(self.rows, self.memory, self.capacity.page_size == 0)
            found = self._found(task)
            if not door.admits(task, found, self.policy, len(self._waiting)):
                if len(self.rows):
                    return
                if not door.fits(task, found):
                    self._give_way()
                    door, found = Door(self.rows, self.memory, self.capacity.page_size == 0), self._found(task)
            door.close_behind(task, found)
            self._admit(task, found, draft)

    def _ready(self, task: Task) -> bool:
        """Whether the task waits neither for an unanswered step nor for its group's prompt."""
        if self.holds and not self._has_begun(task):
            return False
        return task.ready_after <= self._flights.answered and self._groups.may_go(task)

    def _has_begun(self, task: Task) -> bool:
        """Whether computing has begun for the task or for another one of its group."""
        return task.cached >= 0 or self._groups.has_begun(task)

    def _has_budget(self, task: Task, draft: Draft) -> bool:
        """Whether the prompt fits this step, where prompts must be computed whole. A step's first prompt may enlarge the budget."""
        if not self.capacity.whole_prompts:
            return True
        if not draft.rows:
            draft.budget = max(draft.budget, task.num_prompt)
        return task.num_prompt <= draft.budget and (task.scores.done or task.num_prompt <= draft.scores)

    def _root(self, task: Task) -> Root:
        return Root(task.asked.salt, version=self.version)

    def _found(self, task: Task) -> Found:
        """The part of the task's tokens that need not be computed."""
        held = self._groups.found(task)
        if held is not None:
            return held
        return self.memory.match(self._root(task), task.keys) if task.scores.done else NOTHING

    def _admit(self, task: Task, found: Found, draft: Draft) -> None:
        """Gives the task a row and plans its first tokens."""
        self._waiting.remove(task)
        row = self.rows.take(task, found.length, found.num_pages)
        self.rows.waits[row] = self.capacity.tells
        if not task.scores.done:
            task.scores.entries = []
        if found.lease is not None:
            self._fork(task, row, found, draft)
        else:
            self._open(task, row, found, draft)
        self._plan_prompt(row, draft)

    def _open(self, task: Task, row: int, found: Found, draft: Draft) -> None:
        """Starts a row from the cached prefix of its tokens."""
        self._groups.seated(task)
        if task.cached < 0:
            task.cached = found.length
            self._counts.cache_hits += found.length
            self._counts.cache_queries += task.num_prompt
        opened = self.memory.open(row, self._root(task), found, task.max_total)
        branch = found.spelled if found.spelled > found.length else 0
        self.memory.tails.want(row, found.length, len(task.tokens), branch, self._groups.fork_at(task))
        self._seat(task, row, opened, draft)
        draft.resumes += opened.resumes

    def _seat(self, task: Task, row: int, opened: Opened, draft: Draft) -> None:
        """Plans that the workers open the row with what it begins with."""
        draft.admit.append(_admission(task, row))
        for band, _, pages in opened.begun:
            draft.put_pages([row] * len(pages), pages, band)
        if len(opened.begun) > 1:
            draft.admit[-1].begins = [begun.first for begun in opened.begun]

    def _fork(self, task: Task, row: int, found: Found, draft: Draft) -> None:
        """Starts a row from the prompt that its group has computed."""
        group = self._groups.of(task)
        assert group is not None and found.lease is not None
        parent = group.parent
        opened = self.memory.fork(found.lease, row, task.max_total)
        self.rows.num_pages[row] = len(self.memory.holdings[row].pages)
        if parent == NO_PARENT:
            self._seat(task, row, opened, draft)
        draft.forks.append(Fork(row, parent, found.length, task.arrival.seed, opened.copies))
        draft.resumes += opened.resumes
        task.cached = group.cached if task.cached < 0 else task.cached
        self._groups.leave(task)

    # ---- update

    def update(self, sampled: Sampled) -> list[Progress]:
        """Applies the answer to the oldest plan in flight; returns what each request gained."""
        flight = self._flights.end(sampled.step)
        gained = sum(sampled.counts) if sampled.counts else len(flight.sampling)
        assert gained == len(sampled.tokens), f"{len(sampled.tokens)} tokens for {len(flight.sampling)} rows"
        notes = gains.noted(flight, sampled.notes) if sampled.notes else {}
        failed = gains.failures(notes, self._finish)  # what failed rows computed is not cached
        if flight.drafts is not None:
            settle(flight, sampled.counts, self.rows, self._flights)
        self._advance(flight)
        scored = gains.scores(flight, notes) if flight.scoring else []
        for task in scored:
            if task.row != NO_ROW:
                self.rows.scoring[task.row] = False
        progress = gains.extend(flight, sampled, self._finish)
        self._counts.masked_rows += len(flight.sampling) - len(progress)
        self._counts.tokens_generated += sum(len(item.tokens) for item in progress) if sampled.counts else len(progress)
        progress += gains.unsampled(flight, self._finish)
        if notes or scored:
            gains.annotate(progress, notes, scored)
        return failed + progress

    def _advance(self, flight: Flight) -> None:
        """Advances `computed`, and adds prompts that are now complete to the prefix cache."""
        rows = self.rows
        if flight.is_repeat and flight.changes == rows.changes:
            rows.computed[flight.rows] = flight.ends
            self.memory.tails.slide(flight.rows, flight.ends)
            return
        ours = rows.epoch[flight.rows] == flight.epochs
        seated, ends = flight.rows[ours], flight.ends[ours]
        rows.computed[seated] = ends
        known = rows.fixed.known[seated]
        complete = ends >= known
        # Where there are windows, pieces of a prompt are added too, before what they need slides away.
        added = (flight.starts[ours] < known) & (complete | bool(self.memory.windows))
        for row, whole in zip(seated[added].tolist(), complete[added].tolist(), strict=True):
            task = rows.tasks[row]
            assert task is not None
            self.memory.share(row, task.keys, int(rows.computed[row]))
            if whole:
                self._groups.computed(task)
        if self.memory.tails:
            for row in self.memory.tails.reached(seated, ends):
                task = rows.tasks[row]
                assert task is not None
                self.memory.share(row, task.keys, int(rows.computed[row]))
            self.memory.tails.slide(seated, ends)

    # ---- the end of a request

    def _finish(self, task: Task, reason: FinishReason) -> None:
        task.finish = reason
        del self._tasks[task.id]
        self._groups.leave(task)
        if task.row == NO_ROW:
            self._waiting.remove(task)
        else:
            self._leave(task, keep=reason is not FinishReason.ERROR)
        if reason in LEARNED and task.max_total > task.num_prompt:
            self.policy.finished(task.num_generated)

    def _leave(self, task: Task, keep: bool) -> None:
        """Frees the task's row; the next plan tells the workers."""
        computed = min(int(self.rows.computed[task.row]), len(task.tokens))  # without drafts after its end
        self._groups.unseated(task)
        row = self.rows.give(task)
        self.memory.close(row, task.keys, computed, keep)

    # ---- inspection

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
            pages_owned=pool.num_pages - len(pool) - cached,
            pages_locked=tree.num_locked if tree else 0,
            steps=self._flights.step,
            oldest_wait=self._arrivals.age(head) if head else 0.0,
            **vars(self._counts),
        )

    def check(self) -> None:
        """Raises AssertionError, with the numbers, if rows, pages and counts do not agree."""
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
            assert self.memory.pages_for(lengths[1]) <= held, f"row {row}: {held} pages for {lengths[1]} tokens"


def _admission(task: Task, row: int) -> Admit:
    tokens = np.asarray(task.tokens).astype(np.int32).tobytes()
    return Admit(row, tokens, task.num_prompt, task.asked.sampling, task.arrival.seed, task.asked.eos_token_ids)
