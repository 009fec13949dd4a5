"""Which class computes which architecture. Plug-ins add classes through the entry point `trireme.models`, named by architecture.

A model class has `config(raw) -> ModelConfig`, takes (env, config), and called with a batch gives the logits that were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from trireme.errors import UnsupportedModel
from trireme.layers import Module
from trireme.ops import CacheSpec, StateSpec

MODELS: dict[str, Any] = {}


def register(*architectures: str) -> Callable[[type], type]:
    """Registers a class for these architectures of a checkpoint's config."""

    def add(cls: type) -> type:
        MODELS.update(dict.fromkeys(architectures, cls))
        return cls

    return add


def architectures() -> dict[str, str]:
    """Every architecture that is known here, and the package that brings its class; empty for our own."""
    brought = {entry.name: entry.dist.name if entry.dist else "a plug-in" for entry in entry_points(group="trireme.models")}
    return dict(sorted((brought | dict.fromkeys(MODELS, "")).items()))


def model_class(raw: dict[str, Any]) -> Any:
    """The class for a checkpoint's config."""
    names = raw.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    for name in names:
        if name in MODELS:
            return MODELS[name]
        found = entry_points(group="trireme.models", name=name)
        if found:
            return next(iter(found)).load()
    raise UnsupportedModel(
        f"No model class for the architecture {', '.join(map(str, names)) or '(none named)'}.",
        f"known are {', '.join(architectures())}; docs/add-a-model.md shows how to add one",
    )


def cache_specs(model: Module) -> dict[int, CacheSpec | StateSpec]:
    """The caches that the model needs, by the keys that its layers use for them.

    A layer may have none, one or several keys. Layers with the same key share one cache.
    """
    found: dict[int, CacheSpec | StateSpec] = {}
    for path, module in model.walk():
        asked: dict[int, CacheSpec | StateSpec] = getattr(module, "cache_specs", dict)()
        for key, spec in asked.items():
            assert found.setdefault(key, spec) == spec, f"{path} asks for {spec} under {key}, which stands for {found[key]}"
    return dict(sorted(found.items()))
