"""Runs one planned step: tables, forward, sampling, all on the device; the host waits only when the answer is collected.

Holds only what every model needs. Knows no policy and no text.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trireme.backends import Backend
from trireme.errors import BadConfig
from trireme.ipc.messages import NO_PARENT, Plan, RowNote, Sampled
from trireme.layers import Batch, Module, View
from trireme.ops import KVCache, States
from trireme.types import NOTHING_TO_CHOOSE
from trireme.worker.sampler import BROKEN, Pick, Sampler
from trireme.worker.scores import Scores, ToHost, read
from trireme.worker.tables import Padding, Step, Tables

WAITS = 1.2  # if device time / host time is below this, the device had to wait for the host
Caches = dict[int, KVCache | States]  # by the key under which layers ask for them
Size = tuple[Padding, str]  # of a graph: how many tokens and sequences, and which kind of sampling


class Standing(enum.Enum):
    """What is known about a size of steps."""

    WANTED = "its steps are captured"
    TRIED = "large; its first step ran as it came, perhaps behind a compiler, and the next ones are measured"
    NEVER = "its steps run as they come"


@dataclass
class Launched:
    """A launched step: where its sampled ids will be, and the mark that tells when they are there."""

    plan: Plan
    ids: Tensor  # [sequences] on the host once the mark is reached
    wait: Callable[[], None]
    scores: list[Scores]
    scored: Tensor | None  # the scores' tables, on the host once the mark is reached
    errors: dict[int, str]
    trial: Trial | None = None

    def notes(self, tokens: list[int]) -> list[RowNote]:
        """The notes of rows that have more to report than sampled tokens; one note per row."""
        notes: dict[int, RowNote] = {}
        for part, entries in read(self.scores, self.scored) if self.scored is not None else []:
            if part.prompt:  # all of one row
                notes[part.rows[0]] = RowNote(part.rows[0], prompt_logprobs=entries)
                continue
            for row, entry in zip(part.rows, entries, strict=True):
                notes.setdefault(row, RowNote(row)).logprobs = [entry]
        if BROKEN in tokens:
            sampling = [row for row, samples in zip(self.plan.rows, self.plan.samples, strict=True) if samples]
            for row, token in zip(sampling, tokens, strict=True):
                if token == BROKEN:
                    note = notes.setdefault(row, RowNote(row))
                    note.logprobs, note.error = None, self.errors.get(row, NOTHING_TO_CHOOSE)
        return list(notes.values())


@dataclass
class Trial:
    """A large step with prompts, run without a graph, and how long host and device took."""

    size: Size  # of the graph that could run it
    host: float
    device: Callable[[], float]

    @property
    def waits(self) -> bool:
        """Whether the device had to wait for the host."""
        return self.device() < WAITS * self.host


class Runner:
    """Steps are answered in the order in which they were launched, `depth` of them in flight at most."""

    def __init__(self, model: Module, backend: Backend, caches: Caches, tables: Tables, sampler: Sampler, max_rows: int):
        self.model, self.backend, self.caches, self.tables, self.sampler = model, backend, caches, tables, sampler
        self.depth = backend.depth
        self.graph_sizes = backend.graph_sizes(max_rows) if backend.options.graphs else ()
        self.graph_tokens = backend.graph_tokens(max_rows) if backend.options.graphs else ()
        self.graphs: dict[Size, tuple[Step, Callable[[], Tensor]]] = {}
        self.known: dict[Size, Standing] = {}
        self.answers = [backend.buffer((max_rows + 1,), torch.int64) for _ in range(backend.depth + 1)]
        self.to_host = ToHost(backend, backend.depth + 1)
        self.launched: deque[Launched] = deque()
        self.eager = False  # set while values are captured: a replayed graph calls no layer

    @torch.inference_mode()
    def launch(self, plan: Plan) -> None:
        """Puts a plan on the device without waiting for it."""
        if any(plan.drafts):
            raise BadConfig("This worker checks no draft tokens.", "plan none: leave the scheduler's num_drafts at 0")
        begun = time.perf_counter()
        for row in plan.release:
            self.sampler.release(row)
        for admit in plan.admit:
            self.sampler.admit(admit)
        if forks := [fork for fork in plan.forks if fork.parent != NO_PARENT]:
            self.sampler.fork(forks)
        if plan.drafts and self.sampler.mode(plan.rows) == "ruled":
            plan = self.tables.exact(plan)  # rules read the tokens before, so they need exact lengths
        size = self._size(plan)
        standing = self._standing(size) if size else None
        padding, mode = size if size and standing is Standing.WANTED else (None, "")
        stop = self.backend.stopwatch() if standing is Standing.TRIED else None
        step = self.tables.fill(plan, None if mode == "greedy" else self.sampler.uniforms(plan), padding)
        self._copy(plan)
        prompts: list[Scores] = []
        if padding and mode == "ruled":
            pick = self._ruled(step, padding)
        elif padding:
            pick = Pick(self._replay(step, padding, mode))
        else:
            pick, prompts = self._run(step)
        wanted = sum(plan.samples)
        answer = self.answers[plan.step % len(self.answers)][:wanted]
        answer.copy_(pick.ids[:wanted], non_blocking=True)
        scores = [*prompts, pick.scores] if pick.scores is not None else prompts
        scored = self.to_host.send(plan.step, scores) if scores else None
        trial = Trial(size, time.perf_counter() - begun, stop()) if size and stop else None
        self.launched.append(Launched(plan, answer, self.backend.mark(), scores, scored, pick.errors, trial))

    def forget(self) -> None:
        """Drops the captured graphs, because they hold addresses of the old weights."""
        self.graphs.clear()
        self.known.clear()

    def rehearse(self, counts: list[int], mode: str) -> None:
        """Captures a step of sequences with so many tokens before it is needed, on the scratch row, which is never read."""
        scratch, count = self.tables.scratch_row, len(counts)
        plan = Plan(0, [], [], [], [], [scratch] * count, [0] * count, counts, [1] * count, [True] * count)
        if mode == "random":
            self.sampler.random.add(scratch)
        try:
            size = self._size(plan)
            if size and size not in self.graphs and self.known.get(size) is not Standing.NEVER:
                self.known.setdefault(size, Standing.WANTED)
                self.launch(plan)
                self.collect()
        finally:
            self.sampler.random.discard(scratch)

    def collect(self) -> Sampled:
        """The answer to the oldest launched plan; waits for it."""
        launched = self.launched.popleft()
        launched.wait()
        if launched.trial and launched.trial.waits:
            self.known[launched.trial.size] = Standing.WANTED
        tokens = launched.ids.tolist()
        return Sampled(launched.plan.step, tokens, launched.notes(tokens))

    def _run(self, step: Step) -> tuple[Pick, list[Scores]]:
        """Runs a step without a graph: any mix of prompts and decodes, with every sampling rule."""
        self.sampler.prepare(step)
        logits = self._forward(step)
        prompts = self._prompt_scores(logits, step)
        if not step.samples.any():
            return Pick(torch.zeros(0, dtype=torch.int64)), prompts
        if len(logits) != step.samples.sum():  # prompt log-probabilities: more rows than sample
            last = np.cumsum(step.logits)[step.samples] - 1
            logits = logits[torch.from_numpy(last).to(logits.device)]
        pick = self.sampler.pick(logits, step)
        self.tables.append(step, pick.ids)
        return pick, prompts

    def _copy(self, plan: Plan) -> None:
        """Copies the KV of pages that a fork and its parent both go on to write."""
        copies = self.tables.copies(plan) if plan.forks else {}
        for cache in self.caches.values() if copies else ():
            if isinstance(cache, KVCache) and cache.band in copies:
                cache.copy(*copies[cache.band])

    def _forward(self, step: Step) -> Tensor:
        self.tables.settle(step)
        plans = [self.backend.ops.plan_attention(layout) for layout in step.layouts]
        tokens, slots = self.tables.inputs(step)
        views = [View(*band) for band in zip(slots, step.layouts, plans, strict=True)]
        return self.model(Batch(tokens, step.positions, step.logits_at, step.reach, views, self.caches, self.eager))

    # --- captured steps -------------------------------------------------------------------------------------------------------

    def _size(self, plan: Plan) -> Size | None:
        """The size of the graph that could run this plan; None if none can."""
        rows = plan.rows
        if self.eager or not self.graph_sizes or len(rows) > self.graph_sizes[-1] or list(plan.samples) != list(plan.logits):
            return None
        sampling = [row for row, samples in zip(rows, plan.samples, strict=True) if samples]
        if not sampling:
            return None
        mode, settled = self.sampler.mode(sampling), bool(plan.drafts)
        if len(sampling) == len(rows) and set(plan.counts) == {1}:
            sequences = next(size for size in self.graph_sizes if size >= len(rows))
            return Padding(sequences, sequences, True, settled), mode
        tokens, most = sum(plan.counts), self.graph_sizes[-1]
        if not self.graph_tokens or tokens > self.graph_tokens[-1]:
            return None
        sequences = next(size for size in (*(min(few, most) for few in self.backend.graph_batches), most) if size >= len(rows))
        return Padding(next(size for size in self.graph_tokens if size >= tokens), sequences, False, settled), mode

    def _standing(self, size: Size) -> Standing | None:
        """What is known of a size before this step of it; None if nothing is. A first step with prompts runs as it comes."""
        padding, known = size[0], self.known.get(size)
        if known is None:
            sure = padding.decode or padding.tokens <= self.backend.graph_tokens_surely
            large = Standing.TRIED if self.backend.options.tp == 1 else Standing.NEVER  # ranks would measure differently
            self.known[size] = Standing.WANTED if sure else large
            return Standing.WANTED if padding.decode else None
        return known

    def _replay(self, step: Step, padding: Padding, mode: str) -> Tensor:
        """Runs a step as a captured graph. Its columns lie in the buffer where those of the captured step lay."""
        if (padding, mode) not in self.graphs:
            captured = self._forward if mode == "ruled" else self._sampled
            graph = self._graph(lambda: captured(step))
            if graph is None:
                self.known[padding, mode] = Standing.NEVER
                return captured(step)
            self.graphs[padding, mode] = (step, graph)
        _, graph = self.graphs[padding, mode]
        return graph()

    def _graph(self, step: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
        """Captures the step. None where it cannot be captured, or where memory does not suffice."""
        try:
            return self.backend.graph(step)
        except torch.OutOfMemoryError:
            if self.backend.options.tp > 1:  # the other ranks have captured it
                raise
            return None

    def _ruled(self, step: Step, padding: Padding) -> Pick:
        """Replays a step up to its logits and applies the rules, which depend on the rows and so are not captured."""
        self.sampler.prepare(step)
        pick = self.sampler.pick(self._replay(step, padding, "ruled"), step)
        self.tables.append(step, pick.ids)
        return pick

    def _sampled(self, step: Step) -> Tensor:
        ids = self.sampler.choose(self._forward(step), step)
        self.tables.append(step, ids)
        return ids

    # --- prompt log-probabilities ---------------------------------------------------------------------------------------------

    def _prompt_scores(self, logits: Tensor, step: Step) -> list[Scores]:
        scores, begin = [], 0
        for row, start, count in zip(step.rows.tolist(), step.starts.tolist(), step.logits.tolist(), strict=True):
            if self.sampler.num_prompt_top[row] >= 0 and count:
                known = min(count, int(self.tables.host.num_prompt[row]) - start - 1)
                if known > 0:
                    targets = self.tables.tokens[row, start + 1 : start + 1 + known].long()
                    scores.append(self.sampler.prompt_scores(row, logits[begin : begin + known], targets))
            begin += count
        return scores
