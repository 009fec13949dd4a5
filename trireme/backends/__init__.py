"""The backends: what they are (`base`), which there are and which is chosen here (`registry`). Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trireme.backends.registry import BUILT_IN, automatic, backend_class, names, open_backend, reason_against, slow_fix

if TYPE_CHECKING:
    from trireme.backends.base import Backend

__all__ = ["BUILT_IN", "Backend", "automatic", "backend_class", "names", "open_backend", "reason_against", "slow_fix"]


def __getattr__(name: str) -> Any:
    if name == "Backend":  # loaded on first use: it brings torch
        from trireme.backends.base import Backend

        return Backend
    raise AttributeError(f"module 'trireme.backends' has no attribute {name!r}")
