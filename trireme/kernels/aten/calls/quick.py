"""The shortest way through remembered calls: C (quick.c), built once by the tool with which Triton builds its launchers; where that
cannot be, the same in Python. Knows the kinds of calls that `repeat` lists, never what they compute."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from trireme.kernels.launch import recordings

Function = Callable[..., Any]


class Raw(NamedTuple):
    """How the driver itself starts a kernel. `quick.c` knows this order."""

    driver: int  # the address of its start: the extended one for what may come early or has clusters
    function: int
    threads: int
    shared: int
    grid: tuple[int, ...]
    kinds: str  # of each argument: p an address, m one in a map, i a whole number, f and d floats, - no parameter
    early: bool
    cluster: int = 1  # blocks that form one
    maps: bytes = b""  # what the kernel takes for each m, with the recorded address
    readdress: int = 0  # the address of what puts another into a map


@functools.cache
def _module() -> Any:
    try:
        from triton.runtime.build import compile_module_from_src

        folder = pathlib.Path(__file__).parent
        header, source = ((folder / name).read_text() for name in ("driver.h", "quick.c"))
        # In one, since what is built is kept under the hash of its source.
        return compile_module_from_src(source.replace('#include "driver.h"', header), "trireme_quick")
    except Exception:  # no compiler, no headers, a folder that cannot be written, another Triton: Python does it
        return None


def standing_for(
    slow: Function, recent: list[Any], exact: list[bool], traced: Function | None = None, transformed: Function | None = None
) -> Function:
    """A function that tries the recent kinds of calls and otherwise is `slow`; where calls may be watched, it asks that first.

    `exact`: not empty once floats with a fraction count by value.
    """
    module = _module()
    if module is not None:
        return module.Call(slow, recent, exact, recordings, traced, transformed)

    @functools.wraps(slow)
    def call(*args: Any, **kwargs: Any) -> Any:
        watched = recordings or (traced is not None and transformed is not None and (traced() or transformed() is not None))
        for kind in () if watched else recent:
            if _is_kind(kind, args, kwargs, exact):
                result = kind[5](args, kwargs)
                if result is not None:
                    return result
        return slow(*args, **kwargs)

    return call


def _is_kind(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], exact: list[bool]) -> bool:
    """Whether the arguments are of this kind, as `repeat` lists it."""
    number, alike, places, others, signs, _, names, twins = kind
    if number != len(args) or tuple(kwargs) != names or any(args[i] is not args[j] for i, j in twins):
        return False
    if not alike(*[args[i] for i in places]):
        return False
    args += tuple(kwargs.values())
    if any(type(args[i]) is not wanted or args[i] != value for i, wanted, value in others):
        return False
    return not (exact and signs) and all(_signed(args[i], sign) for i, sign in signs)


def _signed(x: Any, sign: str) -> bool:
    """Whether x is a float with a fraction, no half, and this sign."""
    return type(x) is float and not x.is_integer() and x - x == 0.0 and abs(x) != 0.5 and (x > 0.0) == (sign == "+")


def onward(function: Function, settings: list[tuple[Function, Any]]) -> Function:
    """What answers calls by a function, as long as the settings are those with which they were refused."""
    module = _module()
    if module is not None:
        return module.Onward(function, settings)

    def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if settings and any(ask() != answer for ask, answer in settings):
            return None
        return function(*args, **kwargs)

    return again


def launch(
    starts: list[tuple[Any, ...]],
    stream_place: int,
    tensors: list[tuple[int, int]],
    layouts: list[tuple[Any, Any, Any]],
    returned: list[int],
    as_tuple: bool,
    allocator: Function,
    stream: Function,
    device: int,
    kept: list[Any],
    bound: int | None,
    capturing: Function,
    settings: list[tuple[Function, Any]],
    asks: list[Function],
) -> Function | None:
    """A call to be repeated; None if it has more of anything than a quick one holds. Memory is numbered: tensors among the
    arguments (their place there, and the number of the first that shares their memory), then what is allocated by `layouts`.
    Memory that stays stands in the starts by its address, so `kept` is held; it belongs to the stream `bound`. Settings must answer
    what they answered.

    Each start: a raw start, its arguments, which of them are addresses (place, number of the memory, bytes into it) and which are
    floats (place, argument), how the driver starts it (`Raw`; None: only the raw start does), and which of the arguments every
    repetition draws anew (place, which of `asks`, place in its answer; answered with None it is not repeated).
    """
    module = _module()
    if module is None:
        return None
    try:
        memory = (tensors, layouts, returned, as_tuple, allocator)
        return module.Launch(starts, stream_place, *memory, stream, device, kept, bound, capturing, settings, asks)
    except ValueError:
        return None
