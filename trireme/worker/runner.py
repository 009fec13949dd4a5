"""Runs one planned step: tables, forward, sampling, all on the device; the host waits only when the answer is collected.

Holds only what every model needs. Knows no policy and no text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trireme.backends import Backend
from trireme.ipc.messages import Plan, RowNote, Sampled
from trireme.layers import Batch, Module
from trireme.ops import KVCache
from trireme.worker.sampler import Pick, Sampler
from trireme.worker.tables import Padding, Step, Tables

WAITS = 1.2  # times as long as the host: less, and kernels ran as they were started


@dataclass
class Launched:
    """A step on its way: what it will have sampled, and the mark that says when."""

    plan: Plan
    ids: Tensor  # [sequences] on the host once the mark is reached
    wait: Callable[[], None]
    logprobs: dict[int, tuple]
    notes: list[RowNote]
    trial: Trial | None = None


@dataclass
class Trial:
    """A large step with prompts, run as it comes, and how long host and device took."""

    graph: tuple[Padding, str]  # the one that could run it
    host: float
    device: Callable[[], float]

    @property
    def waits(self) -> bool:
        """Whether the device had to wait for the host."""
        return self.device() < WAITS * self.host


class Runner:
    def __init__(self, model: Module, backend: Backend, caches: list[KVCache], tables: Tables, sampler: Sampler, max_rows: int):
        self.model, self.backend, self.caches, self.tables, self.sampler = model, backend, caches, tables, sampler
        self.graph_sizes = backend.graph_sizes(max_rows) if backend.options.graphs else ()
        self.graph_tokens = backend.graph_tokens(max_rows) if backend.options.graphs else ()
        self.graphs: dict[tuple[Padding, str], tuple[Step, Callable[[], Tensor]]] = {}
        self.met: set[tuple[Padding, str]] = set()  # sizes of steps with prompts that came by; the second time they are captured
        self.never: set[tuple[Padding, str]] = set()  # sizes for whose graphs there was no memory; their steps run as they come
        self.tried: set[tuple[Padding, str]] = set()  # larger sizes; the first step of one may have waited for a compiler
        self.trial: tuple[Padding, str] | None = None  # the larger size of the step that is being launched
        self.answers = [backend.buffer((max_rows + 1,), torch.int64) for _ in range(backend.depth + 1)]
        self.launched: deque[Launched] = deque()
        self.eager = False  # set while values are captured: a replayed graph calls no layer

    @torch.inference_mode()
    def launch(self, plan: Plan) -> None:
        """Puts a plan on the device without waiting for it."""
        begun, self.trial = time.perf_counter(), None
        for admit in plan.admit:
            self.sampler.admit(admit)
        padding, mode = self._graph_key(plan)
        stop = self.backend.stopwatch() if self.trial else None
        step = self.tables.fill(plan, None if mode == "greedy" else self.sampler.uniforms(plan), padding)
        notes: list[RowNote] = []
        if padding and mode == "ruled":
            pick = self._ruled(step, padding)
        elif padding:
            pick = Pick(self._replay(step, padding, mode), {})
        else:
            pick, notes = self._run(step)
        wanted = sum(plan.samples)
        answer = self.answers[plan.step % len(self.answers)][:wanted]
        answer.copy_(pick.ids[:wanted], non_blocking=True)
        trial = Trial(self.trial, time.perf_counter() - begun, stop()) if self.trial and stop else None
        self.launched.append(Launched(plan, answer, self.backend.mark(), pick.logprobs, notes, trial))

    def rehearse(self, counts: list[int], mode: str) -> None:
        """Records a step of sequences with so many tokens before anybody wants it, on the scratch row, which nobody reads."""
        scratch, size = self.tables.scratch_row, len(counts)
        plan = Plan(0, [], [], [], [], [scratch] * size, [0] * size, counts, [1] * size, [True] * size)
        if mode == "random":
            self.sampler.random.add(scratch)
        try:
            if self._graph_key(plan) not in self.graphs:  # asked once more by the launch: a step with prompts is known then
                self.launch(plan)
                self.collect()
        finally:
            self.sampler.random.discard(scratch)

    def collect(self) -> Sampled:
        """The answer to the oldest launched plan; waits for it."""
        launched = self.launched.popleft()
        launched.wait()
        if launched.trial and launched.trial.waits:
            self.met.add(launched.trial.graph)
        plan = launched.plan
        sampling = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        tokens = launched.ids[: len(sampling)].tolist()
        notes = {note.row: note for note in launched.notes}
        if launched.logprobs or (tokens and min(tokens) < 0):
            for i, (row, token) in enumerate(zip(sampling, tokens, strict=True)):
                note = self.sampler.note(row, token, launched.logprobs.get(i))
                if note is not None:  # a row says all it has to say in one note
                    note.prompt_logprobs = notes[row].prompt_logprobs if row in notes else None
                    notes[row] = note
        return Sampled(plan.step, tokens, list(notes.values()))

    def _run(self, step: Step) -> tuple[Pick, list[RowNote]]:
        """A step as it comes: any mix of prompts and decodes, every sampling rule."""
        self.sampler.prepare(step)
        logits = self._forward(step)
        notes = self._prompt_notes(logits, step)
        if not step.samples.any():
            return Pick(torch.zeros(0, dtype=torch.int64), {}), notes
        if len(logits) != step.samples.sum():  # prompt log-probabilities: more rows than sample
            last = np.cumsum(step.logits)[step.samples] - 1
            logits = logits[torch.from_numpy(last).to(logits.device)]
        pick = self.sampler.pick(logits, step)
        self.tables.append(step, pick.ids)
        return pick, notes

    def _forward(self, step: Step) -> Tensor:
        plan = self.backend.ops.plan_attention(step.layout)
        tokens, slots = self.tables.inputs(step)
        batch = Batch(tokens, step.positions, slots, step.logits_at, step.reach, step.layout, plan, self.caches, self.eager)
        return self.model(batch)

    # --- captured steps -------------------------------------------------------------------------------------------------------

    def _graph_key(self, plan: Plan) -> tuple[Padding | None, str]:
        """The padded size of the graph that can run this plan, and its kind of sampling; (None, "") if none can."""
        rows = plan.rows
        if self.eager or not self.graph_sizes or len(rows) > self.graph_sizes[-1] or list(plan.samples) != list(plan.logits):
            return None, ""
        sampling = [row for row, samples in zip(rows, plan.samples, strict=True) if samples]
        if not sampling:
            return None, ""
        mode = self.sampler.mode(sampling)
        sequences = next(size for size in self.graph_sizes if size >= len(rows))
        if len(sampling) == len(rows) and set(plan.counts) == {1}:
            padding: Padding | None = Padding(sequences, sequences, True)
        else:
            padding = self._mixed_size(sum(plan.counts), sequences, mode)
        return (None, "") if padding is None or (padding, mode) in self.never else (padding, mode)

    def _mixed_size(self, tokens: int, sequences: int, mode: str) -> Padding | None:
        """The size of a step with prompts; None if it is to run as it comes."""
        if not self.graph_tokens or tokens > self.graph_tokens[-1]:
            return None
        most = self.graph_sizes[-1]
        sequences = next(size for size in (*(min(few, most) for few in self.backend.graph_batches), most) if size >= sequences)
        padding = Padding(next(size for size in self.graph_tokens if size >= tokens), sequences, False)
        if (padding, mode) in self.met:
            return padding
        if padding.tokens <= self.backend.graph_tokens_surely:
            self.met.add((padding, mode))
        elif (padding, mode) in self.tried:
            self.trial = padding, mode
        elif self.backend.options.tp == 1:  # ranks would measure differently, and must run the same
            self.tried.add((padding, mode))
        return None

    def _replay(self, step: Step, padding: Padding, mode: str) -> Tensor:
        """A step as a captured graph. Its device slices lie where those of the captured one did."""
        if (padding, mode) not in self.graphs:
            captured = self._forward if mode == "ruled" else self._sampled
            try:
                self.graphs[padding, mode] = (step, self.backend.graph(lambda: captured(step)))
            except torch.OutOfMemoryError:
                if self.backend.options.tp > 1:  # the other ranks have captured it
                    raise
                self.never.add((padding, mode))
                return captured(step)
        _, graph = self.graphs[padding, mode]
        return graph()

    def _ruled(self, step: Step, padding: Padding) -> Pick:
        """Captured up to the logits; what rules do to them depends on the rows."""
        self.sampler.prepare(step)
        pick = self.sampler.pick(self._replay(step, padding, "ruled"), step)
        self.tables.append(step, pick.ids)
        return pick

    def _sampled(self, step: Step) -> Tensor:
        ids = self.sampler.choose(self._forward(step), step)
        self.tables.append(step, ids)
        return ids

    # --- prompt log-probabilities ---------------------------------------------------------------------------------------------

    def _prompt_notes(self, logits: Tensor, step: Step) -> list[RowNote]:
        notes, begin = [], 0
        for row, start, count in zip(step.rows.tolist(), step.starts.tolist(), step.logits.tolist(), strict=True):
            if self.sampler.num_prompt_top[row] >= 0 and count:
                known = min(count, int(self.tables.num_prompt[row]) - start - 1)
                if known > 0:
                    targets = self.tables.tokens[row, start + 1 : start + 1 + known].long()
                    notes.append(
                        RowNote(row, prompt_logprobs=self.sampler.prompt_note(row, logits[begin : begin + known], targets))
                    )
            begin += count
        return notes
