"""Which cores and how much memory this process may use, by CPU affinity and by its container's limits.

Knows Linux's files for that, of both versions of control groups; elsewhere there are no such limits.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path("/")
_NO_LIMIT = 1 << 60  # bytes; version 1 writes a number beyond any memory where there is no limit


def cores() -> int:
    """How many threads can really run at once."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota() -> float | None:
    """How many CPUs the container may use; None without a limit."""
    quotas = []
    for folder in _folders("cpu"):
        words = (_text(folder / "cpu.max") or "").split()  # version 2: QUOTA PERIOD
        if not words:
            words = [_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if all(word.isdecimal() for word in words) and len(words) == 2 and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_room() -> tuple[int, int] | None:
    """(free, limit) bytes of the container; None without a limit. The page cache counts as free."""
    rooms = []
    for folder in _folders("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _NO_LIMIT:
            rooms.append((max(limit - max(used - _kept_of_files(folder), 0), 0), limit))
    return min(rooms, default=None)


def memory() -> tuple[int, int]:
    """(free, total) bytes that this process may use: the machine's, or its container's where those are fewer."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    free, total = _available() or _unused(pages) * size, pages * size
    room = memory_room()
    return (min(free, room[0]), min(total, room[1])) if room else (free, total)


def _available() -> int:
    """Bytes that can be allocated without swapping, as Linux counts them; 0 if the system does not tell."""
    lines = (_text(ROOT / "proc/meminfo") or "").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _unused(pages: int) -> int:
    """Pages of unused memory; half of all memory if the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError):
        return pages // 2


def _kept_of_files(folder: pathlib.Path) -> int:
    lines = dict(line.split() for line in (_text(folder / "memory.stat") or "").splitlines() if line.count(" ") == 1)
    found = lines.get("total_inactive_file", lines.get("inactive_file", "0"))
    return int(found) if found.isdecimal() else 0


def _folders(controller: str) -> Iterator[pathlib.Path]:
    """The control groups whose limits apply to this process: its own and all above it, of either version."""
    for line in (_text(ROOT / "proc/self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = ROOT / "sys/fs/cgroup" / names
        if names and not base.is_dir():
            base = ROOT / "sys/fs/cgroup" / controller
        own = base / path.strip("/")
        if not own.is_dir():
            own = base  # inside a container, its own group is mounted as the root
        yield own
        yield from (parent for parent in own.parents if parent.is_relative_to(base))


def _number(folder: pathlib.Path, *names: str) -> int | None:
    text = next((found for name in names if (found := _text(folder / name))), "")
    return int(text) if text.isdecimal() else None


def _text(file: pathlib.Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
