"""Replaces the loaded weights by new ones. Knows checkpoints and layers' weights; no step may run meanwhile.

A captured graph holds the addresses of weights. So values are copied into the old tensors where that can be; where it cannot (the
CPU's packed weights may be read-only maps of a file), the new ones are used where they are, and steps are recorded anew.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import torch
from torch import Tensor

from trireme.errors import BadCheckpoint
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.tokenizer import Tokenizer
from trireme.layers import Module, Read
from trireme.models import ModelConfig
from trireme.worker.load import Loaded, check_strays, stored_tensor


def like(loaded: Loaded, new: Checkpoint, found: ModelConfig) -> None:
    """Refuses a checkpoint whose weights cannot take the place of the loaded ones; `found` is its config, as it was understood."""
    fix = "give weights of the model that is served, or start a server for this one"
    for field in dataclasses.fields(found):
        if field.name != "raw" and getattr(found, field.name) != getattr(loaded.cfg, field.name):
            raise BadCheckpoint(f"{new.path} is another model: its {field.name} differs.", fix)
    for name, shape in loaded.asked.items():
        stored_tensor(new, name, shape)
    check_strays(new, loaded.model, found, loaded.asked)
    if new.eos_token_ids() != loaded.checkpoint.eos_token_ids() or _spelling(new.path) != _spelling(loaded.checkpoint.path):
        raise BadCheckpoint(f"{new.path} has another tokenizer.", fix)


def _spelling(path: pathlib.Path) -> list[str] | None:
    """What the tokenizer makes of its first ids; None where there is no tokenizer."""
    try:
        tokenizer = Tokenizer.open(path)
    except BadCheckpoint:
        return None
    return [str(tokenizer.vocab_size), *(tokenizer.token_text(token) for token in range(tokenizer.vocab_size))]


@torch.inference_mode()
def take(module: Module, read: Read, path: str = "") -> bool:
    """Loads new weights for everything below. Returns False if some have other addresses than the old ones."""
    stays = True
    if type(module).load is Module.load:
        for name, child in module.children():
            stays &= take(child, read, f"{path}.{name}" if path else name)
        return stays
    before = [(part, dict(vars(part))) for _, part in module.walk()]
    module.load(read, path)
    for part, held in before:
        for name, new in list(vars(part).items()):
            old = held.get(name)
            if new is old or not (isinstance(new, Tensor) or hasattr(new, "linear")):
                continue
            if _takes(old, new):
                setattr(part, name, old)
            else:
                stays = False
    return stays


def _takes(old: Any, new: Any) -> bool:
    if not isinstance(new, Tensor):
        return type(old) is type(new) and hasattr(old, "take") and old.take(new)
    if not isinstance(old, Tensor) or old.shape != new.shape or old.dtype != new.dtype or old.device.type == "cpu":
        return False
    old.copy_(new)
    return True
