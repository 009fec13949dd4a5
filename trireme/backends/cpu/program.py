"""Programs: steps of the C library over tensors, run by one call. Knows ops and buffers, not models.

Tensors are taken by address. A program keeps weights and constants alive; buffers are kept by whoever made them, so that one
recorded program can reuse them as eagerly run code would.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from trireme.backends.cpu.library import (
    KV_KINDS,
    OPS,
    TRANSFORMS,
    AppendTokensStruct,
    AttentionStruct,
    EmbeddingStruct,
    GatherStruct,
    LinearStruct,
    RopeStoreStruct,
    RowMapStruct,
    SampleStruct,
    SequencesStruct,
    StepInputsStruct,
    StepStruct,
    TopKStruct,
    TransformStruct,
    library,
)
from trireme.backends.cpu.weights import PackedWeight
from trireme.ops import Choosing, KVCache


@dataclass(frozen=True)
class Transform:
    """What is done to a row before it is multiplied: a norm, a gate activation, or nothing."""

    kind: str = "none"
    weight: Tensor | None = None
    bias: Tensor | None = None
    epsilon: float = 1e-5
    offset: float = 0.0


PLAIN = Transform()


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Sequences:
    """Where the sequences of a step lie: [count] int32 tensors, and the pages their tokens are in."""

    def __init__(self, query_starts: Tensor, context_lengths: Tensor, page_table: Tensor, page_rows: Tensor, page_size: int):
        self.kept = (query_starts, context_lengths, page_table, page_rows)
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in self.kept), [t.dtype for t in self.kept]
        count = len(context_lengths)
        self.struct = SequencesStruct(count, page_size, page_table.stride(0), *(t.data_ptr() for t in self.kept))
        self.pointer = ctypes.pointer(self.struct)


@dataclass(frozen=True)
class Live:
    """Of `room` rows only the first `count` (one int32) are wanted, as it stands when the program runs."""

    room: int
    count: Tensor


class Program:
    """A list of steps in the order they were added. With `live`, those of as many rows as it has room leave out the unwanted."""

    def __init__(self, live: Live | None = None) -> None:
        self.live = live
        self.steps: list[StepStruct] = []
        self.kept: list[object] = []

    def run(self) -> None:
        """Runs all steps, in C from the first to the last."""
        compiled = (StepStruct * len(self.steps))(*self.steps)
        library().trireme_run(ctypes.addressof(compiled), len(compiled))

    def _add(self, op: str, rows: int, args: ctypes.Structure, *kept: object) -> None:
        wanted = op != "step_inputs"  # every row's id and slot is looked up: torch's calls, too, index by them
        live = self.live.count if self.live and rows == self.live.room and wanted else None
        self.steps.append(StepStruct(OPS[op], rows, ctypes.addressof(args), pointer(live)))
        self.kept += [args, live, *kept]

    def linear(
        self,
        weight: PackedWeight,
        source: Tensor,
        output: Tensor,
        transform: Transform = PLAIN,
        bias: Tensor | None = None,
        accumulate: bool = False,
    ) -> None:
        """output (+)= transform(source) · weightᵀ + bias"""
        places = (*_rows(source), *_rows(output), pointer(bias), accumulate)
        args = LinearStruct(_transform(transform), weight.pointer, *places)
        self._add("linear", len(source), args, weight, transform, bias)

    def row_map(
        self, transform: Transform, source: Tensor, output: Tensor, accumulate: bool = False, residual: Tensor | None = None
    ) -> None:
        """output (+)= transform(source); with a residual: residual += source, output = transform(residual)"""
        more = (0, 0) if residual is None else _rows(residual)
        args = RowMapStruct(_transform(transform), *_rows(source), *_rows(output), *more, output.shape[-1], accumulate)
        self._add("row_map", len(source), args, transform)

    def rope_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: Tensor | None,
        cache: KVCache,
        norms: Transform = PLAIN,
        interleaved: bool = False,
    ) -> None:
        """Rotates query and key [tokens, heads, head_dim] in place and writes key and value into their slots.

        table: [positions, rotary_dim], cosines then sines. norms: `weight` is the query heads' norm, `bias` the key heads'.
        """
        rotary = table.shape[-1] if table is not None else 0
        cosine = pointer(table)
        sine = None if table is None else table.data_ptr() + rotary // 2 * 4
        given = (cache.factors if cache.kind == "int8" else None) or (None, None)
        args = RopeStoreStruct(
            *(pointer(t) for t in (query, key, value)),
            *(t.stride(0) for t in (query, key, value)),
            *(query.shape[1], key.shape[1], query.shape[2], rotary, interleaved),
            *(pointer(positions), pointer(slots), cosine, sine, 0 if table is None else table.stride(0)),
            *(pointer(norms.weight), pointer(norms.bias), norms.epsilon, norms.offset),
            *(*_kept(cache), *(pointer(t) for t in given), KV_KINDS[cache.kind]),
        )
        self._add("rope_store", len(query), args, table, cache, norms)

    def attention(
        self,
        query: Tensor,
        output: Tensor,
        cache: KVCache,
        sequences: Sequences,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        causal: bool = True,
        rounded: bool = False,
        chunked: bool = False,
    ) -> None:
        """output = attention of query [tokens, heads, head_dim] over the slots of its sequences; rounded: in bf16 where faster."""
        args = AttentionStruct(
            *(sequences.pointer, *_rows(query), *_rows(output)),
            *(query.shape[1], cache.k.shape[1], query.shape[2], window, scale, softcap),
            *(pointer(slopes), pointer(sinks), *_kept(cache), KV_KINDS[cache.kind], causal, rounded, chunked),
        )
        self._add("attention", len(query), args, cache, sequences, slopes, sinks)

    def embedding(self, table: PackedWeight, tokens: Tensor, output: Tensor, scale: float = 1.0) -> None:
        """output = rows of the table named by tokens (int32), times scale"""
        assert tokens.dtype == torch.int32, tokens.dtype
        self._add("embedding", len(tokens), EmbeddingStruct(table.pointer, pointer(tokens), *_rows(output), scale), table)

    def gather(self, source: Tensor, index: Tensor, output: Tensor) -> None:
        """output[i] = source[index[i]], the index int32"""
        assert index.dtype == torch.int32, index.dtype
        self._add("gather", len(index), GatherStruct(*_rows(source), *_rows(output), pointer(index), output.shape[-1]))

    def top_k(self, source: Tensor, values: Tensor, ids: Tensor, chosen: Tensor | None = None) -> None:
        """The values.shape[1] largest of each row, best first, and where they stand (int32); chosen (int64), with one: the same,
        or -1 where its value is not finite."""
        args = TopKStruct(*_rows(source), source.shape[-1], values.shape[-1], *(pointer(t) for t in (values, ids, chosen)))
        self._add("top_k", len(source), args)

    def sample(self, source: Tensor, by: Choosing, uniform: Tensor, chosen: Tensor) -> None:
        """chosen (int64) = one token per row as `Ops.choose` says; `by` has the columns of CHOOSING."""
        columns = (pointer(t) for t in (*by, uniform, chosen))
        self._add("sample", len(source), SampleStruct(*_rows(source), source.shape[-1], *columns))

    def step_inputs(
        self, tokens: Tensor, pages: Tensor, rows: Tensor, positions: Tensor, page_size: int, ids: Tensor, slots: Tensor
    ) -> None:
        """ids = tokens[rows, positions] and the slots of those positions; all int32."""
        tables = (pointer(tokens), tokens.stride(0), pointer(pages), pages.stride(0))
        args = StepInputsStruct(*tables, pointer(rows), pointer(positions), page_size, pointer(ids), pointer(slots))
        self._add("step_inputs", len(rows), args, tokens, pages)

    def append_tokens(self, tokens: Tensor, rows: Tensor, positions: Tensor, ids: Tensor) -> None:
        """tokens[rows, positions] = ids (int64), 0 for an id below 0."""
        args = AppendTokensStruct(pointer(tokens), tokens.stride(0), *(pointer(t) for t in (rows, positions, ids)))
        self._add("append_tokens", len(ids), args, tokens)


def _rows(tensor: Tensor) -> tuple[int, int]:
    assert tensor.stride(-1) == 1 and tensor.dtype == torch.float32, (tensor.shape, tensor.stride(), tensor.dtype)
    return tensor.data_ptr(), tensor.stride(0)


def _kept(cache: KVCache) -> tuple[int | None, ...]:
    """Where a cache's keys and values, and what scales them, lie."""
    scales = cache.scales or cache.factors or (None, None)
    return tuple(pointer(t) for t in (cache.k, cache.v, *scales))


def _transform(transform: Transform) -> TransformStruct:
    code = TRANSFORMS[transform.kind]
    return TransformStruct(code, transform.epsilon, transform.offset, pointer(transform.weight), pointer(transform.bias))
