"""What clients leave with the server: named records and files in a private folder, shared by all HTTP processes.

Knows names, bytes and owners; nothing of what they mean. Names are made here, never taken from a client. A name begins with
a mark of its owner, so that what an owner holds is counted without reading anything: every bound is each owner's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from trireme.api.transport.failures import Failure
from trireme.config import cache_folder
from trireme.errors import BadConfig, DiskFull

MAX_RECORDS = 10_000  # records of one kind and owner
LOOK_EVERY = 64  # the number of new records after which the old ones are counted
MAX_BYTES = 2 << 30  # bytes in the files of one owner
_MARK = 12  # the hexadecimal digits in a name that identify its owner; the other digits are random
_NAME = re.compile(r"[a-z]{3,8}[-_][0-9a-f]{32}")


class Record(msgspec.Struct):
    """A document and its owner."""

    owner: str
    document: dict[str, Any]


class Shelf:
    """Records and files in one folder. Every write is atomic: a reader sees either the old or the new version, whole."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._calls: Counter[tuple[str, str]] = Counter()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BadConfig(f"Cannot make the folder {folder}: {error.strerror}.", "choose another by --data-dir") from None

    def new_name(self, kind: str, owner: str, joint: str = "-") -> str:
        return f"{kind}{joint}{_mark(owner)}{secrets.token_hex(16)[_MARK:]}"

    def put(self, name: str, owner: str, document: dict[str, Any]) -> None:
        self._write(self._path(name, ".json"), msgspec.json.encode(Record(owner, document)))

    def get(self, name: str, owner: str) -> dict[str, Any]:
        """Returns the document to its owner. A document of another owner is treated as missing."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode(self._path(name, ".json").read_bytes(), type=Record)
            if record.owner == owner:
                return record.document
        raise absent(name)

    def owner(self, name: str) -> str:
        return msgspec.json.decode(self._path(name, ".json").read_bytes(), type=Record).owner

    def names(self, kind: str, owner: str | None = None) -> list[str]:
        """All names of a kind, or only those of one owner, newest first."""
        begins = (kind,) if owner is None else (f"{kind}-{_mark(owner)}", f"{kind}_{_mark(owner)}")
        files = [entry for entry in os.scandir(self._folder) if entry.name.startswith(begins) and entry.name.endswith(".json")]
        dated = []
        for entry in files:
            with contextlib.suppress(OSError):  # deleted meanwhile
                dated.append((entry.stat().st_mtime_ns, entry.name.removesuffix(".json")))
        return [name for _, name in sorted(dated, reverse=True)]

    def make_room(self, kind: str, owner: str) -> None:
        """Deletes the owner's oldest records of a kind while there are too many. It checks rarely, so the bound is not exact."""
        self._calls[kind, owner] += 1
        if self._calls[kind, owner] % LOOK_EVERY != 1:
            return
        for name in self.names(kind, owner)[MAX_RECORDS - 1 :]:
            self.remove(name)

    def remove(self, name: str) -> None:
        for suffix in (".json", ".data", ".mark", ".lock"):
            self._path(name, suffix).unlink(missing_ok=True)

    # --- bytes ----------------------------------------------------------------------------------------------------------------

    def put_data(self, name: str, owner: str, data: bytes) -> None:
        if self._held(owner) + len(data) > MAX_BYTES:
            raise Failure(413, f"Your stored files would be larger than {MAX_BYTES} bytes. Fix: delete some.", code="storage_full")
        self._write(self._path(name, ".data"), data)

    def _held(self, owner: str) -> int:
        """The bytes in the owner's files."""
        mark, held = _mark(owner), 0
        for entry in os.scandir(self._folder):
            if entry.name.endswith(".data") and entry.name.partition("-" if "-" in entry.name else "_")[2].startswith(mark):
                with contextlib.suppress(OSError):  # deleted meanwhile
                    held += entry.stat().st_size
        return held

    def data(self, name: str) -> bytes:
        try:
            return self._path(name, ".data").read_bytes()
        except OSError:
            raise absent(name) from None

    def data_path(self, name: str) -> pathlib.Path:
        return self._path(name, ".data")

    # --- marks and locks ------------------------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        """Leaves a mark that tells the process working on the record to stop."""
        self._path(name, ".mark").touch(mode=0o600)

    def marked(self, name: str) -> bool:
        return self._path(name, ".mark").exists()

    @contextlib.contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Yields whether this process alone may work on the record. The operating system frees the claim if the process dies."""
        with open(self._path(name, ".lock"), "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    def _path(self, name: str, suffix: str) -> pathlib.Path:
        if not _NAME.fullmatch(name):
            raise absent(name)
        return self._folder / f"{name}{suffix}"

    def _write(self, path: pathlib.Path, data: bytes) -> None:
        written = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:  # created with mode 0600
                written = file.name
                file.write(data)
            os.replace(file.name, path)
        except OSError as error:
            if written is not None:
                pathlib.Path(written).unlink(missing_ok=True)
            raise DiskFull(f"Cannot store this: {error.strerror}.", "make room, or choose another --data-dir") from None


def _mark(owner: str) -> str:
    return hashlib.blake2b(b"trireme owner" + owner.encode()).hexdigest()[:_MARK]


def absent(name: str) -> Failure:
    return Failure(404, f"There is nothing here called {name[:80]!r}.", param="id", code="not_found")


def default_folder() -> pathlib.Path:
    return cache_folder() / "served"
