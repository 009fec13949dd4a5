"""Calls that come again: the second call of a kind is noted, every later one only repeats its allocations and launches.
Knows arguments by type and layout and launches by their handles, never which operator it repeats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trireme.kernels import chips
from trireme.kernels.aten.calls.notes import Notes
from trireme.kernels.aten.calls.quick import standing_for
from trireme.kernels.launch import Recording, Unsupported, current, recordings, unrepeatable

_MOST = 4096  # kinds of calls that one operator remembers
_RECORDINGS = 8  # how often one kind may be noted anew, because settings, streams or shared memory changed
_RECENT = 4  # kinds of calls that are tried before a key is made, which costs as much as four failed tries
_CHANGES = 64  # after so many changes among these an operator has too many kinds
_tables: list[Any] = []
Function = Callable[..., Any]
# How many arguments, whether tensors are laid out like those, where these stand, the other arguments by type and value, and what
# repeats the call. `quick` knows this order.
_Kind = tuple[int, Function, tuple[int, ...], list[tuple[int, type, Any]], Any]


def forget() -> None:
    """Every call is new again, because what an operator would choose may have changed."""
    for table in _tables:
        table.clear()


class _Memory:
    """What one operator remembers of its calls; `ungraded`: only of those of which no gradient is wanted."""

    def __init__(self, ungraded: bool) -> None:
        self.ungraded = ungraded
        self.known: dict[Any, Function] = {}
        self.seen: dict[Any, int] = {}
        self.recent: list[_Kind] = []
        self.changes: list[bool] = []  # one for each change among these, until they are too many
        _tables.extend((self.known, self.seen, self.recent, self.changes))

    def record(
        self, function: Function, otherwise: Function | None, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the call, notes what it does and keeps that if it can be repeated; what is refused goes on, and is kept as that."""
        recording = current.recording = Recording()
        recordings.append(recording)
        refused: Function | None = None
        try:
            result = function(*args, **kwargs)
        except Unsupported:
            if otherwise is None:
                raise
            refused = otherwise
        finally:
            current.recording = None
            recordings.remove(recording)
        if refused is not None:
            shorter = getattr(refused, "shorter", None)
            refused = refused if shorter is None else shorter(args)
            self.keep(key, args, kwargs, _onward(refused, kwargs, recording.settings))
            return refused(*args, **kwargs)
        again = Notes(recording, args).repetition(result)
        if again is None:
            self.seen[key] = _RECORDINGS + 1
        else:
            self.keep(key, args, kwargs, again)
        return result

    def keep(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], again: Function) -> None:
        """From now on `again` answers calls of this kind."""
        self.known[key] = again
        kind = None if kwargs else _kind(args, again, self.ungraded)
        if kind is not None:
            if len(self.changes) <= _CHANGES:
                self.changes.append(True)
            self.recent[:] = [kind, *self.recent][:_RECENT] if len(self.changes) <= _CHANGES else []


def or_else(function: Function, otherwise: Function) -> Function:
    """`function`, and for the calls that it does not cover `otherwise`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Unsupported:
            unrepeatable()  # what `otherwise` writes is not noted
            return otherwise(*args, **kwargs)

    return call


def repeating(function: Function, otherwise: Function | None = None, ungraded: bool = False) -> Function:
    """`function` with a memory. Its launches and results may depend on the types, shapes, strides and alignment of its tensors
    and on the value of its other arguments.

    `otherwise`: what does the calls that it does not cover; a kind of these goes there straight from its third call on, by
    `otherwise.shorter(args)` if it has that.
    `ungraded`: it stands above autograd, where what is remembered serves only calls of which no gradient is wanted.
    """
    tensor, parameter = torch.Tensor, torch.nn.Parameter
    memory = _Memory(ungraded)
    known, seen = memory.known, memory.seen

    attempt = function if otherwise is None else or_else(function, otherwise)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current.recording is not None:
            return attempt(*args, **kwargs)
        key: Any = [torch.is_inference_mode_enabled()]  # the look at tensors differs within and without
        try:
            for x in args:
                kind = type(x)
                if kind is tensor or kind is parameter:
                    if x.is_neg():  # its memory holds the opposite of what it says
                        return attempt(*args, **kwargs)
                    key += (x.dtype, x.shape, x.stride(), x.get_device())
                else:
                    key.append(_token(x))
            if kwargs:
                key += [(name, _token(x)) for name, x in kwargs.items()]
            key = tuple(key)
            found = known.get(key)
        except (TypeError, RuntimeError):  # no layout, or no value to remember it by
            return attempt(*args, **kwargs)
        if found is not None:
            result = found(args)
            if result is not None:
                return result
        elif len(seen) >= _MOST:
            seen.clear()
            known.clear()
        times = seen.get(key, 0)
        if times <= _RECORDINGS:
            seen[key] = times + 1
            # What comes only once is never noted, so that changing numbers or shapes cost no more than looking them up.
            if times and _recordable(args):
                return memory.record(function, otherwise, key, args, kwargs)
        return attempt(*args, **kwargs)

    call.__dict__.update(known=known, memory=memory, keyed=call)
    return standing_for(call, memory.recent)


def _onward(function: Function, kwargs: dict[str, Any], settings: list[tuple[Function, Any]]) -> Function:
    """What answers calls by a function, as long as the settings are those with which they were refused."""

    def again(args: tuple[Any, ...]) -> Any:
        if settings and any(ask() != answer for ask, answer in settings):
            return None
        return function(*args, **kwargs)

    return again


def _kind(args: tuple[Any, ...], again: Function, ungraded: bool) -> _Kind | None:
    """The kind of these arguments, recognised without a key; None if that cannot be, such as of one tensor given twice."""
    places = tuple(i for i, x in enumerate(args) if isinstance(x, torch.Tensor))
    tensors = [args[i] for i in places]
    alike = chips.layout_check(tensors) if places else lambda: True
    if alike is None or len({id(x) for x in tensors}) < len(tensors):
        return None
    if ungraded and any(x.requires_grad for x in tensors):
        alike = functools.partial(_alike_ungraded, alike)
    others = [(i, type(x), list(x) if type(x) is list else x) for i, x in enumerate(args) if i not in places]
    return len(args), alike, places, others, again.__dict__.get("plan", again)


def _alike_ungraded(alike: Function, *tensors: torch.Tensor) -> bool:
    """The look at tensors tells whether they may have a gradient, not whether one is wanted now."""
    return not torch.is_grad_enabled() and alike(*tensors)


def _token(x: Any) -> Any:
    """What stands for an argument that is no tensor: its type and value."""
    if isinstance(x, torch.Tensor):
        raise TypeError("a tensor that is more than its memory")
    return type(x), tuple(x) if type(x) is list else x


def _recordable(args: tuple[Any, ...]) -> bool:
    """Whether this call can stand for others of its kind: aligned memory of the current device, no graph recorded."""
    device = chips.current_device()
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    return not chips.capturing() and all(x.get_device() == device and x.data_ptr() % 16 == 0 for x in tensors)
