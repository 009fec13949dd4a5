"""Tuning that persists: which configuration an operator uses for a class of shapes on this chip.
Knows timings and a small database, never an operator; without an answer it gives the default at once."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import os
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trireme.kernels import chips
from trireme.kernels.aten.calls import repeat
from trireme.kernels.launch import unrepeatable

Config = dict[str, Any]
SHIPPED = Path(__file__).with_name("tuned.csv")
BUDGET_SECONDS = 5.0  # the most that tuning one shape class may take
_REPEATS, _CALLS = 5, 10
_LONG = 1000.0  # microseconds beyond which a launch does not show
_rehearsing: tuple[int, int] | None = None
_enabled = os.environ.get("TRIREME_TUNE", "") not in ("", "0")
_known: dict[tuple[str, str], Config | None] = {}  # None: asked for, and nothing was there
# Whoever gives recorded calls memory for good notes here what it has given; what that returns takes back what was given since.
notes_of_memory: list[Callable[[], Callable[[], None]]] = []


def enable(on: bool = True) -> None:
    """From now on an unknown shape class is measured at its first call; off, it takes the default."""
    global _enabled
    _enabled = on
    _forget()


def rehearse(share: int = 0, shares: int = 1) -> None:
    """From now on every candidate of an unknown class (or this share of them) runs once, untimed, and the default is chosen:
    this fills Triton's cache of compiled kernels from side processes, so that measuring later waits for no compiler."""
    global _rehearsing
    _rehearsing = (share, shares)
    enable()


def cache_folder() -> Path:
    """Where generated sources and tuning results live: TRIREME_CACHE, or the user's cache folder."""
    root = os.environ.get("TRIREME_CACHE")
    if root:
        return Path(root) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme" / "kernels"


@functools.cache
def shape_class(*sizes: int) -> str:
    """Sizes rounded up to powers of two: shapes that share a configuration."""
    return "x".join(str(1 << max(size - 1, 0).bit_length()) for size in sizes)


def remembered(operator: str, shape: str) -> Config | None:
    """The configuration of a class met before in this process; asking costs next to nothing."""
    return _known.get((operator, shape))


def choose(operator: str, shape: str, default: Config, candidates: Iterable[Config], run: Callable[[Config], None]) -> Config:
    """The configuration for this class: remembered, from the user's database, shipped, measured now if enabled, or `default`."""
    key = (operator, shape)
    if key not in _known:
        found = _read(_stored(cache_folder(), chips.current().name).get(key))
        if found is not None or _enabled:
            if chips.capturing():
                return default  # nothing can be tried now
            unrepeatable()
        if found is None or not _runs(found, run):
            # Who turns tuning on wants this machine's own answer.
            found = _measure(key, default, candidates, run) if _enabled else _shipped_for(key)
        _known[key] = found
    return _known[key] or default  # which may differ within a class


def _shipped_for(key: tuple[str, str]) -> Config | None:
    return _shipped().get((chips.current().name, *key))


def _read(stored: str | None) -> Config | None:
    with contextlib.suppress(ValueError):
        found = None if stored is None else json.loads(stored)
        if isinstance(found, dict) and all(isinstance(value, int) and value >= 0 for value in found.values()):
            return found
    return None


def _runs(config: Config, run: Callable[[Config], None]) -> bool:
    """Whether a configuration can be used that another machine, or another version, may have stored."""
    try:
        run(config)
    except Exception:
        return False
    return True


@functools.cache
def _stored(folder: Path, chip: str) -> dict[tuple[str, str], str]:
    """What the user's database has for a chip, read once: there are many classes to ask for."""
    with contextlib.suppress(sqlite3.Error, OSError), _database() as database:
        rows = database.execute("SELECT operator, shape, config FROM tuned WHERE chip = ?", (chip,)).fetchall()
        return {(operator, shape): config for operator, shape, config in rows}
    return {}


@functools.cache
def _shipped() -> dict[tuple[str, str, str], Config]:
    return read(SHIPPED) if SHIPPED.exists() else {}


def read(path: Path) -> dict[tuple[str, str, str], Config]:
    """A table by chip, operator and class of shapes: rows of a CSV file, each with its numbers as `name=value`."""
    found = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = (part.partition("=") for part in row["config"].split())
            found[row["chip"], row["operator"], row["shape"]] = {name: int(value) for name, _, value in numbers}
    return found


@contextlib.contextmanager
def _database() -> Any:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(folder / "tuned.sqlite", timeout=1.0)
    try:
        with database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS tuned (chip TEXT, operator TEXT, shape TEXT, config TEXT, microseconds REAL,"
                " PRIMARY KEY (chip, operator, shape))"
            )
            yield database
    finally:
        database.close()


def _measure(key: tuple[str, str], default: Config, candidates: Iterable[Config], run: Callable[[Config], None]) -> Config:
    """The fastest of the candidates that run at all; stops at the time budget and remembers the winner on disk."""
    if _rehearsing is not None:
        for config in itertools.islice(candidates, _rehearsing[0], None, _rehearsing[1]):
            with contextlib.suppress(Exception):
                run(config)
        return default
    deadline = time.monotonic() + BUDGET_SECONDS
    best, best_time = default, float("inf")
    for config in itertools.chain([default], (c for c in candidates if c != default)):
        if time.monotonic() > deadline:
            break
        # A configuration may need more shared memory or registers than the chip has; that only rules it out.
        with contextlib.suppress(Exception):
            elapsed = _microseconds(functools.partial(run, config))
            if elapsed < best_time:
                best, best_time = config, elapsed
    with contextlib.suppress(sqlite3.Error, OSError), _database() as database:
        row = (chips.current().name, *key, json.dumps(best, sort_keys=True), best_time)
        database.execute("INSERT OR REPLACE INTO tuned VALUES (?, ?, ?, ?, ?)", row)
        _stored.cache_clear()
    return dict(best)  # no longer the default, even where that is what won


def _microseconds(call: Callable[[], None]) -> float:
    call()
    if chips.current().interpreted:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    long = chips.elapsed(call) > _LONG
    # Recorded, since a kernel of a few microseconds would drown in its own launch.
    calls, repeats = (1, 3) if long else (_CALLS, _REPEATS)
    take_back = [note() for note in notes_of_memory]
    try:
        replay = call if long else chips.record(call, calls)
        replay()
        return statistics.median(chips.elapsed(replay) for _ in range(repeats)) / calls
    finally:  # the graph is not replayed again
        for give in take_back:
            give()


def export(path: Path) -> int:
    """Writes what this machine learned, in the form of the shipped table; returns the number of rows."""
    with _database() as database:
        rows = database.execute("SELECT chip, operator, shape, config FROM tuned ORDER BY chip, operator, shape").fetchall()
    known = [(row[:3], _read(row[3])) for row in rows]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("chip", "operator", "shape", "config"))
        kept = [
            (*key, " ".join(f"{name}={int(value)}" for name, value in sorted(config.items()))) for key, config in known if config
        ]
        writer.writerows(kept)
    return len(kept)


def load(path: Path) -> int:
    """Takes in rows that another machine of the same chip exported."""
    try:
        rows = [(*key, json.dumps(config, sort_keys=True), None) for key, config in read(path).items()]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} has no tuning results ({error!r}); give a file that `export` wrote") from None
    with _database() as database:
        database.executemany("INSERT OR REPLACE INTO tuned VALUES (?, ?, ?, ?, ?)", rows)
    _forget()
    return len(rows)


def _forget() -> None:
    _known.clear()
    _stored.cache_clear()
    repeat.forget()
