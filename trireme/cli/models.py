"""`trireme models`: lists the models known by name, and which of them are on this machine."""

from __future__ import annotations

import argparse

from trireme.command.startup import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--architectures", action="store_true", help="list the model classes instead (loads torch)")


def run(args: argparse.Namespace) -> int:
    if args.architectures:
        with shown("Importing torch"):
            from trireme.models import architectures
        for name, package in architectures().items():
            print(f"{name} (by {package})" if package else name)
        return 0
    from trireme.config import DEFAULT_MODEL
    from trireme.hub.catalogue import CATALOGUE
    from trireme.hub.registry import cached

    rows = []
    for name, entry in CATALOGUE.items():
        mark = " (default)" if name == DEFAULT_MODEL else ""
        place = str(cached(name) or f"not here: trireme pull {name}")
        rows.append((name + mark, entry.title, f"{entry.size / 1e6:5.0f} MB", entry.licence, place))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
