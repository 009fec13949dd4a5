"""Programs: steps of the C library over tensors, built once and run by one call. Knows ops and buffers, not models."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from trireme.backends.cpu.library import (
    OPS,
    TRANSFORMS,
    AttentionStruct,
    BatchStruct,
    EmbeddingStruct,
    GatherStruct,
    LinearStruct,
    RopeStoreStruct,
    RowMapStruct,
    StepStruct,
    TopKStruct,
    TransformStruct,
    library,
)
from trireme.backends.cpu.weights import PackedWeight


@dataclass(frozen=True)
class Transform:
    """What is done to a row before it is multiplied: a norm, a gate activation, or nothing."""

    kind: str = "none"
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    epsilon: float = 1e-5
    offset: float = 0.0


PLAIN = Transform()
_BATCH_FIELDS = {name for name, kind in BatchStruct._fields_ if kind is ctypes.c_void_p}


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Batch:
    """Which tokens are computed and where their keys and values live. All arrays are int32 tensors; see trireme_cpu.h."""

    def __init__(self, **arrays: torch.Tensor) -> None:
        self.struct = BatchStruct()
        self.address = ctypes.addressof(self.struct)
        self.arrays: dict[str, torch.Tensor] = {}
        self.set(**arrays)

    def set(self, **arrays: torch.Tensor) -> None:
        """Replaces arrays; counts follow from their lengths."""
        for name, array in arrays.items():
            assert name in _BATCH_FIELDS and array.dtype == torch.int32 and array.is_contiguous(), (name, array.dtype)
            setattr(self.struct, name, array.data_ptr())
            self.arrays[name] = array
            if name in ("tokens", "positions"):
                self.struct.num_tokens = len(array)
            elif name == "context_lengths":
                self.struct.num_sequences = len(array)
            elif name == "output_rows":
                self.struct.num_outputs = len(array)


class Program:
    """A list of steps. Tensors are taken by address and kept; rows follow the batch of each run."""

    def __init__(self) -> None:
        self.steps: list[StepStruct] = []
        self.kept: list[object] = []
        self.compiled: ctypes.Array[StepStruct] | None = None

    def run(self, batch: Batch) -> None:
        """Runs all steps over the batch's tokens (or outputs)."""
        if self.compiled is None:
            self.compiled = (StepStruct * len(self.steps))(*self.steps)
            self.address = ctypes.addressof(self.compiled)
            self.call = library().trireme_run
        self.call(self.address, len(self.steps), batch.address)

    def _add(self, op: str, args: ctypes.Structure, kept: tuple[object, ...], over_outputs: bool = False) -> None:
        for thing in kept:
            if isinstance(thing, torch.Tensor):
                assert thing.stride(-1) == 1, (op, thing.shape, thing.stride())
        self.steps.append(StepStruct(OPS[op], over_outputs, ctypes.addressof(args)))
        self.kept += [args, *kept]
        self.compiled = None

    def linear(
        self,
        weight: PackedWeight,
        source: torch.Tensor,
        output: torch.Tensor,
        transform: Transform = PLAIN,
        bias: torch.Tensor | None = None,
        accumulate: bool = False,
        over_outputs: bool = False,
    ) -> None:
        """output (+)= transform(source) · weightᵀ + bias"""
        args = LinearStruct(_transform(transform), weight.pointer, *_rows(source), *_rows(output), pointer(bias), accumulate)
        self._add("linear", args, (weight, source, output, transform, bias), over_outputs)

    def row_map(
        self,
        transform: Transform,
        source: torch.Tensor,
        output: torch.Tensor,
        accumulate: bool = False,
        over_outputs: bool = False,
    ) -> None:
        """output (+)= transform(source)"""
        args = RowMapStruct(_transform(transform), *_rows(source), *_rows(output), output.shape[-1], accumulate)
        self._add("row_map", args, (transform, source, output), over_outputs)

    def rope_store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cosine: torch.Tensor | None,
        sine: torch.Tensor | None,
        keys: torch.Tensor | None,
        values: torch.Tensor | None,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        epsilon: float = 1e-6,
        offset: float = 0.0,
        interleaved: bool = False,
    ) -> None:
        """Rotates query and key [tokens, heads, head_dim] in place and writes key and value into the batch's slots."""
        heads, head_dim = query.shape[1:]
        kv_heads = key.shape[1]
        rotary = 2 * cosine.shape[-1] if cosine is not None else 0
        scales_at = (pointer(scales[0]), pointer(scales[1])) if scales else (None, None)
        norms_at = (pointer(norms[0]), pointer(norms[1])) if norms else (None, None)
        args = RopeStoreStruct(
            *(pointer(t) for t in (query, key, value)),
            *(t.stride(0) for t in (query, key, value)),
            *(heads, kv_heads, head_dim, rotary, interleaved),
            *(pointer(cosine), pointer(sine), *norms_at, epsilon, offset),
            *(pointer(keys), pointer(values), *scales_at),
        )
        self._add("rope_store", args, (query, key, value, cosine, sine, keys, values, scales, norms))

    def attention(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        window: int = 0,
        softcap: float = 0.0,
        slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        causal: bool = True,
    ) -> None:
        """output = attention of query [tokens, heads, head_dim] over the batch's slots of keys and values."""
        heads, head_dim = query.shape[1:]
        scales_at = (pointer(scales[0]), pointer(scales[1])) if scales else (None, None)
        args = AttentionStruct(
            *(pointer(query), query.stride(0), pointer(output), output.stride(0)),
            *(heads, keys.shape[1], head_dim, window, scale, softcap),
            *(pointer(slopes), pointer(sinks), pointer(keys), pointer(values), *scales_at, causal),
        )
        self._add("attention", args, (query, output, keys, values, scales, slopes, sinks))

    def embedding(self, table: PackedWeight, output: torch.Tensor, scale: float = 1.0) -> None:
        """output = rows of the table named by the batch's tokens, times scale"""
        args = EmbeddingStruct(table.pointer, *_rows(output), scale)
        self._add("embedding", args, (table, output))

    def gather(self, source: torch.Tensor, output: torch.Tensor) -> None:
        """output[i] = source[output_rows[i]]"""
        self._add("gather", GatherStruct(*_rows(source), *_rows(output), output.shape[-1]), (source, output), True)

    def top_k(self, source: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, over_outputs: bool = True) -> None:
        """The values.shape[1] largest of each row, best first, and where they stand (int32)."""
        args = TopKStruct(*_rows(source), source.shape[-1], values.shape[-1], pointer(values), pointer(ids))
        self._add("top_k", args, (source, values, ids), over_outputs)


def _rows(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.stride(0)


def _transform(transform: Transform) -> TransformStruct:
    code = TRANSFORMS[transform.kind]
    return TransformStruct(code, transform.epsilon, transform.offset, pointer(transform.weight), pointer(transform.bias))
