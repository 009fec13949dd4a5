"""`trireme pull MODEL`: fetches a model of the catalogue, or of a hub, into the cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name from `trireme models`, or a hub id (owner/name)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from trireme.hub.resolve import resolve_model

    with download_bar(args.quiet) as progress:
        path = resolve_model(args.model, progress)
    print(path)
    return 0


@contextmanager
def download_bar(quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """A function that takes (what, bytes so far, bytes in all) and shows it as a bar."""
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
