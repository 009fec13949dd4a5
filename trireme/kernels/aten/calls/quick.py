"""The shortest way through remembered calls: C (quick.c), built once by the tool with which Triton builds its launchers; where that
cannot be, Python looks them up. Knows the kinds of calls that `repeat` lists, never what they compute."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from trireme.kernels.launch import recordings

Function = Callable[..., Any]
MEMORY, VALUES = 16, 64  # tensors and new memory of one call, and arguments of one start, that C has room for


class Raw(NamedTuple):
    """How the driver itself starts a kernel. `quick.c` knows this order."""

    driver: int  # the address of its start: the extended one for what may come early
    function: int
    threads: int
    shared: int
    grid_x: int
    grid_y: int
    grid_z: int
    kinds: bytes  # of each argument: p an address, i a whole number, f and d floats, - no parameter
    early: bool


class Start(NamedTuple):
    """One start of a kernel. `quick.c` knows this order."""

    start: Function  # Triton's
    values: tuple[Any, ...]
    pointers: tuple[tuple[int, int, int], ...]  # place among the values, number of the memory, bytes into it
    raw: Raw | None


class Plan(NamedTuple):
    """A call to be repeated. Memory is numbered: tensors among the arguments, then new memory. `quick.c` knows this order."""

    places: tuple[int, ...]  # of the tensors among the arguments
    shared: tuple[int, ...]  # for each the number of the first that shares its memory
    layouts: tuple[Any, ...]  # shape, stride and type of what is allocated
    returned: tuple[int, ...]
    as_tuple: bool
    empty: Function
    stream: Function
    device: int
    bound: int | None  # the only stream it may run on, because it uses memory that belongs to that
    capturing: Function
    settings: tuple[tuple[Function, Any], ...]  # what to ask, and what it must answer
    starts: tuple[Start, ...]
    stream_place: int
    kept: tuple[Any, ...]  # memory that stays, whose addresses stand in the starts


@functools.cache
def module() -> Any:
    """What was built, or None."""
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(pathlib.Path(__file__).with_name("quick.c").read_text(), "trireme_quick")
    except Exception:  # no compiler, no headers, a folder that cannot be written, another Triton: Python does it
        return None


def standing_for(
    slow: Function, recent: list[Any], traced: Function | None = None, transformed: Function | None = None
) -> Function:  # fmt: skip
    """A function that tries the recent kinds of calls and otherwise is `slow`; where calls may be watched, it asks that first."""
    built = module()
    return slow if built is None else built.Call(slow, recent, recordings, traced, transformed)


def fits(plan: Plan) -> bool:
    """Whether C is there, and has room for this call."""
    few = len(plan.places) + len(plan.layouts) <= MEMORY and all(len(start.values) <= VALUES for start in plan.starts)
    return few and len(plan.places) <= MEMORY // 2 and module() is not None
