"""`trireme models`: the models known by name, and which of them are here."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--architectures", action="store_true", help="list the model classes instead (loads torch)")


def run(args: argparse.Namespace) -> int:
    if args.architectures:
        from trireme.models import MODELS

        print("\n".join(sorted(MODELS)))
        return 0
    from trireme.config import DEFAULT_MODEL
    from trireme.hub.catalogue import CATALOGUE
    from trireme.hub.registry import cached

    for name, entry in CATALOGUE.items():
        path = cached(name)
        mark = " (default)" if name == DEFAULT_MODEL else ""
        place = str(path) if path else f"not here: trireme pull {name}"
        print(f"{name + mark:<28} {entry.title:<30} {entry.size / 1e6:7.0f} MB  {entry.licence:<12} {place}")
    return 0
