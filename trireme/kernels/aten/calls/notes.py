"""From the record of a call to the function that repeats it: its allocations, its launches, its results.
Knows where every address came from, or refuses; knows no operator."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trireme.kernels import chips
from trireme.kernels.aten.calls.quick import Raw
from trireme.kernels.aten.calls.quick import launch as launch_quickly
from trireme.kernels.launch import Drawn, Handle, Recording, is_descriptor

_STREAM, _VALUES = 3, 13  # places in a raw start's arguments
Function = Callable[..., Any]


class _Unresolved(Exception):
    """A value of a launch or a result whose origin is not known."""


@dataclass(frozen=True)
class Plan:
    """A call to be repeated in a few steps on the device it ran on, in the terms of `quick.launch`."""

    starts: list[Any]
    tensors: list[tuple[int, int]]
    layouts: list[Any]
    returned: list[int]
    as_tuple: bool
    device: int
    kept: list[torch.Tensor]
    bound: int | None
    settings: list[tuple[Function, Any]]
    asks: list[Function]


class _Launch(NamedTuple):
    """A raw start, its arguments, and which of these to fill in; how the driver does the same, or None."""

    start: Function
    values: list[Any]
    slots: list[tuple[int, int, int, Any]]  # place, memory, bytes into it, what a descriptor says besides
    floats: list[tuple[int, Any]]  # place, argument
    raw: Raw | None
    drawn: list[tuple[int, int, int]]  # place, asking, place in the answer


class Notes:
    """A recorded call in terms of its arguments. Memory is numbered: tensors among the arguments, then allocations."""

    def __init__(self, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recording = recording
        self.tensors = {i: x for i, x in enumerate(args) if isinstance(x, torch.Tensor)}
        self.memory = [*self.tensors.values(), *recording.made]
        self.floats = {i: x for i, x in [*enumerate(args), *kwargs.items()] if type(x) is float}
        self.passed: set[Any] = set()  # floats that a launch takes as they are
        self.layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in recording.made]
        self.plan: Plan | None = None  # the shortest way to repeat it, if there is one

    def repetition(self, result: Any) -> Function | None:
        """The function that repeats the call, answering None where one is different after all; None if there cannot be one."""
        recording = self.recording
        if not recording.repeatable or not recording.launches:
            return None
        try:
            parts = result if isinstance(result, tuple) else (result,)
            returned = [self._returned(x, isinstance(result, tuple)) for x in parts]
            launches = [self._launch(*launch) for launch in recording.launches]
        except _Unresolved:
            return None
        finish: Function = tuple if isinstance(result, tuple) else operator.itemgetter(0)
        pointers = [x.data_ptr() for x in self.tensors.values()]
        shared = [(i, pointers.index(p)) for i, p in enumerate(pointers) if pointers.index(p) != i]
        self.plan = _plan(self, launches, returned, finish is tuple, shared)
        quick = None if self.plan is None or chips.several_devices() else _quick(self.plan)
        return quick or _general(self, launches, returned, finish, shared)

    def _launch(self, handle: Handle, grid: tuple[int, ...], values: tuple[Any, ...]) -> _Launch:
        start, function, cooperative, dependent, metadata, *_ = handle
        template: list[Any] = [*grid, 0, function, cooperative, dependent, None, None, metadata, None, None, None, *values]
        slots: list[Any] = []
        floats: list[Any] = []
        drawn: list[Any] = []
        for place, value in enumerate(template[_VALUES:], _VALUES):
            if type(value) is Drawn:
                drawn.append((place, value.asking, value.place))
            elif isinstance(value, torch.Tensor):
                slots.append((place, *self._origin(value), None))
            elif is_descriptor(value):
                fixed = (list(value.shape), list(value.strides), value.padding)
                slots.append((place, *self._origin(value.base), fixed))
            elif type(value) is float:
                same = [i for i, x in self.floats.items() if x is value]
                if len(same) == 1:
                    self.passed.add(same[0])
                    floats.append((place, same[0]))
        for place, *_ in slots:
            template[place] = None  # the recorded call's memory is not ours to keep
        return _Launch(start, template, slots, floats, _raw(handle, grid, values), drawn)

    def _origin(self, x: torch.Tensor) -> tuple[int, int]:
        """Which memory a tensor lies in and how far; memory that lasts has a number below zero."""
        at = x.data_ptr()
        places = [*enumerate(self.memory), *((-1 - i, kept) for i, kept in enumerate(self.recording.lasting))]
        same = [i for i, place in places if place.data_ptr() == at]  # shared memory is checked at every repetition
        found = same[:1] or [i for i, place in places if 0 <= at - place.data_ptr() < _extent(place)]
        if len(found) != 1 or (not at and len(same) > 1):  # what is empty may lie nowhere
            raise _Unresolved
        return found[0], at - dict(places)[found[0]].data_ptr()

    def _returned(self, x: Any, optional: bool) -> Any:
        """One result: the number of its memory, a view of that, or None."""
        if x is None and optional:
            return None
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
        if self.layouts[number - first] == layout and not offset:
            return number
        return number, layout[0], layout[1], offset // x.element_size()


def _raw(handle: Handle, grid: tuple[int, ...], values: tuple[Any, ...]) -> Raw | None:
    """How the driver itself starts the kernel; None for what only Triton's launcher knows."""
    described = [value for value in values if is_descriptor(value)]
    spread = len(values) + sum(2 * len(value.shape) for value in described)
    if handle.kinds is None or len(handle.kinds) != spread or len(handle.forms) != len(described) or handle.cooperative:
        return None
    num_warps, cluster, shared = handle.metadata
    driver = chips.driver_launch(bool(handle.dependent) or cluster > 1)
    maps = [_map(value, form) for value, form in zip(described, handle.forms, strict=True)]
    if driver is None or None in maps:
        return None
    threads, kinds = num_warps * chips.current().warp_size, "-" * _VALUES + handle.kinds
    readdress = (chips.map_readdress() or 0) if maps else 0
    maps_in_a_row = b"".join(made for made in maps if made)
    return Raw(driver, handle.function, threads, shared, grid, kinds, bool(handle.dependent), cluster, maps_in_a_row, readdress)


def _map(value: Any, form: Any) -> bytes | None:
    """What a kernel takes for a descriptor."""
    at, fixed = value.base.data_ptr(), (list(value.shape), list(value.strides), value.padding)
    return chips.tensor_map(lambda moved: _Described(at + moved, *fixed), form)


def _plan(notes: Notes, launches: list[_Launch], returned: list[Any], as_tuple: bool, shared: list[Any]) -> Plan | None:
    """The shortest way to repeat a call; None if something of it is only known to `_general`."""
    named = any(type(i) is str for launch in launches for _, i in launch.floats)
    if named or any(type(x) is not int for x in returned):
        return None
    kept, starts = notes.recording.lasting, []
    for start, values, slots, floats, raw, drawn in map(_spread, launches):
        for place, number, offset, _ in slots:
            values[place] = kept[-1 - number].data_ptr() + offset if number < 0 else None
        starts.append((start, values, [slot[:3] for slot in slots if slot[1] >= 0], floats, raw, drawn))
    first = dict(shared)
    tensors = [(place, first.get(number, number)) for number, place in enumerate(notes.tensors)]
    device = chips.current_device()
    bound = chips.current_stream(device) if kept else None
    settings, asks = notes.recording.settings, notes.recording.asks
    return Plan(starts, tensors, notes.layouts, returned, as_tuple, device, kept, bound, settings, asks)


def _spread(launch: _Launch) -> _Launch:
    """A launch with an address, sizes and strides in the place of each descriptor, as the kernel takes it; its start makes
    descriptors of them again."""
    described = {place: fixed for place, *_, fixed in launch.slots if fixed}
    values: list[Any] = []
    places: list[int] = []  # of each argument as it was
    for place, value in enumerate(launch.values):
        places.append(len(values))
        shape, strides, _ = described.get(place, ((), (), None))
        values += [value, *shape, *strides]

    def start(*spread: Any) -> Any:
        given = [spread[at] for at in places]
        for place, fixed in described.items():
            given[place] = _Described(given[place], *fixed)
        return launch.start(*given)

    changing = (launch.slots, launch.floats, launch.drawn)
    slots, floats, drawn = ([(places[place], *rest) for place, *rest in some] for some in changing)
    return _Launch(start if described else launch.start, values, slots, floats, launch.raw, drawn)


def _quick(plan: Plan) -> Function | None:
    memory = (plan.tensors, plan.layouts, plan.returned, plan.as_tuple, chips.allocator())
    return launch_quickly(
        plan.starts, _STREAM, *memory, chips.getters()[1], plan.device, plan.kept, plan.bound, chips.capturing, plan.settings,
        plan.asks,
    )  # fmt: skip


def _general(notes: Notes, launches: list[_Launch], returned: list[Any], finish: Function, shared: list[Any]) -> Function:
    """Repeats a call of any number of launches and results."""
    places, layouts = list(notes.tensors), notes.layouts
    lasting, asks = [x.data_ptr() for x in reversed(notes.recording.lasting)], notes.recording.asks
    empty, stream, device = chips.allocator(), chips.getters()[1], chips.current_device()
    unlike = _conditions(notes.recording, shared, device)

    def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = [args[i] for i in places]
        pointers = [x.data_ptr() for x in memory]
        now = stream(device)
        together = 0
        for pointer in pointers:
            together |= pointer
        if together & 15 or (unlike is not None and unlike(pointers, now)):
            return None
        answers: list[Any] = [ask() for ask in asks]
        if None in answers:
            return None
        for shape, stride, dtype in layouts:
            made = empty(shape, stride, dtype)
            memory.append(made)
            pointers.append(made.data_ptr())
        pointers += lasting  # so that -1, -2, … are these
        for start, template, slots, floats, _, drawn in launches:
            values = template[:]
            values[_STREAM] = now
            for place, number, offset, fixed in slots:
                pointer = pointers[number] + offset
                values[place] = pointer if fixed is None else _Described(pointer, *fixed)
            for place, i in floats:
                values[place] = kwargs[i] if type(i) is str else args[i]
            for place, asking, number in drawn:
                values[place] = answers[asking][number]
            start(*values)
        return finish([memory[x] if type(x) is int else _view(memory, x) for x in returned])

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


def _view(memory: list[torch.Tensor], part: Any) -> torch.Tensor | None:
    return None if part is None else memory[part[0]].as_strided(*part[1:])


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
