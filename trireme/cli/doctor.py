"""`trireme doctor [MODEL]`: what this machine has, what would be chosen on it, and why; whether a model is understood."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import platform
import shutil
import sys

from trireme.command.fetch import fetched
from trireme.command.flags import add_settings, config_from
from trireme.config import Config, cache_folder

WIDTH = 17  # of a row's name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a model to check without loading its weights: as for `trireme serve`")
    add_settings(parser, skip=("model",))


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    _print(_machine(config))
    if args.model is not None:
        from trireme.worker.inspect import inspect_model

        for row in inspect_model(config, pathlib.Path(fetched(config).model.model)):
            _print([row])  # at once: a refusal may follow
    return 0


def _print(rows: list[tuple[str, str]]) -> None:
    sys.stdout.write("".join(f"{name:<{WIDTH}}  {text}\n" for name, text in rows))
    sys.stdout.flush()


def _machine(config: Config) -> list[tuple[str, str]]:
    import torch

    from trireme import backends
    from trireme.backends.cpu import build

    cxx = os.environ.get("CXX") or next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    rows: list[tuple[str, str]] = [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("packages", ", ".join(f"{name} {_version(name)}" for name in ("triton", "tokenizers", "numpy", "msgspec"))),
        ("cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"),
        ("C compiler", build.compiler() or "none: the CPU backend would use torch's own operators"),
        ("C++ compiler", cxx or "none: trireme.kernels would repeat torch's calls by way of Python"),
        ("model cache", f"{cache_folder()}, {shutil.disk_usage(_existing(cache_folder())).free / 2**30:.0f} GiB free"),
    ]
    for name in backends.names():
        reason = backends.reason_against(name)
        rows.append((f"backend {name}", "can run here" if reason is None else f"cannot: {reason}"))
    backend = backends.open_backend(config.device)
    free, total = backend.memory()
    dtype = backend.dtype(config.model.dtype, torch.bfloat16)
    threads = config.device.threads or torch.get_num_threads()
    return [
        *rows,
        ("would choose", f"backend {backend.name}, {str(dtype).removeprefix('torch.')}, {threads} threads"),
        ("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"),
        *backend.describe().items(),
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _existing(path: os.PathLike) -> str:
    """The nearest folder above a path that exists."""
    found = os.fspath(path)
    while not os.path.isdir(found):
        found = os.path.dirname(found) or "/"
    return found
