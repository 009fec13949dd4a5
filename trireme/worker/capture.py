"""Hooks on intermediate values: a layer is wrapped only while its values are captured. Unused, hooks cost nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trireme.errors import BadRequest
from trireme.layers import Linear, Module


class Tap(Module):
    """Replaces a layer: passes every call on and keeps a copy of the output."""

    def __init__(self, layer: Module, values: list[Tensor]):
        self.__dict__["_layer"], self.__dict__["_values"] = layer, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.__dict__["_layer"](*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out  # a block returns (x, residual); the value is x
        self.__dict__["_values"].append(first.detach().to("cpu", copy=True))
        return out

    def gated(self, x: Tensor, kind: str) -> Tensor:
        """activation(gate) * up of a linear layer's product, made by way of the tap."""
        return Linear.gated(self, x, kind)  # type: ignore[arg-type]

    def of_gated(self, x: Tensor, kind: str) -> Tensor:
        """A linear layer's product with activation(gate) * up, made by way of the tap."""
        return Linear.of_gated(self, x, kind)  # type: ignore[arg-type]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """A linear layer's product in parts, made by way of the tap."""
        return Linear.split(self, x)  # type: ignore[arg-type]


@contextmanager
def capture(model: Module, paths: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Keeps what the layers at these paths (or patterns, `model.layers.*.mlp`) put out, in the order of the steps."""
    known = dict(model.walk())
    chosen = [path for path in known if path and any(fnmatch.fnmatchcase(path, pattern) for pattern in paths)]
    for pattern in paths:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in chosen):
            raise BadRequest(f"No layer at {pattern!r}.", f"paths look like {next(p for p in known if p.count('.') > 1)!r}")
    values: dict[str, list[Tensor]] = {path: [] for path in chosen}
    # deepest first, so that a parent is wrapped after its children were found through it
    places = [(path, *_place(model, path)) for path in sorted(chosen, key=lambda p: -p.count("."))]
    for path, holder, key in places:
        _set(holder, key, Tap(known[path], values[path]))
    try:
        yield values
    finally:
        for path, holder, key in places:
            _set(holder, key, known[path])


def _place(model: Module, path: str) -> tuple[Any, str | int]:
    """The object that contains the layer at a path, and the layer's key in it."""
    *above, last = path.split(".")
    holder: Any = model
    for name in above:
        holder = holder[int(name)] if isinstance(holder, list) else getattr(holder, name)
    return holder, int(last) if isinstance(holder, list) else last


def _set(holder: Any, key: str | int, layer: Module) -> None:
    if isinstance(holder, list):
        holder[int(key)] = layer
    else:
        setattr(holder, str(key), layer)
