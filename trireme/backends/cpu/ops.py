"""The op table on the C kernels: float32 activations, packed weights. What the kernels cannot do falls back to the plain bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trireme.backends.cpu.library import CHOOSING, KV_KINDS
from trireme.backends.cpu.program import PLAIN, Live, Program, Sequences, Transform
from trireme.backends.cpu.tape import Tape
from trireme.backends.cpu.weights import PackedWeight
from trireme.ops import AttentionKind, Choosing, KVCache, Ops, StepLayout
from trireme.ops.choosing import column_type

_GATED = {"silu": "silu_mul", "gelu": "gelu_mul", "gelu_tanh": "gelu_tanh_mul"}
_PLAIN_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu": "relu"}


@dataclass
class CpuPlan:
    """A step's sequences for the kernels, and its layout for the plain bodies."""

    sequences: Sequences
    layout: StepLayout


def gate_transform(kind: str) -> Transform:
    """activation(gate) * up as the transform of a product's input."""
    return Transform(_GATED[kind])


class CpuOps(Ops):
    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.live: Live | None = None

    def run(self, op: str, *args: Any, **options: Any) -> None:
        """Runs one step, and adds it to the recording if there is one."""
        program = Program(self.live)
        getattr(program, op)(*args, **options)
        program.run()
        if self.tape is not None:
            self.tape.take(program)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype) if self.tape is None else self.tape.arena.empty(shape, dtype)

    # --- look-up and products ---------------------------------------------------------------------------------------------

    def packed_linear(self, weights: list[PackedWeight], x: Tensor, bias: Tensor | None, transform: Transform = PLAIN) -> Tensor:
        """transform(x) · weightsᵀ + bias, with the weights stacked by rows."""
        width = sum(weight.rows for weight in weights)
        if not x.numel():  # a step with only unfinished prompts needs no logits
            return x.new_empty((*x.shape[:-1], width))
        wide = x.float().reshape(-1, x.shape[-1])
        output, first = self.empty(len(wide), width), 0
        for weight in weights:
            part = slice(first, first + weight.rows)
            self.run("linear", weight, wide, output[:, part], transform, None if bias is None else bias[part])
            first += weight.rows
        return output.view(*x.shape[:-1], width).to(x.dtype)

    def packed_embedding(self, table: PackedWeight, ids: Tensor) -> Tensor:
        """Rows of a packed table as float32."""
        output = self.empty(ids.numel(), table.columns)
        self.run("embedding", table, ids.to(torch.int32).reshape(-1), output)
        return output.view(*ids.shape, -1)

    def select(self, x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
        if not _rows(x) or dim or index.dtype not in (torch.int32, torch.int64):
            return super().select(x, index, dim)
        output = self.empty(len(index), x.shape[1])
        self.run("gather", x, index.to(torch.int32).contiguous(), output)
        return output

    # --- norms and activations --------------------------------------------------------------------------------------------

    def _map(self, transform: Transform, x: Tensor, width: int) -> Tensor:
        if not x.numel():
            return x.new_empty((*x.shape[:-1], width))
        rows = x.reshape(-1, x.shape[-1])
        output = self.empty(len(rows), width)
        self.run("row_map", transform, rows, output)
        return output.view(*x.shape[:-1], width)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return super().rms_norm(x, weight, eps)
        return self._map(Transform("rms_norm", weight.float(), None, eps), x, x.shape[-1])

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return super().layer_norm(x, weight, bias, eps)
        return self._map(Transform("layer_norm", weight.float(), None if bias is None else bias.float(), eps), x, x.shape[-1])

    def _add_norm(self, transform: Transform, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        output = self.empty(*x.shape)
        self.run("row_map", transform, x, output, residual=residual)
        return output, residual

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not _rows(x) or not _rows(residual):
            return super().add_rms_norm(x, residual, weight, eps)
        return self._add_norm(Transform("rms_norm", weight.float(), None, eps), x, residual)

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        if not _rows(x) or not _rows(residual):
            return super().add_layer_norm(x, residual, weight, bias, eps)
        return self._add_norm(Transform("layer_norm", weight.float(), None if bias is None else bias.float(), eps), x, residual)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        if x.dtype != torch.float32 or kind not in _PLAIN_ACTIVATIONS:
            return super().activation(x, kind)
        return self._map(Transform(_PLAIN_ACTIVATIONS[kind]), x, x.shape[-1])

    def gated(self, gate_up: Tensor, kind: str) -> Tensor:
        if gate_up.dtype != torch.float32 or kind not in _GATED:
            return super().gated(gate_up, kind)
        return self._map(Transform(_GATED[kind]), gate_up, gate_up.shape[-1] // 2)

    # --- attention --------------------------------------------------------------------------------------------------------

    def rope_store_in_place(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor, cache: KVCache, slots: Tensor, norms: Transform = PLAIN
    ) -> None:
        """Applies norm and rope to q and k in place, and stores k and v."""
        index, slots = index.to(torch.int32), slots.to(torch.int32)
        self.run("rope_store", q, k, v, index, slots, table, cache, norms)

    def qkv_rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor, cache: KVCache, slots: Tensor
    ) -> Tensor:
        if not _heads(q, k, v) or not readable(cache):
            return super().qkv_rope_store(q, k, v, table, index, cache, slots)
        q, k = q.clone(), k.clone()
        self.rope_store_in_place(q, k, v, table, index, cache, slots)
        return q

    def plan_attention(self, layout: StepLayout) -> CpuPlan:
        self.live = Live(layout.room, layout.query_starts[-1:]) if layout.room else None
        places = (layout.query_starts, layout.context_lengths, layout.page_table, layout.rows_device)
        return CpuPlan(Sequences(*places, layout.page_size), layout)

    def attention(self, q: Tensor, cache: KVCache, plan: CpuPlan, kind: AttentionKind, rounded: bool = False) -> Tensor:
        if not _heads(q) or not readable(cache):
            if self.tape is not None:
                self.tape.broken = "the plain body of attention goes by lengths on the host"
            return super().attention(q, cache, super().plan_attention(plan.layout), kind)
        output = self.empty(*q.shape)
        flat = output.view(len(q), -1)
        slopes, sinks = (None if x is None else x.float().contiguous() for x in (kind.slopes, kind.sinks))
        options = {
            "window": kind.window,
            "chunked": kind.chunked,
            "softcap": kind.softcap,
            "slopes": slopes,
            "sinks": sinks,
            "rounded": rounded,
        }
        self.run("attention", q, flat, cache, plan.sequences, kind.scale, **options)
        return output

    # --- the tables of running requests -----------------------------------------------------------------------------------

    def step_inputs(self, tokens: Tensor, pages: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        if not _numbers(tokens, pages, rows, positions):
            return super().step_inputs(tokens, pages, rows, positions, page_size)
        ids, slots = (self.empty(len(rows), dtype=torch.int32) for _ in range(2))
        self.run("step_inputs", tokens, pages, rows, positions, page_size, ids, slots)
        return ids, slots

    def append_tokens(self, tokens: Tensor, rows: Tensor, positions: Tensor, ids: Tensor) -> None:
        if not _numbers(tokens, rows, positions) or ids.dtype != torch.int64 or not ids.is_contiguous():
            return super().append_tokens(tokens, rows, positions, ids)
        self.run("append_tokens", tokens, rows, positions, ids)

    # --- choosing tokens --------------------------------------------------------------------------------------------------

    def choose_greedy(self, logits: Tensor) -> Tensor:
        if not _rows(logits):
            return super().choose_greedy(logits)
        values, ids = self.empty(len(logits), 1), self.empty(len(logits), 1, dtype=torch.int32)
        chosen = self.empty(len(logits), dtype=torch.int64)
        self.run("top_k", logits, values, ids, chosen)
        return chosen

    def choose(self, logits: Tensor, by: Choosing, uniform: Tensor) -> Tensor:
        if not _can_sample(logits, by, uniform):
            return super().choose(logits, by, uniform)
        chosen = self.empty(len(logits), dtype=torch.int64)
        self.run("sample", logits, by, uniform, chosen)
        return chosen

    def sample(self, logits: Tensor, by: Choosing, uniform: Tensor) -> Tensor:
        if not _can_sample(logits, by, uniform):
            return super().sample(logits, by, uniform)
        return self.choose(logits, by, uniform).clamp_min(0)

    def sample_greedy(self, logits: Tensor) -> Tensor:
        if not _rows(logits):
            return super().sample_greedy(logits)
        values, ids = self.empty(len(logits), 1), self.empty(len(logits), 1, dtype=torch.int32)
        self.run("top_k", logits, values, ids)
        return ids.view(-1).long()


def readable(cache: KVCache) -> bool:
    """Whether the kernels read and write this kind of KV."""
    return cache.is_alike and cache.kind in KV_KINDS and (cache.kind != "plain" or cache.k.dtype == torch.float32)


def _rows(x: Tensor) -> bool:
    """Whether x is rows of floats in the layout that the kernels read."""
    return x.dtype == torch.float32 and x.dim() == 2 and x.stride(-1) == 1


def _numbers(*tensors: Tensor) -> bool:
    """Whether these are int32 tensors with a contiguous last axis."""
    return all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in tensors)


def _can_sample(logits: Tensor, by: Choosing, uniform: Tensor) -> bool:
    """Whether the sampling kernel supports these rows and every sampling column."""
    if by._fields != CHOOSING or not _rows(logits):
        return False
    typed = all(column.dtype == column_type(name) for name, column in by._asdict().items()) and uniform.dtype == torch.float32
    return typed and all(column.is_contiguous() for column in (*by, uniform))


def _heads(*tensors: Tensor) -> bool:
    """Whether these are floats [tokens, heads, head_dim] whose heads are contiguous."""
    return all(t.dtype == torch.float32 and t.stride(2) == 1 and t.stride(1) == t.shape[2] for t in tensors)
