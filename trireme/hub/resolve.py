"""Finds the files of a model by the name that a user gives: a path, a catalogue name or a hub id.

Knows places, not contents.
"""

from __future__ import annotations

import difflib
import pathlib

from trireme.errors import ModelNotFound
from trireme.hub.catalogue import CATALOGUE
from trireme.hub.download import Progress
from trireme.hub.huggingface import HUB_ID, fetch_from_hub
from trireme.hub.registry import pull

CLOSE = 0.75  # how like a known name a misspelt one is; "llama3" is another model than "tinyllama"


def resolve_model(name: str, progress: Progress | None = None) -> pathlib.Path:
    """The folder or .gguf file that `name` means, fetched first if needed. An existing path on disk wins over any other meaning."""
    path = pathlib.Path(name).expanduser()
    if path.exists():
        return path
    if name.lower() in CATALOGUE:
        return pull(name.lower(), progress)
    if name.endswith(".gguf") or name.startswith((".", "/", "~")) or not HUB_ID.fullmatch(name):
        near = difflib.get_close_matches(name.lower(), CATALOGUE, n=1, cutoff=CLOSE)
        raise ModelNotFound(
            f"There is no file, folder or catalogue model {name!r}.",
            f"did you mean {near[0]!r}?" if near else f"give a path, a hub id (owner/name), or one of: {', '.join(CATALOGUE)}",
        )
    return fetch_from_hub(name)
