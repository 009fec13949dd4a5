"""`trireme show MODEL`: what a model's files hold, and how its weights would be kept and computed here."""

from __future__ import annotations

import argparse
import pathlib

from trireme.command.fetch import fetched
from trireme.command.flags import add_model, add_settings, config_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    from trireme.worker.inspect import show_model

    config = config_from(args)
    for name, text in show_model(config, pathlib.Path(fetched(config).model.model)):
        print(f"{name:<14}{text}", flush=True)
    return 0
