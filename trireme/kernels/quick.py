"""The C side of remembered calls (quick.c), built once by the tool with which Triton builds its launchers. Where that cannot be,
all is done in Python, as it is written in `repeat` and `notes`."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

from trireme.kernels.launch import recordings

Function = Callable[..., Any]


@functools.cache
def _module() -> Any:
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src((pathlib.Path(__file__).parent / "quick.c").read_text(), "trireme_quick")
    except Exception:  # no compiler, no headers, a folder that cannot be written, another Triton: Python does it
        return None


def standing_for(
    slow: Function, recent: list[Any], exact: list[bool], traced: Function | None = None, transformed: Function | None = None
) -> Function:
    """A function that tries the recent kinds of calls and otherwise is `slow`; where calls may be watched, it asks that first.

    `exact`: not empty once floats with a fraction count by value.
    """
    module = _module()
    return slow if module is None else module.Call(slow, recent, exact, recordings, traced, transformed)


def launch(
    start: Function,
    template: list[Any],
    stream_place: int,
    sources: list[tuple[int, int]],
    floats: list[tuple[int, int]],
    targets: list[tuple[int, Any, Any, Any]],
    allocator: Function,
    stream: Function,
    device: int,
    as_tuple: bool,
) -> Function | None:
    """One launch to be repeated; None if it has more of anything than a quick one holds."""
    module = _module()
    if module is None:
        return None
    made = [(place, (shape, stride, dtype)) for place, shape, stride, dtype in targets]
    try:
        return module.Launch(start, template, stream_place, sources, floats, made, allocator, stream, device, as_tuple)
    except ValueError:
        return None
