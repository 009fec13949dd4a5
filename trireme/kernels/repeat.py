"""Calls that come again: the second call of a kind is noted, every later one only repeats its allocations and launches.
Knows arguments by type and layout and launches by their handles, never which operator it repeats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from trireme.kernels import chips
from trireme.kernels.launch import Recording, current

_MOST = 4096  # kinds of calls that one operator remembers
_RECORDINGS = 8  # how often one kind may be noted anew, because settings, streams or shared memory changed
_RECENT = 4  # kinds that are tried before a key is made, which costs as much as three failed tries
_CHANGES = 64  # after so many changes among them an operator has too many kinds for that
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_tables: list[Any] = []
Function = Callable[..., Any]


def forget() -> None:
    """Every call is new again, because what an operator would choose may have changed."""
    for table in _tables:
        table.clear()


def repeating(function: Function) -> Function:
    """`function` with a memory. Its launches and results may depend on the types, shapes, strides and alignment of its tensors
    and on the value of its other arguments, except that floats with a fraction may reach a kernel only as they are."""
    tensor, parameter = _PLAIN
    known: dict[Any, Repetition] = {}
    seen: dict[Any, int] = {}
    exact: list[bool] = []  # not empty: floats count by value
    recent: list[Function] = []
    changes: list[Function] = []
    _tables.extend((known, seen, exact, recent, changes))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current.recording is not None:
            return function(*args, **kwargs)
        for quick in recent:
            result = quick(args, kwargs)
            if result is not None:
                return result
        key: Any = []
        try:
            for x in args:
                kind = type(x)
                if kind is tensor or kind is parameter:
                    key += (x.dtype, x.shape, x.stride(), x.get_device())
                else:
                    key.append(_token(x, exact))
            if kwargs:
                key += [(name, _token(x, exact)) for name, x in kwargs.items()]
            key = tuple(key)
            again = known.get(key)
        except (TypeError, RuntimeError):  # no layout, or no value to remember it by
            return function(*args, **kwargs)
        if again is not None:
            result = again.repeat(args, kwargs)
            if result is not None:
                _promote(again.checked, recent, changes)
                return result
        elif len(seen) >= _MOST:
            seen.clear()
            known.clear()
        times = seen.get(key, 0)
        if times <= _RECORDINGS:
            seen[key] = times + 1
            # What comes only once is never noted, so that changing numbers or shapes cost no more than looking them up.
            if times and _recordable(args):
                return _record(function, args, kwargs, key, known, seen, exact)
        return function(*args, **kwargs)

    call.__dict__["known"] = known
    return call


def _promote(checked: Function | None, recent: list[Function], changes: list[Function]) -> None:
    """Puts a call that came again among those tried first, unless too many take turns."""
    if checked is None or checked in recent or len(changes) > _CHANGES:
        return
    changes.append(checked)
    recent[:] = changes[: -_RECENT - 1 : -1] if len(changes) <= _CHANGES else []


def _token(x: Any, exact: list[bool]) -> Any:
    """What stands for an argument that is no tensor: its type and value; a float with a fraction only by its sign, since
    no operator decides anything by such a number."""
    kind = type(x)
    if kind is float:
        if exact or x.is_integer() or x - x != 0.0:
            return kind, x
        return "+" if x > 0.0 else "-"
    if isinstance(x, torch.Tensor):
        raise TypeError("a tensor that is more than its memory")
    return kind, tuple(x) if kind is list else x


def _recordable(args: tuple[Any, ...]) -> bool:
    """Whether this call can stand for others of its kind: aligned memory of the current device, no graph recorded."""
    device = chips.current_device()
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    return not chips.capturing() and all(x.get_device() == device and x.data_ptr() % 16 == 0 for x in tensors)


def _record(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, known: Any, seen: Any, exact: list[bool]
) -> Any:
    """Runs the call, notes what it does and keeps that if it can be repeated."""
    recording = current.recording = Recording()
    try:
        result = function(*args, **kwargs)
    finally:
        current.recording = None
    composer = _Composer(recording, args, kwargs, result, exact)
    again = composer.compose()
    if again is None:
        seen[key] = _RECORDINGS + 1
    elif composer.kept_floats and not exact:
        exact.append(True)  # from now on the operator's floats count by value
    else:
        known[key] = again
    return result


class Repetition(NamedTuple):
    """What repeats a call of one kind; both answer None where a call is different after all."""

    repeat: Function  # for arguments whose key is the recorded one
    checked: Function | None  # for any arguments


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


class _Unresolved(Exception):
    """A value of a launch or a result whose origin is not known."""


class _Composer:
    """Writes the straight-line function that repeats a recorded call."""

    def __init__(self, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, exact: list[bool]) -> None:
        self.recording, self.args, self.kwargs, self.result, self.exact = recording, args, kwargs, result, exact
        self.tensors = {i: x for i, x in enumerate(args) if isinstance(x, torch.Tensor)}
        given = [(f"args[{i}]", x) for i, x in enumerate(args)] + [(f"kwargs[{name!r}]", x) for name, x in kwargs.items()]
        self.floats = {text: x for text, x in given if type(x) is float}
        # Those that the key leaves open, until a launch takes them as they are.
        self.kept_floats = {text for text, x in self.floats.items() if type(_token(x, [])) is str}
        self.layouts = [(tuple(x.shape), x.stride()) for x in recording.made]
        self.device = chips.current_device()
        ask_device, ask_stream = chips.getters()
        self.names: dict[str, Any] = {"device": ask_device, "stream": ask_stream, "empty": chips.allocator()}
        self.names |= {"capturing": chips.capturing, "kept": recording.lasting}  # what lasts must outlive the function

    def compose(self) -> Repetition | None:
        """The repetition, or None if the call cannot be repeated from its arguments alone."""
        recording = self.recording
        if not recording.repeatable or not recording.launches:
            return None
        try:
            returned = self._result()
            starts = [self._start(i, *launch) for i, launch in enumerate(recording.launches)]
        except _Unresolved:
            return None
        lines = self._checks()
        for i, (made, (shape, stride)) in enumerate(zip(recording.made, self.layouts, strict=True)):
            lines.append(f"    m{i} = empty({self._name(shape)}, {self._name(stride)}, {self._name(made.dtype)})")
        body = [*lines, *starts, f"    return {returned}"]
        unlike = self._unlike()
        source = ["def repeat(args, kwargs):", *body]
        if unlike is not None:
            source += ["def checked(args, kwargs):", f"    if {unlike}:", "        return None", *body]
        exec(compile("\n".join(source), "<repeated call>", "exec"), self.names)
        return Repetition(self.names["repeat"], self.names.get("checked"))

    def _unlike(self) -> str | None:
        """The condition under which other arguments are of another kind than the recorded ones."""
        same = chips.layout_check(list(self.tensors.values()))
        if same is None:
            return None
        unlike = ["kwargs" if not self.kwargs else f"len(kwargs) != {len(self.kwargs)}", f"len(args) != {len(self.args)}"]
        unlike.append(f"not {self._name(same)}({', '.join(f'args[{i}]' for i in self.tensors)})")
        given = [(f"args[{i}]", x) for i, x in enumerate(self.args) if i not in self.tensors]
        for text, x in [*given, *((f"kwargs.get({name!r})", x) for name, x in self.kwargs.items())]:
            if x is None:
                unlike.append(f"{text} is not None")
            elif type(x) is float:
                unlike.append(f"type({text}) is not float or {self._name(_token)}({text}, {self._name(self.exact)}) != "
                              f"{self._name(_token(x, self.exact))}")  # fmt: skip
            else:
                unlike.append(f"type({text}) is not {self._name(type(x))} or {text} != {self._name(x)}")
        return " or ".join(unlike)

    def _checks(self) -> list[str]:
        """Pointers, and what must be as it was: alignment, device, memory shared by arguments, settings, stream."""
        lines = [f"    p{i} = args[{i}].data_ptr()" for i in self.tensors]
        unlike = [f"({' | '.join(f'p{i}' for i in self.tensors) or '0'}) & 15"]
        if chips.several_devices():
            unlike.append(f"device() != {self.device}")
        places: dict[int, int] = {}
        for i, x in self.tensors.items():
            first = places.setdefault(x.data_ptr(), i)
            if first != i:
                unlike.append(f"p{first} != p{i}")
        unlike += [f"{self._name(ask)}() != {self._name(answer)}" for ask, answer in dict(self.recording.settings).items()]
        lines.append(f"    s = stream({self.device})")
        if self.recording.lasting:
            unlike.append(f"s != {chips.current_stream(self.device)} or capturing()")
        return [*lines, f"    if {' or '.join(unlike)}:", "        return None"]

    def _start(self, number: int, handle: Any, grid: tuple[int, ...], values: tuple[Any, ...]) -> str:
        start, function, cooperative, dependent, metadata = (self._name(part) for part in handle)
        head = [*map(str, grid), "s", function, cooperative, dependent, "None", "None", metadata, "None", "None", "None"]
        return f"    {start}({', '.join([*head, *map(self._value, values)])})"

    def _value(self, value: Any) -> str:
        if isinstance(value, TensorDescriptor):
            fixed = (list(value.shape), list(value.strides), value.padding)
            return f"{self._name(_Described)}({self._pointer(value.base)}, *{self._name(fixed)})"
        if isinstance(value, torch.Tensor):
            return self._pointer(value)
        if type(value) is float:
            same = [text for text, x in self.floats.items() if x is value]
            if len(same) == 1:
                self.kept_floats.discard(same[0])
                return same[0]
        return self._name(value)

    def _pointer(self, x: torch.Tensor) -> str:
        """A tensor that a launch takes, as memory of an argument or of an allocation, and how far into it."""
        at = x.data_ptr()
        for i, argument in self.tensors.items():
            if argument.data_ptr() == at:
                return f"p{i}"
        within = [(f"p{i}", argument) for i, argument in self.tensors.items()]
        within += [(f"m{i}.data_ptr()", made) for i, made in enumerate(self.recording.made)]
        within += [(str(kept.data_ptr()), kept) for kept in self.recording.lasting]
        found = [(text, at - place.data_ptr()) for text, place in within if 0 <= at - place.data_ptr() < _extent(place)]
        if len(found) != 1:
            raise _Unresolved
        text, offset = found[0]
        return f"{text} + {offset}" if offset else text

    def _result(self) -> str:
        if isinstance(self.result, tuple):
            return "(" + "".join(f"{self._returned(x)}, " for x in self.result) + ")"
        return self._returned(self.result)

    def _returned(self, x: Any) -> str:
        """One result: an argument itself, an allocation, or a view of one."""
        if x is None and isinstance(self.result, tuple):
            return "None"
        if not isinstance(x, torch.Tensor):
            raise _Unresolved
        for i, argument in self.tensors.items():
            if argument is x:
                return f"args[{i}]"
        for i, made in enumerate(self.recording.made):
            if 0 <= x.data_ptr() - made.data_ptr() < _extent(made) and x.dtype is made.dtype:
                return self._view(i, made, x)
        raise _Unresolved

    def _view(self, i: int, made: torch.Tensor, x: torch.Tensor) -> str:
        layout = (tuple(x.shape), x.stride())
        if (
            self.layouts[i] == (tuple(made.shape), made.stride())
            and x.data_ptr() == made.data_ptr()
            and _extent(x) == _extent(made)
        ):
            self.layouts[i] = layout  # the same memory under other sizes is allocated with these
        if self.layouts[i] == layout and x.data_ptr() == made.data_ptr():
            return f"m{i}"
        offset = (x.data_ptr() - made.data_ptr()) // x.element_size()
        return f"m{i}.as_strided({self._name(layout[0])}, {self._name(layout[1])}, {offset})"

    def _name(self, value: Any) -> str:
        """A constant of the function: small ones are written out."""
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first to past the last element."""
    return (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.element_size() if x.numel() else 0
