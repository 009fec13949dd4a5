"""Tool calls that are written as JSON: {"name": ..., "arguments": {...}}, alone, in a list, or behind a marker.

Knows the spellings of the keys; nothing of any one model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from trireme.api.chat.parsing_json import read_string, read_value
from trireme.api.chat.parsing_stream import Steps, Stream

NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
ID_KEYS = ("id", "tool_call_id", "call_id")
MAX_NAME = 256


@dataclass
class CallReader:
    """Reads one call. It is emitted once its name and the beginning of its arguments are known. Until then it may be content."""

    stream: Stream
    end: str = ""  # the marker behind the call; missing brackets before it are added
    names: Collection[str] | None = None  # only these names make a call; None: any name does
    make_id: Callable[[], str] | None = None
    name: str | None = None
    id: str | None = None
    pending: str | None = None  # arguments that were written before the name
    announced: bool = False

    def read(self) -> Steps[bool]:
        """Returns whether a call was read and emitted; it may be incomplete. If the result is False, nothing was emitted."""
        if (yield from self.stream.peek()) != "{":
            return False
        # Qwen2.5-Coder's template shows calls with two braces around them, and the model writes them so.
        doubled = yield from self.stream.follows("{{")
        whole = yield from self._members(opened=bool(doubled))
        if doubled:
            yield from self.stream.skip_space()
            yield from self.stream.follows("}")
        if whole and not self.announced and self._is_name():
            self._announce()
            self.stream.argue("{}")
        return self.announced

    def _members(self, opened: bool = False) -> Steps[bool]:
        stream = self.stream
        if not opened:
            yield from stream.take()
        while True:
            yield from stream.skip_space()
            if (yield from stream.follows("}")):
                return True
            key = yield from read_string(stream)
            yield from stream.skip_space()
            if key is None or not (yield from stream.follows(":")):
                return False
            yield from stream.skip_space()
            if not (yield from self._member(key)):
                return False
            yield from stream.skip_space()
            if not (yield from stream.follows(",")) and not (yield from stream.sees("}")):
                return False

    def _member(self, key: str) -> Steps[bool]:
        stream = self.stream
        first = yield from stream.peek()
        if key in NAME_KEYS and self.name is None and first == '"':
            self.name = yield from read_string(stream)
            if self.pending is not None and self._is_name():
                self._announce()
                stream.argue(self.pending)
            return self.name is not None
        if key == "function" and first == "{" and self.name is None:
            return (yield from self._members())
        if key in ARGUMENT_KEYS and not self.announced and self.pending is None:
            return (yield from self._arguments(first))
        if key in ID_KEYS and first == '"' and not self.announced:
            self.id = yield from read_string(stream)
            return True
        return (yield from read_value(stream, _nowhere))

    def _arguments(self, first: str) -> Steps[bool]:
        """Emits the arguments while they arrive if the name is known; otherwise keeps them."""
        if first == "{" and self._is_name():
            self._announce()
            return (yield from read_value(self.stream, self.stream.argue, self.end))
        parts: list[str] = []
        if not (yield from read_value(self.stream, parts.append)):
            return False
        arguments = as_object("".join(parts))
        if arguments is None:
            return False
        if self._is_name():
            self._announce()
            self.stream.argue(arguments)
        else:
            self.pending = arguments
        return True

    def _is_name(self) -> bool:
        return bool(self.name) and len(self.name or "") <= MAX_NAME and (self.names is None or self.name in self.names)

    def _announce(self) -> None:
        self.announced = True
        self.stream.call(self.name or "", self.id or (self.make_id() if self.make_id else None))


def as_object(text: str) -> str | None:
    """The arguments as the text of a JSON object. Models may also write them as a string that holds an object, or as null."""
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            text, value = value, msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    if value is None:
        return "{}"
    return text if isinstance(value, dict) else None


def read_calls(
    stream: Stream, end: str = "", names: Collection[str] | None = None, make_id: Callable[[], str] | None = None
) -> Steps[bool]:
    """Reads a call or a list of calls. Returns False if there was none; then nothing was emitted."""
    if not (yield from stream.follows("[")):
        return (yield from CallReader(stream, end, names, make_id).read())
    found = False
    while True:
        yield from stream.skip_space()
        if found:
            stream.keep()
        if not (yield from CallReader(stream, "", names, make_id).read()):
            if found:
                stream.give_up()
            return found
        found = True
        yield from stream.skip_space()
        if not (yield from stream.follows(",")):
            yield from stream.follows("]")
            return True


def read_arguments(stream: Stream, name: str, end: str, id: str | None = None) -> Steps[bool]:
    """Reads the arguments of a call after its name. Returns False if there is no JSON object; then nothing was emitted."""
    yield from stream.skip_space()
    if (yield from stream.peek()) == "{":
        stream.call(name, id)
        yield from read_value(stream, stream.argue, end)
        return True
    if end and (yield from stream.sees(end)):
        stream.call(name, id)
        stream.argue("{}")
        return True
    return False


def _nowhere(text: str) -> None:
    """Ignores a value that is not needed."""
