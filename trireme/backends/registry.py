"""Lists the backends and chooses one for this machine. Plug-ins add backends through the entry point `trireme.backends`."""

from __future__ import annotations

import importlib
import shutil
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from trireme.config import DeviceOptions
from trireme.errors import BackendUnavailable

if TYPE_CHECKING:
    from trireme.backends.base import Backend

# By preference: the first that can run here is the automatic choice.
BUILT_IN = {
    "cuda": "trireme.backends.cuda.backend:Cuda",
    "cpu": "trireme.backends.cpu.backend:Cpu",
    "reference": "trireme.backends.reference:Reference",
}
# What tells why a backend cannot run here. It is asked first, because importing the backend brings torch and perhaps Triton.
_MISSING = {"cuda": "trireme.backends.cuda.present:surely_missing", "cpu": "trireme.backends.cpu.library:missing"}
_SETTLED = ("cpu", "reference")  # need not be asked anything more


def names() -> list[str]:
    """Every backend known here, plug-ins last."""
    return [*BUILT_IN, *(e.name for e in entry_points(group="trireme.backends") if e.name not in BUILT_IN)]


def backend_class(name: str) -> type[Backend]:
    if name in BUILT_IN:
        try:
            return _load(BUILT_IN[name])
        except (ImportError, AttributeError) as error:
            raise BackendUnavailable(f"The backend {name!r} cannot be loaded: {error}.", "use --backend cpu") from None
    found = entry_points(group="trireme.backends", name=name)
    if not found:
        raise BackendUnavailable(f"No backend {name!r}.", f"use one of: {', '.join(names())}")
    return next(iter(found)).load()


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def reason_against(name: str) -> str | None:
    """Why a backend cannot run here; None if it can."""
    try:
        reason: str | None = _load(_MISSING[name])() if name in _MISSING else None
        return reason if reason or name in _SETTLED else backend_class(name).unavailable()
    except BackendUnavailable as error:
        return error.cause.rstrip(".")


def automatic() -> str:
    """The backend that is chosen here if none is asked for."""
    return next(name for name in BUILT_IN if name == "reference" or reason_against(name) is None)


def open_backend(options: DeviceOptions, rank: int = 0) -> Backend:
    """The backend the options ask for, or the best one that runs here."""
    if options.backend == "auto":
        name = automatic()
        if name == "reference" and rank == 0:
            _warn_slow(str(reason_against("cpu")))
        return backend_class(name)(options, rank)
    reason = reason_against(options.backend)
    if reason:
        raise BackendUnavailable(f"The backend {options.backend!r} cannot run here: {reason}.", "see `trireme backends`")
    return backend_class(options.backend)(options, rank)


# How a C compiler is installed, by the tool that does it here.
_INSTALLERS = {
    "apt-get": "apt-get install gcc",
    "dnf": "dnf install gcc",
    "apk": "apk add gcc musl-dev",
    "pacman": "pacman -S gcc",
    "zypper": "zypper install gcc",
    "xcode-select": "xcode-select --install",
}


def slow_fix() -> str:
    """The command that brings the CPU kernels."""
    installer = next((command for tool, command in _INSTALLERS.items() if shutil.which(tool)), "install a C compiler")
    return f"{installer}, or pip install a wheel of trireme-llm, which has the kernels"


def _warn_slow(reason: str) -> None:
    text = f"Warning: {reason}. torch's own operators compute instead, about 8 times slower. Fix: {slow_fix()}"
    print(f"trireme: {text}", file=sys.stderr, flush=True)
