"""The scales that a checkpoint brings for keys and values: their names, and the kind of KV that they are for.

    x = q * scale        a scale for all KV heads of a layer, or one for each; q: float8 e4m3, or a whole number of 8 bits

Knows names and settings; reads no values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# Every tensor that belongs to quantized attention, those of queries and probabilities included, which are never quantized here.
_ALL = re.compile(
    r"\.(k|v|kv|q|prob)_scale$|\.prob_output_scale$|\.(k|v|q)_zero_point$|\.(k_proj|v_proj)\.output_(scale|zero_point)$"
)
_OF_QUERIES = re.compile(r"\.(q|prob)_scale$|\.prob_output_scale$|\.q_zero_point$")
# Where a layer's scale lies below its path, by who writes it so; {0} is k or v.
_PLACES = (
    "{0}_scale",  # compressed-tensors
    "attn.{0}_scale",  # checkpoints saved by a server
    "{0}_proj.{0}_scale",  # ModelOpt
    "qkv_proj.{0}_scale",  # ModelOpt, where the projections are one matrix
    "{0}_proj.output_scale",  # Quark, and compressed-tensors before
    "kv_scale",  # AutoFP8: one for both
)
_KINDS: dict[tuple[Any, Any], str] = {("float", 8): "fp8", ("int", 8): "int8"}
_ALGORITHMS = {"FP8": "fp8", "INT8": "int8"}


class Asked(NamedTuple):
    """The kind of KV that a checkpoint asks for; "" if it asks for none, or for one that is not kept here, which `other` names."""

    kind: str
    other: str = ""


def is_of_kv(name: str) -> bool:
    """Whether a tensor belongs to quantized keys, values, queries or probabilities: no layer has a weight of this name."""
    return bool(_ALL.search(name))


def is_scale(name: str) -> bool:
    """Whether a tensor, one of the above, says how keys or values are kept."""
    return not _OF_QUERIES.search(name)


def places(path: str, side: str) -> list[str]:
    """The names that the scale of a layer's keys ("k") or values ("v") may have, best first. In a checkpoint without a head, names
    may lack the first word."""
    below = [place.format(side) for place in _PLACES]
    return [f"{start}.{place}" for start in dict.fromkeys((path, path.partition(".")[2])) if start for place in below]


def zero_point(name: str) -> str:
    """The name of the zero that goes with a scale."""
    return name.removesuffix("_scale") + "_zero_point"


def asked(settings: Mapping[str, Any]) -> Asked:
    """What a checkpoint's quantization settings say of keys and values."""
    scheme = settings.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme:
        kind = _KINDS.get((scheme.get("type"), scheme.get("num_bits")), "")
        if scheme.get("dynamic"):
            return Asked("", "scales computed while it runs")
        if scheme.get("symmetric") is False:
            return Asked("", "zero points")
        return Asked(kind) if kind else Asked("", f"{scheme.get('type')} in {scheme.get('num_bits')} bits"[:60])
    algorithm = settings.get("kv_cache_quant_algo")
    if not isinstance(algorithm, str):
        return Asked("")
    kind = _ALGORITHMS.get(algorithm.upper(), "")
    return Asked(kind) if kind else Asked("", algorithm[:60])
