"""What Ollama's clients are told of the model: its size, parameters and kind of storage. Knows the model's files, no engine."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import Any

from trireme.hub.checkpoint import Checkpoint
from trireme.hub.composite import Composite

_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def model_facts(path: str) -> dict[str, Any]:
    """The size in bytes, the digest and the card's details, read from the model's files. Pickled tensors are not read."""
    checkpoint = Checkpoint.open(path)
    place = checkpoint.path
    files = sorted(file for file in place.iterdir() if file.is_file()) if place.is_dir() else [place]
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kinds: Counter[str] = Counter()
    for entry in () if checkpoint.bin_files else checkpoint.entries().values():
        kind = entry.form.title if isinstance(entry, Composite) else entry.kind
        kinds[kind] += math.prod(entry.shape)
    family = str(checkpoint.config.get("model_type", "unknown"))
    details = {
        "format": "gguf" if place.suffix == ".gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(sum(kinds.values())),
        "quantization_level": max(kinds, key=lambda kind: kinds[kind], default="unknown"),
    }
    digest = hashlib.sha256(repr(stamps).encode()).hexdigest()
    return {"size": sum(size for _, size, _ in stamps), "digest": digest, "details": details}


def _rounded(count: int) -> str:
    """A number of parameters in short form, such as 134.5M."""
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)
