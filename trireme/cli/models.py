"""`trireme models` lists the models known by name; `trireme models check FOLDER` compares a model's class with transformers."""

from __future__ import annotations

import argparse
import pathlib

from trireme.command.startup import shown
from trireme.errors import BadConfig, ModelNotFound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--architectures", action="store_true", help="list the model classes instead (loads torch)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="the models known by name, and which of them are on this machine (the default)")
    check = actions.add_parser("check", help="a model's class against transformers, with the folder's own weights")
    check.add_argument("folder", type=pathlib.Path, help="a folder with config.json and weights; random ones will do")
    check.add_argument("--backend", default="cpu", help="compared besides the plain bodies (default: cpu)")
    check.add_argument("--tokens", type=int, default=48, help="of the random prompt (default: 48)")
    check.add_argument("--tp", type=int, default=2, help="also by so many ranks; 1: by one alone (default: 2)")


def run(args: argparse.Namespace) -> int:
    if args.action == "check":
        return _check(args)
    return _architectures() if args.architectures else _list()


def _check(args: argparse.Namespace) -> int:
    """Says what the folder holds, then prints a line for each way of computing. Returns 1 if one of them differs."""
    if not args.folder.is_dir():
        raise ModelNotFound(f"There is no folder {args.folder}.", "give a folder with config.json and weights")
    if args.tokens < 2 or args.tp < 1:
        raise BadConfig("--tokens must be at least 2, and --tp at least 1.")
    with shown("Importing torch"):
        from trireme.bench.model_check import check_model
        from trireme.config import resolve
        from trireme.worker.inspect import inspect_model

    for name, text in inspect_model(resolve({"model": str(args.folder)}, environ={}), args.folder):
        print(f"{name:<17}  {text}", flush=True)
    print(f"{'way':<34} {'error':>8}  greedy answer")
    fine = True
    for found in check_model(args.folder, args.backend, args.tokens, args.tp):
        answer, verdict = "the same" if found.same else "another", "ok  " if found.ok else "FAIL"
        print(f"{found.way:<34} {found.error:8.1e}  {answer:<13}  {verdict} {found.note}".rstrip(), flush=True)
        fine = fine and found.ok
    return 0 if fine else 1


def _architectures() -> int:
    with shown("Importing torch"):
        from trireme.models import architectures
    for name, package in architectures().items():
        print(f"{name} (by {package})" if package else name)
    return 0


def _list() -> int:
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
