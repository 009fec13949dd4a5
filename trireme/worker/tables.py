"""The tables behind a step: every running row's tokens and pages, and the columns of a step, which go to the device in one buffer.

All device tensors here are persistent, so a captured graph finds its inputs where they were. Knows rows and pages as numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from trireme.backends import Backend
from trireme.ipc.messages import NO_PARENT, BandSize, Plan
from trireme.ops import Choosing, StepLayout
from trireme.ops.choosing import column_type
from trireme.worker.host_rows import HostRows
from trireme.worker.packed import Column, Packed

Update = tuple[Tensor, Column, Column]  # flat table, index of 64 bits, values
SETTLED = ("ends", "said", "states_from", "query_starts", "lengths", "positions", "reach", "pick_sequences", "pick_positions")


@dataclass
class Step:
    """One step's columns: numpy on the host, and the same numbers as slices of the device's persistent buffer.

    The slices are made when they are asked for: a replayed graph has its own.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    logits: np.ndarray  # per sequence: how many of its last tokens need logits
    samples: np.ndarray  # bool per sequence
    num_tokens: int
    columns: dict[str, Column]
    buffer: Tensor
    make_layouts: Callable[[Step], list[StepLayout]]
    padded: bool  # whether some sequences only pad
    room: int  # the number of tokens of a graph captured for steps with prompts; otherwise 0
    settled: bool = False  # whether the device says how long its sequences are; the plan's numbers are the most they can be

    def begin(self, name: str) -> int:
        """Where a column begins in the buffer."""
        found = self.columns[name]
        assert isinstance(found, slice), f"{name} found no room in the buffer"
        return found.start

    def column(self, name: str) -> Tensor:
        found = self.columns[name]
        return self.buffer[found] if isinstance(found, slice) else found

    @property
    def positions(self) -> Tensor:
        """[tokens]"""
        return self.column("positions")

    @property
    def token_rows(self) -> Tensor:
        """[tokens] each token's row"""
        return self.column("token_rows")

    @property
    def reach(self) -> Tensor:
        """[tokens] the length that length-dependent rope goes by"""
        return self.column("reach")

    @property
    def logits_at(self) -> Tensor | None:
        """[wanted]; None where every token is wanted, in this step and in all that replay it"""
        return None if not self.room and self.num_tokens == self.logits.sum() else self.column("logits_at")

    @property
    def pick_rows(self) -> Tensor:
        """[picks] the rows of the sequences that sample"""
        return self.column("pick_rows")

    @property
    def pick_positions(self) -> Tensor:
        """[picks] where a sampled token goes"""
        return self.column("pick_positions")

    @property
    def choosing(self) -> Choosing:
        """[picks] each"""
        return Choosing(*(self.column(name).view(column_type(name)) for name in Choosing._fields))

    @property
    def uniform(self) -> Tensor:
        """[picks] the random number that each token is drawn by"""
        return self.column("uniform").view(torch.float32)

    @functools.cached_property
    def layouts(self) -> list[StepLayout]:
        """By band."""
        return self.make_layouts(self)


class Padding(NamedTuple):
    """The size a captured graph was made for. What a step lacks computes in the scratch row."""

    tokens: int
    sequences: int
    decode: bool  # whether every sequence has one token and samples
    settled: bool = False  # whether it begins by settling how long its sequences are


class Tables:
    """bands: the layers of a band keep alike, and have a page table of their own; num_kept: kept places for states, None if no
    layer keeps a state of each sequence."""

    def __init__(
        self,
        backend: Backend,
        max_rows: int,
        max_len: int,
        bands: Sequence[BandSize],
        step_tokens: int,
        num_kept: int | None = None,
    ):
        self.backend, self.scratch_row, self.keeps_states = backend, max_rows, num_kept is not None
        self.page_size = page_size = bands[0].page_size
        device = backend.device
        self.pages_per_row = -(-max_len // page_size)
        self.width = max_len + 1
        self.tokens = backend.zeros((max_rows + 1, self.width), torch.int32)
        # The scratch row, for padding, writes to a page of its own behind all others.
        self.scratch_pages = [band.num_pages for band in bands]
        scratch = torch.tensor(self.scratch_pages, dtype=torch.int32, device=device).view(-1, 1, 1)
        self.all_pages = scratch.repeat(1, max_rows + 1, self.pages_per_row)
        self.page_tables = list(self.all_pages)  # by band: [all rows, pages]
        self.host = HostRows(max_rows + 1, len(bands))
        self.lengths = backend.zeros((self.host.first_kept + (num_kept or 0),), torch.int32)  # by slots as of states: of rows
        size = 4 * step_tokens + 16 * (max_rows + 2) + 3 * (step_tokens + self.width) + 65536
        self.packed = Packed(backend, size, backend.depth + 1)
        self.before: tuple[Plan, Padding, Step] | None = None  # the last step, if it was a captured one of single tokens

    def fill(self, plan: Plan, uniforms: np.ndarray | None, padding: Padding | None = None) -> Step:
        """Takes a plan's changes into the tables and lays its columns into the device's buffer, padded for a captured graph.

        uniforms: each row's random number, or its seed where the step is to be settled; None where all are greedy
        """
        if self._goes_on(plan, padding):
            return self._one_further(plan, uniforms)
        self._count_further()
        step = self._lay_out(plan, uniforms, padding)
        self.before = (plan, padding, step) if padding is not None and padding.decode and not step.settled else None
        return step

    def _count_further(self) -> None:
        """Notes the lengths of rows that only advanced in the last steps."""
        if self.before is not None:
            plan, _, step = self.before
            self.host.lengths[plan.rows] = step.starts[: len(plan.rows)] + 2

    def _goes_on(self, plan: Plan, padding: Padding | None) -> bool:
        """Whether this step repeats the one before, each row one token further, as most steps of long answers do."""
        if self.before is None or plan.admit or plan.forks or plan.drafts or plan.keeps:
            return False
        before, size, _ = self.before
        return padding == size and plan.rows == before.rows and plan.starts == [start + 1 for start in before.starts]

    def _one_further(self, plan: Plan, uniforms: np.ndarray | None) -> Step:
        """The columns of the step before, moved on by one token. Padding stays where it is."""
        assert self.before is not None
        _, padding, last = self.before
        count, host, starts = len(plan.rows), self.packed.repeat(), last.starts.copy()
        starts[:count] += 1
        for name in ("lengths", "positions", "reach", "pick_positions"):
            host[last.begin(name) : last.begin(name) + count] += 1
        if self.keeps_states:
            for name, slots in self.host.states(last.rows[:count], starts[:count], []).items():
                host[last.begin(name) : last.begin(name) + count] = slots
        if uniforms is not None:
            host[last.begin("uniform") : last.begin("uniform") + count] = uniforms.view(np.int32)
        self._send(plan)
        step = dataclasses.replace(last, starts=starts)
        self.before = (plan, padding, step)
        return step

    def _lay_out(self, plan: Plan, uniforms: np.ndarray | None, padding: Padding | None) -> Step:
        count = padding.sequences if padding else len(plan.rows)
        lone = int(padding is not None and padding.decode)  # a sequence that pads a decode step has one token like the others
        rows = _column(plan.rows, count, self.scratch_row)
        starts, counts = _column(plan.starts, count, 0), _column(plan.counts, count, lone)
        logits, samples = _column(plan.logits, count, lone), _column(plan.samples, count, 0).astype(bool)
        self.host.take(plan, self.page_size)
        self.packed.begin()
        ends = np.zeros(count + 1, np.int32)
        np.cumsum(counts, out=ends[1:])
        lengths, put = starts + counts, self.packed.put
        tokens = padding.tokens if padding else int(ends[-1])
        columns = {"rows": put(rows), "query_starts": put(ends), "lengths": put(lengths)}
        settled = bool(plan.drafts)
        columns |= {name: put(values) for name, values in self.host.bounds(rows, lengths, samples, settled).items()}
        if settled or self.keeps_states:
            columns |= {name: put(slots) for name, slots in self.host.states(rows, starts, plan.keeps).items()}
        columns |= self._token_columns(rows, starts, counts, ends, tokens)
        columns |= self._pick_columns(rows, lengths, samples, uniforms, padding)
        if settled:
            columns["pick_sequences"] = put(np.flatnonzero(samples), padding.sequences if padding else 0, -1)
        columns["logits_at"] = put(_wanted(ends[1:], logits), count if padding else 0)
        self._send(plan)
        padded, room = count > len(plan.rows), tokens if padding and not padding.decode else 0
        return Step(
            rows, starts, counts, logits, samples, tokens, columns, self.packed.target, self._layouts, padded, room, settled
        )

    def _layouts(self, step: Step) -> list[StepLayout]:
        first = StepLayout(
            self.page_size,
            step.rows,
            step.starts,
            step.counts,
            self.page_tables[0],
            step.column("rows"),
            step.column("query_starts"),
            step.column("lengths"),
            step.column("states_from") if self.keeps_states else None,
            step.column("states_to") if self.keeps_states else None,
            step.padded,
            step.room,
        )
        return [first, *(dataclasses.replace(first, page_table=table) for table in self.page_tables[1:])]

    def _token_columns(
        self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, ends: np.ndarray, num_tokens: int
    ) -> dict[str, Column]:
        """What is known of each token; those that pad stand at the beginning of the scratch row."""
        token_rows, positions = rows, starts
        if not (counts == 1).all():
            token_rows = np.repeat(rows, counts)
            positions = np.arange(ends[-1], dtype=np.int32) + np.repeat(starts - ends[:-1], counts)
        reach = np.maximum(self.host.num_prompt[token_rows], positions + 1)
        put = self.packed.put
        return {
            "positions": put(positions, num_tokens),
            "token_rows": put(token_rows, num_tokens, self.scratch_row),
            "reach": put(reach, num_tokens, 1),
        }

    def _pick_columns(
        self, rows: np.ndarray, lengths: np.ndarray, samples: np.ndarray, uniforms: np.ndarray | None, padding: Padding | None
    ) -> dict[str, Column]:
        """What is known of each sequence that samples.

        A captured graph samples for as many as it has sequences; what is not wanted goes to the scratch row.
        """
        picks = np.flatnonzero(samples)
        count, put = padding.sequences if padding else len(picks), self.packed.put
        chosen = _column(rows[picks], count, self.scratch_row)
        columns: dict[str, Column] = {}
        if uniforms is not None:
            columns = {name: put(values[chosen]) for name, values in self.host.sampling.items()}
            if uniforms.dtype == np.uint64:
                columns["seeds"] = put(uniforms[picks].view(np.int32), 2 * count)
            random = np.zeros(len(picks), np.float32) if "seeds" in columns else uniforms[picks]
            columns["uniform"] = put(random, count)
        return columns | {"pick_rows": put(chosen), "pick_positions": put(lengths[picks], count)}

    def _send(self, plan: Plan) -> None:
        """Sends the columns, and behind them the plan's new tokens and pages, which then go where they belong."""
        if not (plan.admit or plan.forks or plan.trims or plan.page_rows or plan.told_rows):
            return self.packed.send()
        columns = self.packed.used
        for row, band, pages in plan.trims:
            self.host.num_held[band, row] = pages
        admitted, forked, updates = self._admitted(plan), self._forked(plan), self._updates(plan)
        taken = self.packed.put(np.asarray([admit.row for admit in plan.admit], np.int32)) if plan.admit else None
        self.packed.send()
        self.packed.used = columns
        if taken is not None:  # clears the row's former request
            rows = self.packed.at(taken).long()
            self.tokens.index_fill_(0, rows, 0)
            for table, scratch in zip(self.page_tables, self.scratch_pages, strict=True):
                table.index_fill_(0, rows, scratch)
        self._write(admitted)
        if forked is not None:
            rows, parents = (self.packed.at(column).long() for column in forked)
            for table in (self.tokens, *self.page_tables):
                table.index_copy_(0, rows, table.index_select(0, parents))
        self._write(updates)

    def _write(self, updates: list[Update]) -> None:
        for table, index, values in updates:
            table.index_copy_(0, self.packed.at(index).view(torch.int64), self.packed.at(values))

    def _admitted(self, plan: Plan) -> list[Update]:
        """The tokens of the rows that are taken."""
        if not plan.admit:
            return []
        put, tokens = self.packed.put, [np.frombuffer(a.tokens, np.int32) for a in plan.admit]
        index = np.concatenate([np.arange(len(t)) + a.row * self.width for a, t in zip(plan.admit, tokens, strict=True)])
        return [(self.tokens.view(-1), put(index.view(np.int32)), put(np.concatenate(tokens)))]

    def _forked(self, plan: Plan) -> tuple[Column, Column] | None:
        """The rows that become copies, and those that they are copies of."""
        pairs = [(fork.row, fork.parent) for fork in plan.forks if fork.parent != NO_PARENT]
        if not pairs:
            return None
        rows, parents = np.array(pairs, np.int32).T
        return self.packed.put(rows), self.packed.put(parents)

    def _updates(self, plan: Plan) -> list[Update]:
        """The plan's pages and the tokens it tells, where the rows have them already."""
        updates, put = [], self.packed.put
        forks = [fork for fork in plan.forks if fork.parent != NO_PARENT]
        own = [(band, fork.row, fork.length // self.page_size, to) for fork in forks for band, _, to in fork.copies]
        if own:
            bands, rows, at, pages = np.array(own, np.int64).T
            index = (rows + bands * (self.scratch_row + 1)) * self.pages_per_row + at
            updates.append((self.all_pages.view(-1), put(index.view(np.int32)), put(pages)))
        if plan.told_rows:
            starts = dict(zip(plan.rows, plan.starts, strict=True))
            index = np.array([row * self.width + starts[row] for row in plan.told_rows])
            updates.append((self.tokens.view(-1), put(index.view(np.int32)), put(np.asarray(plan.told_tokens))))
        if plan.page_rows:
            rows, bands = np.asarray(plan.page_rows), np.asarray(plan.page_bands or 0)
            at = rows + bands * (self.scratch_row + 1)
            index = at * self.pages_per_row + self.host.add_pages(at)
            updates.append((self.all_pages.view(-1), put(index.view(np.int32)), put(np.asarray(plan.page_ids))))
        return updates

    def copies(self, plan: Plan) -> dict[int, tuple[Tensor, Tensor]]:
        """By band, the slots that the plan's forks take over, and where to: of a page that is not full those in use alone."""
        pairs: dict[int, list[np.ndarray]] = {}
        for fork in plan.forks:
            live = np.arange(fork.length % self.page_size)
            for band, page, to in fork.copies:
                pairs.setdefault(band, []).append(np.stack([page * self.page_size + live, to * self.page_size + live]))
        device = self.tokens.device
        joined = {band: torch.from_numpy(np.concatenate(slots, axis=1)).to(device) for band, slots in pairs.items()}
        return {band: (slots[0], slots[1]) for band, slots in joined.items()}

    def inputs(self, step: Step) -> tuple[Tensor, list[Tensor]]:
        """(token ids, slots by band) of a step's tokens, looked up on the device: sampled tokens never wait for the host."""
        look_up, where = self.backend.ops.step_inputs, (step.token_rows, step.positions, self.page_size)
        found = [look_up(self.tokens, table, *where) for table in self.page_tables]
        return found[0][0], [slots for _, slots in found]

    def append(self, step: Step, ids: Tensor) -> None:
        """Puts sampled tokens where the next step will look for them."""
        self.backend.ops.append_tokens(self.tokens, step.pick_rows, step.pick_positions, ids)
        if step.settled:
            length, grows, slots = (step.column(name) for name in ("lengths", "grows", "states_to"))
            self.lengths.index_copy_(0, slots.long(), length + grows)

    def settle(self, step: Step) -> None:
        """Moves a step whose plan said only how long its sequences can be to where they are; does nothing for other steps."""
        if not step.settled:
            return
        ops = self.backend.ops
        ops.settle(self.lengths, {name: step.column(name) for name in SETTLED})
        if "seeds" in step.columns:
            seeds = step.column("seeds").view(torch.int64)
            step.uniform.copy_(ops.uniforms(seeds, step.pick_positions))

    def exact(self, plan: Plan) -> Plan:
        """The plan with the lengths that its rows really have; waits for the device."""
        self._count_further()
        known, rows = self.host.lengths.copy(), np.asarray(plan.rows)
        lost = np.flatnonzero(known < 0)
        if len(lost):
            known[lost] = self.lengths[torch.from_numpy(self.host.state_slots[lost]).to(self.lengths.device).long()].cpu().numpy()
        for admit in plan.admit:
            known[admit.row] = len(admit.tokens) // 4
        for fork in plan.forks:
            known[fork.row] = fork.length + 1
        starts = np.where(plan.samples, known[rows] - np.asarray(plan.counts), plan.starts)
        return msgspec.structs.replace(plan, starts=starts.tolist(), drafts=[])


def _column(values: list | np.ndarray, count: int, fill: int) -> np.ndarray:
    column = np.asarray(values, dtype=np.int32)
    return column if len(column) == count else np.concatenate([column, np.full(count - len(column), fill, np.int32)])


def _wanted(ends: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The indices of the last logits[i] tokens of each sequence."""
    if logits.max(initial=0) <= 1:
        return ends[logits == 1] - 1
    return np.concatenate([np.arange(end - n, end, dtype=np.int32) for end, n in zip(ends, logits, strict=True)])
