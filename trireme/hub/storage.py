"""Recognises the format of a checkpoint's quantized weights from tensor names, kinds and the config.

Knows names, kinds and shapes; reads no values. Tensors that `schemes` has joined to one matrix are one entry here. Other tensors
of a quantized format are refused.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trireme.blocks import BLOCKS
from trireme.errors import UnsupportedModel

# Formats that `schemes` reads: a config that names one of them is no reason to refuse.
READ = frozenset({"GPTQ", "AWQ", "AutoRound", "compressed-tensors", "fp8", "ModelOpt", "bitsandbytes", "MXFP4"})

# What configs call the method: the format's name
_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "auto-round": "AutoRound",
    "intel/auto-round": "AutoRound",
    "modelopt": "ModelOpt",
    "fp8_block": "fp8",
}
SECTIONS = ("quantization_config", "compression_config", "quantization")
# Suffix of a companion tensor: its format; None if only the other companions tell the format
_COMPANIONS: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (
        re.compile(r"\.weight_(packed|shape|zero_point|g_idx|global_scale)$|\.input_(zero_point|global_scale)$"),
        "compressed-tensors",
    ),
    (re.compile(r"\.weight\.(absmax|quant_map|nested_\w+|quant_state\..*)$|\.(SCB|weight_format)$"), "bitsandbytes"),
    (re.compile(r"_scale_inv$"), "fp8"),
    (re.compile(r"\.(qweight|qzeros|g_idx)$"), None),
    (re.compile(r"\.(weight|input|output|activation)_scale\w*$"), None),
)
# These suffixes mark companions only if the tensor with the name before the suffix exists
_PAIRED = re.compile(r"(.+?)(_blocks|_scales?\w*|\.scales?|\.biases)$")
_FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
UNKNOWN = "unknown"


class Entry(Protocol):
    """How one tensor of a checkpoint is stored."""

    @property
    def kind(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Found:
    """A format of quantized weights, and the tensor or setting that shows it."""

    format: str
    tensor: str  # empty if only the config shows it
    config: str = ""  # how the config calls it


def recognise(entries: Mapping[str, Entry], config: Mapping[str, Any], floats: Collection[str]) -> Found | None:
    """The format of the first tensor that is not a plain one; `floats` are the kinds whose values can be decoded as they are."""
    named = _method(config)
    known = _METHODS.get(named.lower(), UNKNOWN)
    for name, entry in entries.items():
        format = _format_of(name, entry, entries, floats)
        if format is not None:
            return Found(known if format == UNKNOWN else format, name, named)
    return Found(known, "", named) if named else None


def check_storage(path: pathlib.Path, entries: Mapping[str, Entry], config: Mapping[str, Any], floats: Collection[str]) -> None:
    """Refuses a checkpoint in a quantized format that this engine cannot read."""
    found = recognise(entries, config, floats)
    if found is None or (not found.tensor and (found.format in READ or any(hasattr(entry, "form") for entry in entries.values()))):
        return
    shown = f"{found.tensor} ({entries[found.tensor].kind}) belongs to" if found.tensor else "the config speaks of"
    called = f", called {found.config[:60]!r} in its config" if found.config and found.format == UNKNOWN else ""
    raise UnsupportedModel(
        f"{path}: {shown} quantized weights of the format {found.format}{called}, which is not read.",
        "use the unquantized model (--quantize int8 makes it small), or a GGUF file of it",
    )


def _method(config: Mapping[str, Any]) -> str:
    """What the config calls its quantization; empty where it has none."""
    for section in SECTIONS:
        found = config.get(section)
        if isinstance(found, dict) and found:
            return str(found.get("quant_method") or found.get("quant_algo") or "(no name)")
    return ""


def _format_of(name: str, entry: Entry, entries: Mapping[str, Entry], floats: Collection[str]) -> str | None:
    """The format that a tensor is a part of; None for a plain one."""
    for pattern, format in _COMPANIONS:
        if pattern.search(name):
            return format or _format_of_module(name.rpartition(".")[0], entries)
    paired = _PAIRED.match(name)
    if paired and _has_partner(paired[1], paired[2], entries, floats):
        return "MXFP4" if f"{paired[1]}_blocks" in entries else _format_of_module(paired[1], entries)
    is_matrix = len(entry.shape) > 1 and name.endswith((".weight", "_proj"))
    if is_matrix and entry.kind not in floats:
        if entry.kind in BLOCKS:
            return f"GGUF {entry.kind}"
        return _format_of_module(name.rpartition(".")[0], entries)
    return None


def _has_partner(stem: str, ending: str, entries: Mapping[str, Entry], floats: Collection[str]) -> bool:
    """Whether `stem` + `ending` belongs to a packed tensor. Beside a float matrix a scale is a part of the model."""
    if ending == "_blocks":
        return f"{stem}_scales" in entries
    partner = entries.get(stem) or entries.get(f"{stem}.weight") or entries.get(f"{stem}.qweight") or entries.get(f"{stem}_blocks")
    return partner is not None and partner.kind not in floats


def _format_of_module(stem: str, entries: Mapping[str, Entry]) -> str:
    """The format of the tensors `stem`.*"""
    if f"{stem}.qweight" in entries:
        if f"{stem}.g_idx" in entries:
            return "GPTQ"
        packed, scales = entries[f"{stem}.qweight"], entries.get(f"{stem}.scales")
        # GPTQ packs along the inputs, AWQ along the outputs, of which each has a column of scales.
        return "GPTQ" if scales is not None and packed.shape[-1:] == scales.shape[-1:] else "AWQ"
    weight = entries.get(f"{stem}.weight") or entries.get(stem)
    if weight is not None and weight.kind in _FLOAT8:
        return "fp8"
    if weight is not None and weight.kind == "I8":
        return (
            "bitsandbytes" if f"{stem}.SCB" in entries else "compressed-tensors" if f"{stem}.weight_scale" in entries else UNKNOWN
        )
    if weight is not None and f"{stem}.weight.absmax" in entries:
        return "bitsandbytes"
    if weight is not None and weight.kind == "U32" and f"{stem}.scales" in entries:
        return "MLX"
    return "compressed-tensors" if f"{stem}.weight_packed" in entries else UNKNOWN
