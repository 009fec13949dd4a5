"""An engine from the command line, sooner: torch's libraries are loaded while the model's file is read, and those of its modules
that only compilers and other devices need are left until they are asked for.

Only for torch without a device's libraries, in processes that are ours. Knows file names of torch's package, not what it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from trireme import host
from trireme.config import Config
from trireme.errors import BadRequest, TriremeError
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.resolve import resolve_model
from trireme.hub.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trireme.llm import LLM

# The shapes of every operator's result, for tensors without data, and operators replaced on devices: 0.25 s and 19 MB. What torch
# imports in another order may fail, so this is done only with releases it was tried with.
TRIED = ("2.13.",)
DEFERRED = ("torch._meta_registrations", "torch.distributed._meta_registrations", "torch._native")
_OTHER_DEVICES = ("libtorch_cuda*", "libtorch_hip*", "libtorch_xpu*")


def open_llm(config: Config, report: Callable[[str, float], None], chats: bool = False) -> LLM:
    """Opens the engine for `config`. If chat is required, a model that cannot chat is refused at once."""
    with torch_libraries_loading():
        kept, tokenizer = read_model(config)
    if chats and tokenizer is not None and tokenizer.chat_template is None:
        name = pathlib.Path(config.model.model).stem
        raise BadRequest(f"{name} has no chat template: it continues text.", "use `trireme generate`, or give --chat-template FILE")
    import_torch()
    from trireme.llm import LLM

    llm = LLM(config=config, report=report, tokenizer=tokenizer)
    del kept
    return llm


def read_model(config: Config) -> tuple[Checkpoint | None, Tokenizer | None]:
    """The model's checkpoint, which whoever opens it again finds parsed while it is kept, and its tokenizer.

    None where they cannot be opened: the engine tries again, and says why.
    """
    with contextlib.suppress(TriremeError):
        path = resolve_model(config.model.model)
        return Checkpoint.open(path), Tokenizer.open(path, config.model.chat_template)
    return None, None


@contextlib.contextmanager
def torch_libraries_loading() -> Iterator[None]:
    """Loads torch's shared libraries in a thread of their own, which needs no turn of Python's; waits for them at the end.

    Importing other libraries meanwhile would wait as well: the loader takes one at a time.
    """
    folder = _libraries()
    if folder is None or "torch" in sys.modules or host.cores() == 1:
        yield
        return
    thread = threading.Thread(target=_load, args=(str(folder / "libtorch_python.so"),), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def import_torch() -> None:
    """Imports torch without the modules of DEFERRED, which are loaded when something of theirs is used."""
    finder, libraries = _Deferring(), _libraries()
    if libraries is not None and _release(libraries.parent).startswith(TRIED):
        sys.meta_path.insert(0, finder)
    try:
        import torch  # noqa: F401
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)


class _Deferring:
    """Finds the modules of DEFERRED as usual, and lets them run at the first use of one of their names."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name not in DEFERRED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def _libraries() -> pathlib.Path | None:
    """The folder of torch's libraries, where they are those of a CPU alone."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = pathlib.Path(spec.origin).parent / "lib"
    others = any(next(folder.glob(name), None) for name in _OTHER_DEVICES)
    return None if others or not (folder / "libtorch_python.so").exists() else folder


def _release(package: pathlib.Path) -> str:
    """The version of the installed torch, found without importing it."""
    found = re.search(r"__version__ = '([^']*)'", (package / "version.py").read_text())
    return found[1] if found else ""


def _load(path: str) -> None:
    """As importing would, but by a foreign call, which lets other threads run Python. If it fails, the import will say why."""
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    load(path.encode(), os.RTLD_NOW)
