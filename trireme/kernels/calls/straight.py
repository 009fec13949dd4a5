"""The way of remembered calls that come through torch's dispatcher: C++ (straight.cpp), which answers them without Python. Built
once, on the side, by the C++ compiler, if there is one; until then, and without one, they come to Python. Knows notes of calls and
what of them C++ can repeat, never what they compute."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trireme.kernels import chips
from trireme.kernels.calls import tune
from trireme.kernels.calls.launch import listeners
from trireme.kernels.calls.notes import Plan

Function = Callable[..., Any]
_BUILD_SECONDS = 300.0  # after which a build that has not ended is taken for dead
# torch's numbers of its types, part of its binary interface.
_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
_builds: list[subprocess.Popen[bytes]] = []
_above: dict[Any, Above] = {}


class _Unknown(Exception):
    """Something of a call that C++ cannot do."""


def _compiler() -> list[str] | None:
    """The C++ compiler that the environment or the machine names."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return named or ([found] if found else None)


@functools.cache
def _file() -> Path | None:
    """Where what is built lies; None where it cannot be."""
    compiler, here = _compiler(), Path(__file__).parent
    needed = Path(sysconfig.get_path("include")) / "Python.h", Path(torch.__file__).parent / "include" / "ATen"
    if compiler is None or not all(path.exists() for path in needed):
        return None
    texts = [(here / name).read_bytes() for name in ("straight.cpp", "driver.h")]
    facts = (torch.__version__, sys.version, sysconfig.get_platform(), compiler)
    name = hashlib.sha256(b"\0".join([*texts, repr(facts).encode()])).hexdigest()[:24]
    return tune.cache_folder() / f"straight-{name}.so"


def _command(target: Path) -> list[str]:
    here, torchs = Path(__file__).parent, Path(torch.__file__).parent
    folders = [here, torchs / "include", torchs / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    libraries = [f"-L{torchs / 'lib'}", "-lc10", "-ltorch_cpu"]
    include = [f"-I{folder}" for folder in folders]
    return [*(_compiler() or []), *flags, *include, str(here / "straight.cpp"), "-o", str(target), *libraries]


def _build(file: Path) -> None:
    """Starts building, unless somebody does so already; it goes on, and is of use, when this process ends."""
    mark, made = file.with_suffix(".building"), file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        if mark.exists() and time.time() - mark.stat().st_mtime > _BUILD_SECONDS:
            mark.unlink()
        mark.touch(exist_ok=False)
        script = '"$@" && mv "$MADE" "$FILE" && rm -f "$MARK"; rm -f "$MADE"'  # of a failure the mark stays, for a while
        environment = os.environ | {"MADE": str(made), "FILE": str(file), "MARK": str(mark)}
        line, nothing = ["sh", "-c", script, "sh", *_command(made)], subprocess.DEVNULL
        options: dict[str, Any] = {"stdin": nothing, "stdout": nothing, "stderr": nothing, "start_new_session": True}
        _builds.append(subprocess.Popen(line, env=environment, **options))


@functools.cache
def _loaded(file: Path) -> Any:
    """What was built, told of the chip; None if this torch does not take it."""
    try:
        spec = importlib.util.spec_from_file_location("trireme_straight", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.set_up(chips.current().dispatch_key, *chips.host_functions(), chips.several_devices())
        listeners.append(module.record)
        chips.draw_by(module.draw)
        return module
    except (ImportError, OSError, ValueError, AttributeError):
        return None


def module(wait: float = 0.0) -> Any:
    """The C++ side, or None; the first to ask has it built, and may wait so many seconds for it."""
    file = _file() if chips.current().interpreted or chips.drivable() else None
    if file is None:
        return None
    if not os.path.exists(file):  # which, unlike a Path, only says no where it may not look
        _build(file)
        end = time.monotonic() + wait
        while time.monotonic() < end and not (os.path.exists(file) or _ended()):
            time.sleep(0.1)
    return _loaded(file) if os.path.exists(file) else None


def _ended() -> bool:
    """Whether what this process builds is built, or has failed."""
    return bool(_builds) and all(build.poll() is not None for build in _builds)


class Above:
    """What stands above the Python kernel of one operator at one dispatch key, and is told what to remember."""

    def __init__(self, built: Any, overload: Any, key: str) -> None:
        name, _, kind = overload.name().partition(".")
        self.native = built.Operator(name, kind, key)
        self.place, self.remove, self.passed_on = self.native.place, self.native.remove, self.native.passed_on

    def clear(self) -> None:
        self.native.clear()

    def keep(self, plan: Plan, signs: list[Any]) -> None:
        """From now on calls like the one that Python has now are repeated so, if that can be."""
        with contextlib.suppress(_Unknown, ValueError):
            self.native.keep(_program(plan), _positions(signs))

    def leave(self, settings: list[tuple[Function, Any]], signs: list[Any]) -> None:
        """From now on calls like it are torch's."""
        with contextlib.suppress(_Unknown, ValueError):
            self.native.leave(_settings(settings), _positions(signs))


def above(overload: Any, key: str) -> Above | None:
    """What stands above the Python kernel of an operator; when first asked for, the registered kernel must be torch's own."""
    if (overload, key) not in _above:
        built = module()
        if built is None:
            return None
        _above[overload, key] = Above(built, overload, key)
    return _above[overload, key]


def _positions(signs: list[Any]) -> list[int]:
    """Places of arguments as the dispatcher counts them; of those with names only it knows."""
    if any(type(i) is not int for i in signs):
        raise _Unknown
    return signs


def _settings(settings: list[tuple[Function, Any]]) -> list[tuple[int, int]]:
    found = []
    for ask, answer in settings:
        if ask is torch.get_default_dtype and answer in _TYPES:
            found.append((0, _TYPES[answer]))
        elif ask is chips.allows_tf32:
            found.append((1, int(answer)))
        elif ask is chips.autocasts:
            found.append((2, int(answer)))
        else:
            raise _Unknown
    return found


def _program(plan: Plan) -> tuple[Any, ...]:
    """A plan as straight.cpp reads it."""
    asks = [getattr(ask, "past", None) for ask in plan.asks]
    if None in asks or any(dtype not in _TYPES for *_, dtype in plan.layouts):
        raise _Unknown
    layouts = [(_TYPES[dtype], tuple(shape), tuple(stride)) for shape, stride, dtype in plan.layouts]
    starts = [_start(*start) for start in plan.starts]
    return plan.tensors, layouts, starts, plan.returned, _settings(plan.settings), asks, plan.device, plan.bound, plan.kept


def _start(_: Any, values: list[Any], slots: list[Any], floats: list[Any], raw: Any, drawn: list[Any]) -> tuple[Any, ...]:
    """One start: its arguments without those that are no parameters, as bits."""
    if raw is None or any(type(i) is not int for _, i in floats):
        raise _Unknown
    kinds = raw.kinds
    places = {place: i for i, place in enumerate(place for place, kind in enumerate(kinds) if kind != "-")}
    parameters = "".join(kinds[place] for place in places)
    drawn_places = {place for place, *_ in drawn}
    bits = [0 if place in drawn_places else _bits(values[place], kinds[place]) for place in places]
    moved = [[(places[place], *rest) for place, *rest in some] for some in (slots, floats, drawn)]
    return raw._replace(kinds=parameters), bits, *moved


def _bits(value: Any, kind: str) -> int:
    if kind in "fd":
        number = ctypes.c_float(value) if kind == "f" else ctypes.c_double(value)  # what is too large becomes infinite
        return int.from_bytes(bytes(number), sys.byteorder)
    return 0 if value is None else int(value) & (2**64 - 1)
