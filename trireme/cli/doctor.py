"""`trireme doctor [MODEL]`: what this machine has, what would be chosen on it, and why; whether a model is understood."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import platform
import shutil
import sys

from trireme.command.early import import_torch, torch_libraries_loading
from trireme.command.fetch import fetched
from trireme.command.flags import add_model, add_settings, config_from, model_given
from trireme.config import Config, cache_folder
from trireme.host import cores, cpu_quota, memory_room

WIDTH = 17  # of a row's name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    with torch_libraries_loading():
        _print(_machine())  # printed at once, because the next part imports torch, which takes a second
    import_torch()
    _print(_choice(config))
    if model_given(args) is not None:
        from trireme.worker.inspect import inspect_model

        for row in inspect_model(config, pathlib.Path(fetched(config).model.model)):
            _print([row])  # printed at once, because a refusal may follow
    return 0


def _print(rows: list[tuple[str, str]]) -> None:
    sys.stdout.write("".join(f"{name:<{WIDTH}}  {text}\n" for name, text in rows))
    sys.stdout.flush()


def _machine() -> list[tuple[str, str]]:
    """Facts about the machine that do not need torch."""
    cxx = os.environ.get("CXX") or next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return [
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("packages", ", ".join(f"{name} {_version(name)}" for name in ("triton", "tokenizers", "numpy", "msgspec"))),
        ("cores", f"{cores()} of {os.cpu_count()}{_limit(cpu_quota(), 'CPUs')}"),
        ("C++ compiler", cxx or "none: trireme.kernels would repeat torch's calls by way of Python"),
        ("model cache", f"{cache_folder()}, {shutil.disk_usage(_existing(cache_folder())).free / 2**30:.0f} GiB free"),
    ]


def _limit(amount: float | None, unit: str) -> str:
    return "" if amount is None else f"; this container may use {amount:.1f} {unit}"


def _choice(config: Config) -> list[tuple[str, str]]:
    """The backend that would be chosen here, as the backends report it."""
    import torch

    from trireme import backends
    from trireme.backends.cpu import build

    rows: list[tuple[str, str]] = [
        ("torch", f"{torch.__version__}, {torch.get_num_threads()} threads"),
        ("C compiler", build.compiler() or f"none: without the CPU kernels about 8 times slower. Fix: {backends.slow_fix()}"),
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
        ("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free{_limit(_memory_limit(), 'GiB')}"),
        *backend.describe().items(),
    ]


def _memory_limit() -> float | None:
    found = memory_room()
    return found[1] / 2**30 if found else None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _existing(path: os.PathLike) -> str:
    """The nearest parent folder of a path that exists."""
    found = os.fspath(path)
    while not os.path.isdir(found):
        found = os.path.dirname(found) or "/"
    return found
