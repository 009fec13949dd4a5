"""Models by their hub id, through the optional `huggingface_hub` package and its usual variables (HF_ENDPOINT, HF_HOME,
HF_TOKEN, HF_HUB_OFFLINE). Takes data files only: no code, no pickles. Knows nothing of their contents."""

from __future__ import annotations

import importlib
import pathlib
import re
from typing import Any

from trireme.errors import BadCheckpoint, FetchFailed, ModelNotFound
from trireme.hub.download import disk_full

# owner/name, then @revision, then :part of the name of one GGUF file
HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?(?::([\w.-]+))?")
_SMALL = ["*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
TIMEOUT = 30.0  # seconds for the description of a repository
_OFFLINE = "go online, check HF_ENDPOINT and HF_TOKEN, or give a local path"


def fetch_from_hub(name: str) -> pathlib.Path:
    """The local folder (or GGUF file) of a hub model, fetched where it is not cached yet."""
    match = HUB_ID.fullmatch(name)
    if not match:
        raise ModelNotFound(f"{name!r} is no hub id.", "write owner/name, owner/name@revision or owner/name:QUANTIZATION")
    repo, revision, wanted = match.groups()
    hub = _library()
    files, local = _files(hub, repo, revision)
    if wanted is None and any(file.endswith(".safetensors") for file in files):
        return _snapshot(hub, repo, revision, ["*.safetensors", *_SMALL], local)
    chosen = _choose_gguf(name, files, wanted)
    return _snapshot(hub, repo, revision, chosen, local) / chosen[0]


def _library() -> Any:
    try:
        for module in ("huggingface_hub.constants", "huggingface_hub.errors"):
            importlib.import_module(module)
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ModelNotFound("Hub ids need the package huggingface_hub.", "pip install 'trireme-llm[hub]'") from None


def _files(hub: Any, repo: str, revision: str | None) -> tuple[list[str], bool]:
    """The files of the repository, or the cached ones if the hub cannot be reached, and whether they are only the cached ones."""
    if hub.constants.HF_HUB_OFFLINE:
        return _cached_files(hub, repo, revision), True
    try:
        described = _guarded(hub, repo, lambda: hub.HfApi().model_info(repo, revision=revision, timeout=TIMEOUT))
    except FetchFailed as failed:
        try:
            return _cached_files(hub, repo, revision), True
        except FetchFailed:
            raise failed from None
    return sorted(sibling.rfilename for sibling in described.siblings or []), False


def _cached_files(hub: Any, repo: str, revision: str | None) -> list[str]:
    folder = _snapshot(hub, repo, revision, ["no file, only the folder"], local=True)
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def _snapshot(hub: Any, repo: str, revision: str | None, patterns: list[str], local: bool) -> pathlib.Path:
    options = {"revision": revision, "allow_patterns": patterns, "local_files_only": local, "max_workers": 4}
    return pathlib.Path(_guarded(hub, repo, lambda: hub.snapshot_download(repo, **options)))


def _guarded(hub: Any, repo: str, act: Any) -> Any:
    """Runs `act` and reports each failure of the library in one line."""
    errors = hub.errors
    try:
        return act()
    except errors.GatedRepoError:
        raise FetchFailed(f"{repo} is gated.", "accept its terms on the hub and set HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise ModelNotFound(f"The hub has no {repo}, or not for this token.", "check the name, the revision and HF_TOKEN") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise FetchFailed(f"{repo} is not cached and the hub is out of reach.", _OFFLINE) from None
    except OSError as error:
        room = disk_full(error, pathlib.Path(hub.constants.HF_HUB_CACHE))
        raise room or FetchFailed(f"Cannot fetch {repo}: {_line(error)}.", _OFFLINE) from None
    except Exception as error:  # the library's transport raises its own error classes
        raise FetchFailed(f"Cannot fetch {repo}: {_line(error)}.", _OFFLINE) from None


def _choose_gguf(name: str, files: list[str], wanted: str | None) -> list[str]:
    """The GGUF model that is meant: one file, or all files of a split set, the first file first."""
    found = [file for file in files if file.endswith(".gguf") and "mmproj" not in file]
    if wanted:
        found = [file for file in found if wanted.lower() in pathlib.PurePath(file).name.lower()]
    stems = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", file) for file in found}
    if len(stems) == 1:
        return sorted(found)
    if not stems:
        raise BadCheckpoint(f"{name} has no such *.safetensors or *.gguf files.", "use a repository that has them")
    choices = ", ".join(sorted(pathlib.PurePath(stem).name.removesuffix(".gguf") for stem in stems)[:8])
    raise ModelNotFound(f"{name} has {len(stems)} GGUF models.", f"add :QUANTIZATION to choose one of: {choices}")


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
