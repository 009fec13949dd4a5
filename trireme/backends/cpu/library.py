"""The loaded C library: its structs and calls, and the choice of instruction set and threads. Knows nothing of models."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int8, c_int32, c_int64, c_void_p
from typing import Any

from trireme import host
from trireme.backends.cpu import build
from trireme.config import cache_folder
from trireme.errors import BackendUnavailable

KINDS = {name: i for i, name in enumerate(("f32", "bf16", "q4", "q4_min", "q8", "q4_k", "q6_k", "q4_table", "f16"))}
SOURCES = {
    name: i
    for i, name in enumerate(("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q5_0", "q4_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"))
}
KV_KINDS = {name: i for i, name in enumerate(("plain", "int8", "fp8", "int4"))}
ISAS = ("amx", "avx512vnni", "avx2", "bf16", "i8mm", "dotprod", "portable")  # best first
TRANSFORMS = {
    name: i
    for i, name in enumerate(
        ("none", "rms_norm", "layer_norm", "silu_mul", "gelu_tanh_mul", "gelu_mul", "gelu_tanh", "gelu", "relu_squared", "relu")
    )
}


class WeightStruct(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("kind", "rows", "columns", "padded")),
        ("data", c_void_p),
        ("tile_bytes", c_int64),
        ("table", c_int8 * 16),
        ("order", c_void_p),
    ]


class TransformStruct(Structure):
    _fields_ = [("kind", c_int32), ("epsilon", c_float), ("offset", c_float), ("weight", c_void_p), ("bias", c_void_p)]


_IN_OUT: list[tuple[str, Any]] = [("input", c_void_p), ("input_stride", c_int64), ("output", c_void_p), ("output_stride", c_int64)]


class LinearStruct(Structure):
    _fields_ = [
        ("transform", TransformStruct),
        ("weight", POINTER(WeightStruct)),
        *_IN_OUT,
        ("bias", c_void_p),
        ("accumulate", c_int32),
        ("reader", c_void_p),
    ]


class RowMapStruct(Structure):
    _fields_ = [
        ("transform", TransformStruct),
        *_IN_OUT,
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("width", c_int32),
        ("accumulate", c_int32),
    ]


class RopeStoreStruct(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "rotary_dim", "interleaved")),
        *((name, c_void_p) for name in ("positions", "slots", "cosine", "sine")),
        ("table_stride", c_int64),
        *((name, c_void_p) for name in ("query_norm", "key_norm")),
        ("epsilon", c_float),
        ("offset", c_float),
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "key_given", "value_given")),
        ("kv_kind", c_int32),
    ]


class SequencesStruct(Structure):
    _fields_ = [
        ("count", c_int32),
        ("page_size", c_int32),
        ("page_stride", c_int64),
        *((name, c_void_p) for name in ("query_starts", "context_lengths", "page_table", "page_rows")),
    ]


class AttentionStruct(Structure):
    _fields_ = [
        ("sequences", POINTER(SequencesStruct)),
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("output", c_void_p),
        ("output_stride", c_int64),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "window")),
        ("scale", c_float),
        ("softcap", c_float),
        *((name, c_void_p) for name in ("slopes", "sinks", "keys", "values", "key_scales", "value_scales")),
        *((name, c_int32) for name in ("kv_kind", "causal", "rounded", "chunked")),
    ]


class EmbeddingStruct(Structure):
    _fields_ = [
        ("table", POINTER(WeightStruct)),
        ("tokens", c_void_p),
        ("output", c_void_p),
        ("output_stride", c_int64),
        ("scale", c_float),
    ]


class GatherStruct(Structure):
    _fields_ = [*_IN_OUT, ("index", c_void_p), ("width", c_int32)]


class TopKStruct(Structure):
    _fields_ = [*_IN_OUT[:2], ("width", c_int32), ("count", c_int32), ("values", c_void_p), ("ids", c_void_p), ("chosen", c_void_p)]


CHOOSING = ("temperature", "top_k", "top_p", "min_p")  # the columns that the sampling kernel goes by, as its struct has them


class SampleStruct(Structure):
    _fields_ = [
        *_IN_OUT[:2],
        ("width", c_int32),
        *((name, c_void_p) for name in (*CHOOSING, "uniform", "chosen")),
    ]


class StepInputsStruct(Structure):
    _fields_ = [
        ("tokens", c_void_p),
        ("token_stride", c_int64),
        ("pages", c_void_p),
        ("page_stride", c_int64),
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("page_size", c_int32),
        ("ids", c_void_p),
        ("slots", c_void_p),
    ]


class AppendTokensStruct(Structure):
    _fields_ = [("tokens", c_void_p), ("token_stride", c_int64), ("rows", c_void_p), ("positions", c_void_p), ("ids", c_void_p)]


# What each op is told; their order is that of C's enum.
ARGUMENTS: dict[str, type[Structure]] = {
    "linear": LinearStruct,
    "row_map": RowMapStruct,
    "rope_store": RopeStoreStruct,
    "attention": AttentionStruct,
    "embedding": EmbeddingStruct,
    "gather": GatherStruct,
    "top_k": TopKStruct,
    "step_inputs": StepInputsStruct,
    "append_tokens": AppendTokensStruct,
    "sample": SampleStruct,
}
OPS = {name: code for code, name in enumerate(ARGUMENTS)}


class StepStruct(Structure):
    _fields_ = [("op", c_int32), ("rows", c_int32), ("args", c_void_p), ("live", c_void_p)]


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "trireme_set_isa": (c_int32, [c_char_p]),
    "trireme_isa": (c_char_p, []),
    "trireme_set_threads": (c_int32, [c_int32]),
    "trireme_threads": (c_int32, []),
    "trireme_tile_bytes": (c_int64, [c_int32, c_int32]),
    "trireme_padded_columns": (c_int64, [c_int32, c_int32]),
    "trireme_pack": (c_int32, [POINTER(WeightStruct), c_int32, c_int32, c_int32, c_void_p, c_int64]),
    "trireme_unpack": (None, [POINTER(WeightStruct), c_int32, c_int32, c_void_p, c_int64]),
    "trireme_run": (None, [c_void_p, c_int32]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the kernels, building them on first use; the best instruction set, or $TRIREME_CPU_ISA, and all cores."""
    try:
        loaded = ctypes.CDLL(str(build.ensure(cache_folder() / "cpu")))
    except (build.BuildFailed, OSError) as error:
        raise BackendUnavailable(
            f"the CPU kernels cannot be built: {error}.", "install a C compiler, or use torch's ops"
        ) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    asked = os.environ.get("TRIREME_CPU_ISA", "auto")
    if not loaded.trireme_set_isa(asked.encode()):
        raise BackendUnavailable(f"this CPU cannot run the instruction set {asked}.", "unset TRIREME_CPU_ISA")
    loaded.trireme_set_threads(host.cores())
    return loaded


def missing() -> str | None:
    """Why the kernels cannot run here; None if they can. Builds them where they are not built yet."""
    try:
        library()
    except BackendUnavailable as error:
        return error.cause
    return None


def describe() -> dict[str, str]:
    """The lines that `trireme doctor` shows for the kernels."""
    return {"instructions": isa(), "also": ", ".join(available_isas()), "threads": str(library().trireme_threads())}


def set_isa(name: str) -> None:
    """Uses `name` of ISAS from now on, or the best for "auto"."""
    if not library().trireme_set_isa(name.encode()):
        raise BackendUnavailable(f"this CPU cannot run the instruction set {name}.", f"use one of {', '.join(available_isas())}")


def isa() -> str:
    return library().trireme_isa().decode()


def available_isas() -> list[str]:
    """Every instruction set this machine can run, best first."""
    current, found = isa(), []
    for name in ISAS:
        if library().trireme_set_isa(name.encode()):
            found.append(name)
    library().trireme_set_isa(current.encode())
    return found


def set_threads(count: int) -> int:
    """Sets how many threads compute (0: as many as may run at once); returns how many there will be."""
    return library().trireme_set_threads(count or host.cores())
