"""`trireme list`: lists the models that were downloaded to this machine."""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    from trireme.hub.stored import stored_models

    models = stored_models()
    if args.json:
        print(json.dumps([{"name": model.name, "path": str(model.path), "size": model.size} for model in models]))
    elif not models:
        print("No model was fetched yet. `trireme models` lists those known by name.", file=sys.stderr)
    width = max((len(model.name) for model in models), default=0)
    for model in models if not args.json else ():
        print(f"{model.name:<{width}}  {model.size / 1e6:6.0f} MB  {model.path}")
    return 0
