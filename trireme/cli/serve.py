"""`trireme serve [MODEL]`: serves a model over HTTP until it is asked to end."""

from __future__ import annotations

import argparse
import os
import pathlib

from trireme.command.fetch import fetched
from trireme.command.flags import add_model, add_settings, config_from
from trireme.serve.start import serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_settings(parser, ("serve", "model", "device", "cache", "schedule"))


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    path = fetched(config).model.model
    os.environ.pop("TRIREME_API_KEY", None)  # the config has the keys now; child processes must not show them in their environment
    return serve(config, pathlib.Path(path))
