"""Chooses the weight method of a linear layer, by the user's option or by how the checkpoint stores the weights.

Methods are plug-ins: a backend brings its own for a name, others come by the entry point `trireme.quant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from trireme.errors import BadConfig
from trireme.quant.base import Decoded, Dense, Stored, WeightMethod
from trireme.quant.int8 import Int8
from trireme.quant.joined import joined
from trireme.quant.online import rounded

METHODS: dict[str, type[WeightMethod]] = {
    "none": Dense,
    "int8": Int8,
    "int4": rounded("int4"),
    "fp8": rounded("fp8"),
    "mxfp4": rounded("mxfp4"),
}


def choose(option: str, parts: list[Stored], native: Mapping[str, type[WeightMethod]]) -> type[WeightMethod]:
    """`native` has the backend's own methods, by option name or by stored kind (a GGUF block type that is kept). Its "auto" is used
    for kinds that have no method."""
    if option == "auto":
        kinds = {part.kind for part in parts}
        if len(kinds) > 1 and "auto" not in native and not kinds.isdisjoint(native):
            return joined(lambda run: choose(option, run, native))
        kept = {native.get(kind) for kind in kinds}
        (only,) = kept if len(kept) == 1 else (None,)
        return only or native.get("auto") or native.get("none") or Decoded
    method = native.get(option) or METHODS.get(option) or _plugged(option)
    if method is None:
        known = sorted({*METHODS, *(name for name in native if name.islower())})
        raise BadConfig(f"No weight method {option!r} on this backend.", f"use --quantize {' or '.join(known)}")
    return method


def _plugged(name: str) -> type[WeightMethod] | None:
    found = entry_points(group="trireme.quant", name=name)
    return next(iter(found)).load() if found else None
