"""`trireme run MODEL`: fetches a model if it is not here, then talks with it, as `trireme chat` does."""

from __future__ import annotations

from trireme.cli.chat import add_arguments, run

__all__ = ["add_arguments", "run"]
