"""`trireme doctor [MODEL]`: what this machine has, what would be chosen on it, and why; whether a model is understood."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import platform
import shutil
import sys

from trireme import backends
from trireme.backends.cpu import build, library
from trireme.backends.cuda.present import surely_missing
from trireme.command.fetch import fetched
from trireme.command.flags import add_model, add_settings, config_from, model_given
from trireme.command.startup import shown
from trireme.config import Config, cache_folder
from trireme.host import cores, cpu_quota, memory, memory_room

WIDTH = 17  # of a row's name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--deep", action="store_true", help="also import torch, compile what is missing, and open the backend")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    _print(_machine())
    if model_given(args) is None and not args.deep and _known_without_torch(config):
        _print(_choice(config))
        return 0
    with shown("Importing torch"):
        from trireme.command.early import import_torch

        import_torch()
    _print(_choice_by_torch(config))
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


def _known_without_torch(config: Config) -> bool:
    """Whether the backend is one of this machine's own, or the automatic choice on a machine that can have no other device."""
    wanted = config.device.backend
    return wanted in ("cpu", "reference") or (wanted == "auto" and surely_missing() is not None)


def _choice(config: Config) -> list[tuple[str, str]]:
    """The backend that would be chosen here, found without torch and without compiling anything."""
    uncompiled = build.find(cache_folder() / "cpu") is None and build.compiler() is not None
    rows = _software()
    for name in backends.names():
        if name not in backends.BUILT_IN:
            rows.append((f"backend {name}", "a plug-in; `trireme doctor --deep` asks it"))
        elif name == "cpu" and uncompiled:
            rows.append(("backend cpu", "can run here; its kernels are not compiled yet, the first start does that"))
        else:
            rows.append(_verdict(name))
    wanted = config.device.backend
    chosen = wanted if wanted != "auto" else "cpu" if uncompiled else backends.automatic()
    threads = config.device.threads or cores()
    kernels = library.describe() if chosen == "cpu" and not uncompiled else {}
    return [*rows, ("would choose", f"backend {chosen}, {threads} threads"), _memory(*memory()), *kernels.items()]


def _choice_by_torch(config: Config) -> list[tuple[str, str]]:
    """The backend that would be chosen here, opened."""
    import torch

    rows = [*_software(), *map(_verdict, backends.names())]
    backend = backends.open_backend(config.device)
    dtype = backend.dtype(config.model.dtype, torch.bfloat16)
    threads = config.device.threads or torch.get_num_threads()
    chosen = f"backend {backend.name}, {str(dtype).removeprefix('torch.')}, {threads} threads"
    return [*rows, ("would choose", chosen), _memory(*backend.memory()), *backend.describe().items()]


def _software() -> list[tuple[str, str]]:
    without = f"none: without the CPU kernels about 8 times slower. Fix: {backends.slow_fix()}"
    return [("torch", _version("torch")), ("C compiler", build.compiler() or without)]


def _verdict(name: str) -> tuple[str, str]:
    reason = backends.reason_against(name)
    return f"backend {name}", "can run here" if reason is None else f"cannot: {reason}"


def _memory(free: int, total: int) -> tuple[str, str]:
    return "memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free{_limit(_memory_limit(), 'GiB')}"


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
