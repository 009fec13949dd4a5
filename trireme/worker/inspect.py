"""Reports what a model's folder or file holds and whether it would load: the checks of loading, without reading the weights.

Knows checkpoints and model classes; computes nothing. Every row comes before the refusal that may follow it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Iterator

import torch

from trireme.backends import Backend, open_backend
from trireme.config import Config
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.holding import holding
from trireme.layers import Module
from trireme.parallel import Mesh
from trireme.quant import choose
from trireme.worker.load import build_model, check_strays, read_pickle, stored_tensor

META = torch.device("meta")


class _Shapes(Backend):
    """A device on which tensors have shapes and no values."""

    def __init__(self, config: Config):
        super().__init__(config.device)
        self.device = META


def inspect_model(config: Config, path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(what, how) of a checkpoint; raises what loading it would raise."""
    checkpoint = Checkpoint.open(path, read_pickle)
    yield "model", str(checkpoint.path)
    yield "architecture", _named(checkpoint)
    kinds = Counter(entry.kind for entry in checkpoint.entries().values())
    yield "stored as", ", ".join(f"{kind} ({count} tensors)" for kind, count in kinds.most_common())
    yield "holds", holding(checkpoint.entries().values())
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, quantize="auto", random_weights=False))
    with torch.inference_mode(), META:
        model, cfg, env = build_model(plain, checkpoint, _Shapes(config), Mesh())
        untried = _try(model, checkpoint)
    yield "computed by", f"the class {type(model).__name__}"
    if untried:
        yield "not tried", f"its tensors; {type(model).__name__} needs values to load ({untried})"
        return
    left_out = check_strays(checkpoint, model, cfg, checkpoint.asked)
    if left_out:
        yield "left out", left_out
    yield "understood", f"every setting and tensor; contexts of up to {env.max_len} tokens"


def show_model(config: Config, path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """(what, how) of a checkpoint, and how its matrices would be kept on the backend of this machine."""
    checkpoint = Checkpoint.open(path, read_pickle)
    yield "model", str(checkpoint.path)
    yield "architecture", _named(checkpoint)
    yield "holds", holding(checkpoint.entries().values())
    backend, ways = open_backend(config.device), Counter[str]()
    for entry in checkpoint.entries().values():
        if len(entry.shape) == 2:
            ways[choose(config.model.quantize, [entry], backend.methods).title_of(entry)] += entry.num_bytes
    if ways:
        yield "runs", f"{', '.join(name for name, _ in ways.most_common())} on {backend.name}"


def _try(model: Module, checkpoint: Checkpoint) -> str:
    """Loads shapes; says why it could not, where a plug-in's layer looks at values while it loads."""
    try:
        model.load(lambda name, shape: stored_tensor(checkpoint, name, shape))
    except (NotImplementedError, RuntimeError) as error:
        return str(error).partition("\n")[0][:100]
    return ""


def _named(checkpoint: Checkpoint) -> str:
    names = checkpoint.config.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, list) else str(names)
