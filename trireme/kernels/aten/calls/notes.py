"""From the record of a call to the function that repeats it: its allocations, its launches, its results.
Knows where every address came from, or refuses; knows no operator."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trireme.kernels import chips
from trireme.kernels.aten.calls.quick import Plan, Raw, Start, fits, module
from trireme.kernels.launch import Handle, Recording, is_descriptor

_STREAM, _VALUES = 3, 13  # places in a raw start's arguments
Function = Callable[..., Any]


class _Unresolved(Exception):
    """A value of a launch or a result whose origin is not known."""


class _Launch(NamedTuple):
    """A raw start, its arguments, and which of these to fill in; how the driver does the same, or None."""

    start: Function
    values: list[Any]
    slots: list[tuple[int, int, int, Any]]  # place, memory, bytes into it, what a descriptor says besides
    raw: Raw | None


class Notes:
    """A recorded call in terms of its arguments. Memory is numbered: tensors among the arguments, then allocations."""

    def __init__(self, recording: Recording, args: tuple[Any, ...]) -> None:
        self.recording = recording
        self.tensors = {i: x for i, x in enumerate(args) if isinstance(x, torch.Tensor)}
        self.memory = [*self.tensors.values(), *recording.made]
        self.layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in recording.made]

    def repetition(self, result: Any) -> Function | None:
        """The function that repeats the call, answering None where one is different after all; None if there cannot be one."""
        recording = self.recording
        if not recording.repeatable or not recording.launches:
            return None
        try:
            parts = result if isinstance(result, tuple) else (result,)
            returned = [self._returned(x) for x in parts]
            launches = [self._launch(*launch) for launch in recording.launches]
        except _Unresolved:
            return None
        finish: Function = tuple if isinstance(result, tuple) else operator.itemgetter(0)
        pointers = [x.data_ptr() for x in self.tensors.values()]
        shared = [(i, pointers.index(p)) for i, p in enumerate(pointers) if pointers.index(p) != i]
        plan = None if chips.several_devices() else _plan(self, launches, returned, finish is tuple, shared)
        return _quick(plan) if plan and fits(plan) else _general(self, launches, returned, finish, shared)

    def _launch(self, handle: Handle, grid: tuple[int, ...], values: tuple[Any, ...]) -> _Launch:
        start, function, cooperative, dependent, metadata, *_ = handle
        template: list[Any] = [*grid, 0, function, cooperative, dependent, None, None, metadata, None, None, None, *values]
        slots: list[Any] = []
        for place, value in enumerate(template[_VALUES:], _VALUES):
            if isinstance(value, torch.Tensor):
                slots.append((place, *self._origin(value), None))
            elif is_descriptor(value):
                fixed = (list(value.shape), list(value.strides), value.padding)
                slots.append((place, *self._origin(value.base), fixed))
        for place, *_ in slots:
            template[place] = None  # the recorded call's memory is not ours to keep
        return _Launch(start, template, slots, _raw(handle, grid))

    def _origin(self, x: torch.Tensor) -> tuple[int, int]:
        """Which memory a tensor lies in and how far; memory that lasts has a number below zero."""
        at = x.data_ptr()
        places = [*enumerate(self.memory), *((-1 - i, kept) for i, kept in enumerate(self.recording.lasting))]
        same = [i for i, place in places if place.data_ptr() == at]  # shared memory is checked at every repetition
        found = same[:1] or [i for i, place in places if 0 <= at - place.data_ptr() < _extent(place)]
        if len(found) != 1 or (not at and len(same) > 1):  # what is empty may lie nowhere
            raise _Unresolved
        return found[0], at - dict(places)[found[0]].data_ptr()

    def _returned(self, x: Any) -> int:
        """One result: the number of its memory."""
        if not isinstance(x, torch.Tensor):
            raise _Unresolved
        first = len(self.tensors)
        for i, argument in enumerate(self.memory[:first]):
            if argument is x:
                return i
        number, offset = self._origin(x)
        if number < first or x.dtype is not self.memory[number].dtype:
            raise _Unresolved
        made, layout = self.memory[number], (tuple(x.shape), x.stride(), x.dtype)
        if self.layouts[number - first] == (tuple(made.shape), made.stride(), made.dtype) and _extent(x) == _extent(made):
            self.layouts[number - first] = layout  # the same memory under other sizes is allocated with these
        if self.layouts[number - first] != layout or offset:  # a view of it
            raise _Unresolved
        return number


def _raw(handle: Handle, grid: tuple[int, ...]) -> Raw | None:
    """How the driver itself starts the kernel; None for what only Triton's launcher knows."""
    if handle.kinds is None or handle.cooperative:
        return None
    num_warps, cluster, shared = handle.metadata
    driver = chips.driver_launch(bool(handle.dependent))
    if driver is None or cluster != 1:
        return None
    threads, kinds = num_warps * chips.current().warp_size, ("-" * _VALUES + handle.kinds).encode()
    return Raw(driver, handle.function, threads, shared, grid[0], grid[1], grid[2], kinds, bool(handle.dependent))


def _plan(notes: Notes, launches: list[_Launch], returned: list[Any], as_tuple: bool, shared: list[Any]) -> Plan | None:
    """The call for `quick`; None if only `_general` knows how, because it has descriptors."""
    kept, starts = notes.recording.lasting, []
    for start, template, slots, raw in launches:
        if any(fixed for *_, fixed in slots):
            return None
        values = template[:]
        for place, number, offset, _ in slots:
            values[place] = kept[-1 - number].data_ptr() + offset if number < 0 else None
        starts.append(Start(start, tuple(values), tuple(slot[:3] for slot in slots if slot[1] >= 0), raw))
    first, device = dict(shared), chips.current_device()
    same = tuple(first.get(number, number) for number in range(len(notes.tensors)))
    bound = chips.current_stream(device) if kept else None
    return Plan(
        tuple(notes.tensors), same, tuple(notes.layouts), tuple(returned), as_tuple, chips.allocator(), chips.getters()[1], device,
        bound, chips.capturing, tuple(notes.recording.settings), tuple(starts), _STREAM, tuple(kept),
    )  # fmt: skip


def _quick(plan: Plan) -> Function:
    """Repeats a call in C; `again.plan` is for whoever calls that himself."""

    def again(args: tuple[Any, ...]) -> Any:
        return repeat(tuple(plan), args)

    repeat, again.__dict__["plan"] = module().repeat, tuple(plan)
    return again


def _general(notes: Notes, launches: list[_Launch], returned: list[Any], finish: Function, shared: list[Any]) -> Function:
    """Repeats a call of any number of launches and results."""
    places, layouts = list(notes.tensors), notes.layouts
    lasting = [x.data_ptr() for x in reversed(notes.recording.lasting)]
    empty, stream, device = chips.allocator(), chips.getters()[1], chips.current_device()
    unlike = _conditions(notes.recording, shared, device)

    def again(args: tuple[Any, ...]) -> Any:
        memory = [args[i] for i in places]
        pointers = [x.data_ptr() for x in memory]
        now = stream(device)
        together = 0
        for pointer in pointers:
            together |= pointer
        if together & 15 or (unlike is not None and unlike(pointers, now)):
            return None
        for shape, stride, dtype in layouts:
            made = empty(shape, stride, dtype)
            memory.append(made)
            pointers.append(made.data_ptr())
        pointers += lasting  # so that -1, -2, … are these
        for start, template, slots, _ in launches:
            values = template[:]
            values[_STREAM] = now
            for place, number, offset, fixed in slots:
                pointer = pointers[number] + offset
                values[place] = pointer if fixed is None else _Described(pointer, *fixed)
            start(*values)
        return finish([memory[x] for x in returned])

    return again


def _conditions(recording: Recording, shared: list[Any], device: int) -> Function | None:
    """What must be as it was: the device, memory shared by arguments, settings, and the stream of memory that lasts."""
    several, settings, kept = chips.several_devices(), recording.settings, recording.lasting
    if not (several or shared or settings or kept):
        return None
    current_device, bound = chips.getters()[0], chips.current_stream(device)

    def unlike(pointers: list[int], now: int) -> bool:
        if (several and current_device() != device) or (kept and (now != bound or chips.capturing())):
            return True
        if shared and any(pointers[i] != pointers[j] for i, j in shared):
            return True
        return bool(settings) and any(ask() != answer for ask, answer in settings)

    return unlike


class _Described:
    """A tensor descriptor over memory at an address: as much of one as Triton's launcher asks for."""

    __slots__ = ("padding", "pointer", "shape", "strides")

    def __init__(self, pointer: int, shape: list[int], strides: list[int], padding: str) -> None:
        self.pointer, self.shape, self.strides, self.padding = pointer, shape, strides, padding

    @property
    def base(self) -> _Described:
        return self

    def data_ptr(self) -> int:
        return self.pointer


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first to past the last element."""
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size() if x.numel() else 0
