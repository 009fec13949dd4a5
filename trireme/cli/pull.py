"""`trireme pull MODEL`: fetches a model of the catalogue, or of a hub, into the cache."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name from `trireme models`, or a hub id (owner/name)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    from trireme.command.fetch import download_bar
    from trireme.hub.resolve import resolve_model

    with download_bar(args.quiet) as progress:
        path = resolve_model(args.model, progress)
    print(path)
    return 0
