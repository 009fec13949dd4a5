"""Where a running server keeps its sockets and its name: one private folder per server, by which `trireme ps` finds it.

Knows files and process ids; nothing of messages.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import stat
import subprocess
import tempfile
import time

import msgspec

from trireme.errors import BadConfig

RECORD = "server.json"
PROC = pathlib.Path("/proc")


class Record(msgspec.Struct, kw_only=True):
    """What other processes can know about a server."""

    pid: int
    born: int  # when the process started, so that a later process with the same pid is not mistaken for it
    url: str
    model: str
    path: str
    started: float  # seconds since the epoch
    state: str = "starting"


def base_folder() -> pathlib.Path:
    """The folder of this user's servers, which nobody else may enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = pathlib.Path(runtime) / "trireme" if runtime else pathlib.Path(tempfile.gettempdir()) / f"trireme-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BadConfig(f"{folder} is not a private folder of this user.", "remove it, or set XDG_RUNTIME_DIR")
    return folder


def own_folder() -> pathlib.Path:
    """A fresh folder for this process's sockets."""
    running_servers()  # also removes the folders of killed servers
    folder = base_folder() / str(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)  # left by an earlier process with this pid
    folder.mkdir(mode=0o700)
    return folder


def write_record(folder: pathlib.Path, record: Record) -> None:
    fresh = folder / f"{RECORD}.new"
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.replace(folder / RECORD)


def running_servers() -> list[Record]:
    """The servers of this user that are alive, oldest first. Folders of dead servers are removed."""
    found = []
    for folder in base_folder().iterdir():
        record = _read(folder / RECORD)
        if record is not None and birth_of(record.pid) == record.born:
            found.append(record)
        elif not folder.name.isdigit() or birth_of(int(folder.name)) is None:
            shutil.rmtree(folder, ignore_errors=True)
    return sorted(found, key=lambda record: record.started)


def _read(file: pathlib.Path) -> Record | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None


def birth_of(pid: int) -> int | None:
    """When a process was started, in kernel ticks or seconds; None if there is no process with this pid."""
    if not (PROC / "self/stat").exists():
        return _birth_by_ps(pid)
    try:
        words = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(words[19])  # field 22 of the line; the command's name ends field 2


def _birth_by_ps(pid: int) -> int | None:
    """For systems without /proc."""
    asked = ["ps", "-o", "lstart=", "-p", str(pid)]
    shown = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout.split()
    return int(time.mktime(time.strptime(" ".join(shown), "%a %b %d %H:%M:%S %Y"))) if shown else None
