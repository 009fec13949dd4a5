"""`trireme rm MODEL`: deletes a fetched model from this machine."""

from __future__ import annotations

import argparse
import pathlib

from trireme.errors import BadConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="+", help="a name from `trireme list`")


def run(args: argparse.Namespace) -> int:
    from trireme.hub.stored import stored_model
    from trireme.serve.runtime import running_servers

    models = [stored_model(name) for name in args.model]
    for model in models:
        for server in running_servers():
            if pathlib.Path(server.path).resolve().is_relative_to(model.path.resolve()):
                raise BadConfig(f"A server uses {model.name}: process {server.pid}.", f"trireme stop {server.pid}")
        model.delete()
        print(f"{model.name} is deleted: {model.size / 1e6:.0f} MB at {model.path}")
    return 0
