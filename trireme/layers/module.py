"""A tree of layers. Attribute paths are checkpoint paths; each leaf pulls the slices it owns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trireme.layers.env import Read


def calls_as(layer: Module, kind: type[Module]) -> bool:
    """Whether calling the layer runs exactly `kind.__call__`. If so, a fused step may do the same work without the call. A layer
    that wraps another one or overrides its call must be called."""
    return type(layer).__call__ is kind.__call__


class Module:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} computes nothing by itself")

    def children(self) -> Iterator[tuple[str, Module]]:
        """The parts directly below, by their paths: `norm`, `layers.0`, `layers.1` ..."""
        for name, child in vars(self).items():
            if isinstance(child, Module):
                yield name, child
            elif isinstance(child, list):
                yield from ((f"{name}.{i}", part) for i, part in enumerate(child) if isinstance(part, Module))

    def load(self, read: Read, path: str = "") -> None:
        """Pulls the weights of everything below."""
        for name, child in self.children():
            child.load(read, f"{path}.{name}" if path else name)

    def walk(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """Every module of the tree with its path, this one first."""
        yield path, self
        for name, child in self.children():
            yield from child.walk(f"{path}.{name}" if path else name)
