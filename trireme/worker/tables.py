"""The tables behind a step: every running row's tokens and pages, and the one packed buffer that carries a step to the device.

All device tensors here are persistent, so a captured graph finds its inputs where they were. Knows rows and pages as numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trireme.backends import Backend
from trireme.ipc.messages import Plan
from trireme.ops import StepLayout

FLOATS = ("temperature", "top_p", "min_p", "uniform")  # per sequence, as float32 bits in the int32 buffer


@dataclass
class Step:
    """One step's columns: numpy on the host, and the same numbers as slices of the device's persistent buffer."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    logits: np.ndarray  # per sequence: how many of its last tokens need logits
    samples: np.ndarray  # bool per sequence
    num_tokens: int
    positions: Tensor  # [tokens]
    token_rows: Tensor  # [tokens] each token's row
    logits_at: Tensor  # [wanted]
    reach: Tensor  # [tokens]
    pick_rows: Tensor  # [picks] the rows of the sequences that sample
    pick_positions: Tensor  # [picks] where a sampled token goes
    top_k: Tensor  # [picks], like each of FLOATS
    floats: dict[str, Tensor]
    layout: StepLayout


class Padding(NamedTuple):
    """The size a captured graph was made for. What a step lacks computes in the scratch row."""

    tokens: int
    sequences: int
    decode: bool  # whether every sequence has one token and samples


class Tables:
    def __init__(self, backend: Backend, max_rows: int, max_len: int, page_size: int, num_pages: int, step_tokens: int):
        self.backend, self.page_size, self.scratch_row, self.max_len = backend, page_size, max_rows, max_len
        device = backend.device
        self.pages_per_row = -(-max_len // page_size)
        self.width = max_len + 1
        self.tokens = torch.zeros((max_rows + 1, self.width), dtype=torch.int32, device=device)
        # The scratch row, for padding, writes to a page of its own behind all others.
        self.page_table = torch.full((max_rows + 1, self.pages_per_row), num_pages, dtype=torch.int32, device=device)
        self.num_held = np.zeros(max_rows + 1, dtype=np.int64)
        self.num_prompt = np.ones(max_rows + 1, dtype=np.int32)
        self.sampling = {name: np.zeros(max_rows + 1, dtype=np.float32) for name in FLOATS[:3]}
        self.top_k = np.zeros(max_rows + 1, dtype=np.int32)
        size = 4 * step_tokens + 16 * (max_rows + 2) + 2 * (step_tokens + self.width) + 65536
        self.packed = _Packed(backend, size, backend.depth + 1)

    def fill(self, plan: Plan, uniforms: np.ndarray, padding: Padding | None = None) -> Step:
        """Takes a plan's changes into the tables and lays its columns into the device's buffer, padded for a captured graph."""
        count = padding.sequences if padding else len(plan.rows)
        lone = int(padding is not None and padding.decode)  # a sequence that pads a decode step has one token like the others
        rows = _column(plan.rows, count, self.scratch_row)
        starts, counts = _column(plan.starts, count, 0), _column(plan.counts, count, lone)
        logits, samples = _column(plan.logits, count, lone), _column(plan.samples, count, 0).astype(bool)
        ends = np.cumsum(counts, dtype=np.int32)
        tokens = padding.tokens if padding else int(ends[-1])
        self._note_admissions(plan)
        self.packed.begin()
        query_starts = np.concatenate([np.zeros(1, np.int32), ends])
        put = self.packed.put
        layout = StepLayout(
            self.page_size, rows, starts, counts, self.page_table, put(rows), put(query_starts), put(starts + counts),
            padded=count > len(plan.rows), replayed=padding is not None and not padding.decode,
        )  # fmt: skip
        positions, token_rows, reach = self._token_columns(layout, query_starts, tokens)
        pick_rows, pick_positions, top_k, floats = self._pick_columns(rows, starts + counts, samples, uniforms, padding)
        wanted = _wanted(ends, logits)
        logits_at = put(_column(wanted, count, 0) if padding else wanted)
        updates = self._updates(plan)
        self.packed.send()
        for table, index, values in updates:
            table.view(-1).index_copy_(0, index.long(), values)
        return Step(
            rows, starts, counts, logits, samples, tokens, positions, token_rows, logits_at, reach,
            pick_rows, pick_positions, top_k, floats, layout,
        )  # fmt: skip

    def _token_columns(self, layout: StepLayout, query_starts: np.ndarray, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """(position, row, reach) of each token; those that pad stand at the beginning of the scratch row."""
        rows, counts = layout.rows, layout.counts
        positions = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(layout.starts - query_starts[:-1], counts)
        reach = np.maximum(np.repeat(self.num_prompt[rows], counts), positions + 1)
        columns = ((positions, 0), (np.repeat(rows, counts), self.scratch_row), (reach, 1))
        first, second, third = (self.packed.put(_column(values, num_tokens, fill)) for values, fill in columns)
        return first, second, third

    def _pick_columns(
        self, rows: np.ndarray, lengths: np.ndarray, samples: np.ndarray, uniforms: np.ndarray, padding: Padding | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """(row, position of its next token, top_k, FLOATS) of each sequence that samples.

        A captured graph samples for as many as it has sequences; what is not wanted goes to the scratch row.
        """
        picks = np.flatnonzero(samples)
        count = padding.sequences if padding else len(picks)
        chosen, put = _column(rows[picks], count, self.scratch_row), self.packed.put
        floats = {name: put(values[chosen]).view(torch.float32) for name, values in self.sampling.items()}
        floats["uniform"] = put(_column(uniforms[picks], count, 0.0, np.float32)).view(torch.float32)
        return put(chosen), put(_column(lengths[picks], count, 0)), put(self.top_k[chosen]), floats

    def _note_admissions(self, plan: Plan) -> None:
        for admit in plan.admit:
            sampling = admit.sampling
            self.num_held[admit.row] = 0
            self.num_prompt[admit.row] = admit.num_prompt
            for name in self.sampling:
                self.sampling[name][admit.row] = getattr(sampling, name)
            self.top_k[admit.row] = max(sampling.top_k, 0)

    def _updates(self, plan: Plan) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The plan's new tokens and pages, packed: (table, flat index, values), to be scattered once the buffer is there."""
        updates = []
        if plan.admit:
            index = np.concatenate([np.arange(len(a.tokens)) + a.row * self.width for a in plan.admit])
            values = np.concatenate([np.asarray(a.tokens) for a in plan.admit])
            updates.append((self.tokens, self.packed.put(index), self.packed.put(values)))
        if plan.page_rows:
            rows = np.asarray(plan.page_rows)
            order = _running_count(rows)
            index = rows * self.pages_per_row + self.num_held[rows] + order
            np.add.at(self.num_held, rows, 1)
            updates.append((self.page_table, self.packed.put(index), self.packed.put(np.asarray(plan.page_ids))))
        return updates

    def inputs(self, step: Step) -> tuple[Tensor, Tensor]:
        """(token ids, slots) of a step's tokens, looked up on the device: sampled tokens never wait for the host."""
        ops = self.backend.ops
        return ops.step_inputs(self.tokens, self.page_table, step.token_rows, step.positions, self.page_size)

    def append(self, step: Step, ids: Tensor) -> None:
        """Puts sampled tokens where the next step will look for them."""
        self.backend.ops.append_tokens(self.tokens, step.pick_rows, step.pick_positions, ids)


class _Packed:
    """Host staging buffers and one device buffer of int32, filled from the front and sent in one copy."""

    def __init__(self, backend: Backend, size: int, copies: int):
        self.staging = [backend.buffer((size,), torch.int32) for _ in range(copies)]
        on_host = backend.device.type == "cpu"
        self.target = self.staging[0] if on_host else torch.zeros(size, dtype=torch.int32, device=backend.device)
        self.on_host, self.turn, self.used = on_host, 0, 0
        self.host = self.staging[0].numpy()

    def begin(self) -> None:
        if not self.on_host:  # the copy of an earlier step may still be reading its buffer
            self.turn = (self.turn + 1) % len(self.staging)
            self.host = self.staging[self.turn].numpy()
        self.used = 0

    def put(self, values: np.ndarray) -> Tensor:
        """Lays values down; the result is the device's slice, valid after `send`."""
        begin, end = self.used, self.used + len(values)
        if end > len(self.host):  # rare: many long prompts admitted at once; they travel by themselves
            return torch.from_numpy(values.astype(np.int32)).to(self.target.device)
        self.host[begin:end] = values.view(np.int32) if values.dtype == np.float32 else values
        self.used = -(-end // 4) * 4  # 16-byte alignment
        return self.target[begin:end]

    def send(self) -> None:
        if not self.on_host:
            self.target[: self.used].copy_(self.staging[self.turn][: self.used], non_blocking=True)


def _column(values: list | np.ndarray, count: int, fill: float, dtype: type = np.int32) -> np.ndarray:
    column: np.ndarray = np.full(count, fill, dtype=dtype)
    column[: len(values)] = values
    return column


def _wanted(ends: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Indices of the last logits[i] tokens of each sequence."""
    if (logits == 1).all():
        return ends - 1
    return np.concatenate([np.arange(end - n, end, dtype=np.int32) for end, n in zip(ends, logits, strict=True)])


def _running_count(rows: np.ndarray) -> np.ndarray:
    """For each entry, how many equal ones stand before it."""
    order = np.argsort(rows, kind="stable")
    ranked = rows[order]
    first = np.searchsorted(ranked, ranked, side="left")
    result = np.empty_like(rows)
    result[order] = np.arange(len(rows)) - first
    return result
