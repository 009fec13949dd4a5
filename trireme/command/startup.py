"""The start of an engine from the command line: what a waiting user sees, and what makes the wait shorter.

Knows nothing of what is loaded.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str, float], None]


@contextmanager
def uncollected() -> Iterator[None]:
    """Loads without the garbage collector, and afterwards keeps the loaded objects out of its scans.

    Modules and models live as long as the process. Looking through them takes 0.2 s of a start and 0.5 s of an exit.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def shown(what: str) -> Iterator[None]:
    """Shows on a terminal what takes seconds, as one line that goes away afterwards."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"{what} ...")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


@contextmanager
def phases(quiet: bool = False) -> Iterator[Report]:
    """Returns a function that takes (phase, share done) and shows it."""
    if quiet or not sys.stderr.isatty():
        yield lambda name, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, int] = {}

        def report(name: str, share: float) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=1.0)
            progress.update(tasks[name], completed=share)  # type: ignore[arg-type]

        yield report
