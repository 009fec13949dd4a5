"""Makes sure a model is on this machine before an engine is built, and shows the download. Knows no engine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trireme.config import Config


def fetched(config: Config, quiet: bool = False) -> Config:
    """Returns the same settings, with the model as a path."""
    from trireme.hub.resolve import resolve_model

    with download_bar(quiet) as progress:
        path = resolve_model(config.model.model, progress)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, model=str(path)))


@contextmanager
def download_bar(quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """Returns a function that takes (what, bytes so far, total bytes) and shows a progress bar."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, int] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)  # type: ignore[arg-type]

        yield show
