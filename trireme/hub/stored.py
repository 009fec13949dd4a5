"""Lists and deletes the models that were fetched to this machine. Knows folders; nothing of their contents."""

from __future__ import annotations

import importlib
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trireme.config import cache_folder
from trireme.errors import ModelNotFound
from trireme.hub.catalogue import CATALOGUE
from trireme.hub.registry import cached


@dataclass
class StoredModel:
    """A fetched model; `delete` removes its files."""

    name: str
    path: pathlib.Path
    size: int  # bytes
    delete: Callable[[], Any]


def stored_models() -> list[StoredModel]:
    """Those of the catalogue, then those of the hub."""
    return [*_of_catalogue(), *_of_hub()]


def stored_model(name: str) -> StoredModel:
    models = stored_models()
    found = next((model for model in models if model.name.lower() == name.lower()), None)
    if found is None:
        here = ", ".join(model.name for model in models) or "none"
        raise ModelNotFound(f"No model {name!r} was fetched to this machine.", f"use one of those that were: {here}")
    return found


def _of_catalogue() -> list[StoredModel]:
    models = []
    for name, entry in CATALOGUE.items():
        folder = cache_folder() / "models" / entry.name
        if cached(name):
            models.append(StoredModel(name, folder, entry.size, lambda folder=folder: shutil.rmtree(folder)))  # type: ignore[misc]
    return models


def _of_hub() -> list[StoredModel]:
    """The models in huggingface_hub's cache; none if the package is not installed or the cache is missing."""
    try:
        hub, errors = (importlib.import_module(name) for name in ("huggingface_hub", "huggingface_hub.errors"))
    except ImportError:
        return []
    try:
        info = hub.scan_cache_dir()
    except (errors.CacheNotFound, OSError, ValueError):
        return []
    models = []
    for repo in sorted(info.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            hashes = [revision.commit_hash for revision in repo.revisions]
            delete = info.delete_revisions(*hashes).execute
            models.append(StoredModel(repo.repo_id, pathlib.Path(repo.repo_path), repo.size_on_disk, delete))
    return models
