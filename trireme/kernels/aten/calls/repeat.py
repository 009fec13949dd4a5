"""Calls that come again: the second call of a kind is noted, every later one only repeats its allocations and launches.
Knows arguments by type and layout and launches by their handles, never which operator it repeats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trireme.kernels import chips
from trireme.kernels.aten.calls.notes import Notes
from trireme.kernels.aten.calls.quick import onward, standing_for
from trireme.kernels.launch import Recording, Unsupported, current, recordings, unrepeatable

_MOST = 4096  # kinds of calls that one operator remembers
_RECORDINGS = 8  # how often one kind may be noted anew, because settings, streams or shared memory changed
_RECENT = 4  # kinds of calls that are tried before a key is made, which costs as much as four failed tries
_CHANGES = 64  # after so many changes among these an operator has too many kinds
_tables: list[Any] = []
Function = Callable[..., Any]
# How many arguments without a name, whether tensors are laid out like those, where these stand, the other arguments by type and
# value, floats by sign alone, what repeats, the names of the last arguments, and which are the same as one before. `quick` knows
# this order.
_Others = list[tuple[int, type, Any]]
_Signs = list[tuple[int, str]]
_Twins = list[tuple[int, int]]
_Kind = tuple[int, Function, tuple[int, ...], _Others, _Signs, Function, tuple[str, ...], _Twins]


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
        self.exact: list[bool] = []  # not empty: floats count by value
        self.recent: list[_Kind] = []
        self.changes: list[bool] = []  # one for each change among these, until they are too many
        _tables.extend((self.known, self.seen, self.exact, self.recent, self.changes))

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
            self.keep(key, args, kwargs, onward(refused, recording.settings))
            return refused(*args, **kwargs)
        notes = Notes(recording, args, kwargs)
        again = notes.repetition(result)
        signs = self._signs(args, kwargs)
        left = set(signs) - notes.passed
        if again is None:
            self.seen[key] = _RECORDINGS + 1
        elif left:
            self.exact.append(True)  # from now on the operator's floats count by value
        else:
            self.keep(key, args, kwargs, again)
        return result

    def _signs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Which arguments, by place or name, count by their sign alone."""
        return [i for i, x in [*enumerate(args), *kwargs.items()] if type(x) is float and type(_token(x, self.exact)) is str]

    def keep(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], again: Function) -> None:
        """From now on `again` answers calls of this kind."""
        self.known[key] = again
        kind = _kind(args, kwargs, again, self.exact, self.ungraded)
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
    and on the value of its other arguments, except that floats with a fraction may reach a kernel only as they are.

    `otherwise`: what does the calls that it does not cover; a kind of these goes there straight from its third call on, by
    `otherwise.shorter(args)` if it has that.
    `ungraded`: it stands above autograd, where what is remembered serves only calls of which no gradient is wanted.
    """
    tensor, parameter = torch.Tensor, torch.nn.Parameter
    memory = _Memory(ungraded)
    known, seen, exact = memory.known, memory.seen, memory.exact

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
                    key.append(_token(x, exact))
            if kwargs:
                key += [(name, _token(x, exact)) for name, x in kwargs.items()]
            key = tuple(key)
            found = known.get(key)
        except (TypeError, RuntimeError):  # no layout, or no value to remember it by
            return attempt(*args, **kwargs)
        if found is not None:
            result = found(args, kwargs)
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
    return standing_for(call, memory.recent, memory.exact)


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any], again: Function, exact: list[bool], ungraded: bool) -> _Kind | None:
    """The kind of these arguments, recognised without a key."""
    first: dict[int, int] = {}  # where each tensor stands first
    tensors = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    twins = [(i, first[id(args[i])]) for i in tensors if first.setdefault(id(args[i]), i) != i]
    places = tuple(first.values())
    alike = chips.layout_check([args[i] for i in places]) if places else lambda: True
    if alike is None:
        return None
    if ungraded and any(args[i].requires_grad for i in places):
        alike = functools.partial(_alike_ungraded, alike)
    every = (*args, *kwargs.values())
    tokens = [(i, _token(x, exact)) for i, x in enumerate(every) if i not in tensors]
    others = [(i, type(every[i]), _kept(every[i])) for i, token in tokens if type(token) is not str]
    signs = [(i, token) for i, token in tokens if type(token) is str]
    return len(args), alike, places, others, signs, again, tuple(kwargs), twins


def _alike_ungraded(alike: Function, *tensors: torch.Tensor) -> bool:
    """The look at tensors tells whether they may have a gradient, not whether one is wanted now."""
    return not torch.is_grad_enabled() and alike(*tensors)


def _kept(x: Any) -> Any:
    """An argument to compare others with, which nobody changes."""
    return list(x) if type(x) is list else x


def _token(x: Any, exact: list[bool]) -> Any:
    """What stands for an argument that is no tensor: its type and value; a float with a fraction only by its sign, since
    no operator decides anything by such a number, but for a half, which is a root. `quick.py` and `quick.c` say the same."""
    kind = type(x)
    if kind is float:
        if exact or x.is_integer() or x - x != 0.0 or abs(x) == 0.5:
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
