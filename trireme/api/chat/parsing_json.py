"""JSON read character by character, while it is being written. Knows JSON's grammar; nothing of what the values mean."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trireme.api.chat.parsing_stream import WHITE, Steps, Stream

MAX_DEPTH = 64
_CLOSING = {"{": "}", "[": "]"}
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}
_HEX = "0123456789abcdefABCDEF"
_DIGITS = "0123456789"
# The states inside a number: which characters may follow, and the next state for each. A number may end in the states of _WHOLE.
_NUMBER: dict[str, tuple[tuple[str, str], ...]] = {
    "-": (("0", "zero"), ("123456789", "whole")),
    "zero": ((".", "point"), ("eE", "power")),
    "whole": ((_DIGITS, "whole"), (".", "point"), ("eE", "power")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), ("eE", "power")),
    "power": (("+-", "sign"), (_DIGITS, "exponent")),
    "sign": ((_DIGITS, "exponent"),),
    "exponent": ((_DIGITS, "exponent"),),
}
_WHOLE = {"zero", "whole", "fraction", "exponent"}


class Scanner:
    """Follows one JSON value. The characters it has accepted are always the beginning of valid JSON."""

    def __init__(self) -> None:
        self.done = False
        self._stack: list[str] = []
        self._state = "value"
        self._rest = ""  # the remaining characters of a word, or of a \\u escape
        self._is_key = False

    def feed(self, character: str) -> str | None:
        """The text to pass on for this character, or None if it cannot follow. None also ends a bare number; then `done` is set."""
        return getattr(self, f"_in_{self._state}")(character)

    def closing(self) -> str | None:
        """The text that would complete the value here, or None in the middle of one of its parts."""
        if self._state == "number" and self._number in _WHOLE:
            self._end_value()
        return "".join(_CLOSING[c] for c in reversed(self._stack)) if self._state == "after" else None

    # --- one method per state -------------------------------------------------------------------------------------------------

    def _in_value(self, c: str) -> str | None:
        if c in WHITE:
            return c
        if c in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return None
            self._stack.append(c)
            self._state = "first_key" if c == "{" else "first_item"
        elif c == '"':
            self._state, self._is_key = "string", False
        elif c in _WORDS:
            self._state, self._rest = "word", _WORDS[c]
        elif c == "-" or c in _DIGITS:
            self._state, self._number = "number", "-" if c == "-" else "zero" if c == "0" else "whole"
        else:
            return None
        return c

    def _in_first_item(self, c: str) -> str | None:
        return self._close(c) if c == "]" else self._in_value(c)

    def _in_first_key(self, c: str) -> str | None:
        return self._close(c) if c == "}" else self._in_key(c)

    def _in_key(self, c: str) -> str | None:
        if c in WHITE:
            return c
        if c != '"':
            return None
        self._state, self._is_key = "string", True
        return c

    def _in_colon(self, c: str) -> str | None:
        if c == ":":
            self._state = "value"
            return c
        return c if c in WHITE else None

    def _in_after(self, c: str) -> str | None:
        if c in WHITE:
            return c
        if c == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
            return c
        return self._close(c) if c == _CLOSING[self._stack[-1]] else None

    def _in_string(self, c: str) -> str | None:
        if c == '"':
            if self._is_key:
                self._state = "colon"
            else:
                self._end_value()
        elif c == "\\":
            self._state = "escape"
        elif c < " ":  # models write line breaks into strings; JSON requires them to be escaped
            return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(c, f"\\u{ord(c):04x}")
        return c

    def _in_escape(self, c: str) -> str | None:
        if c == "u":
            self._state, self._rest = "hex", "0000"
        elif c in '"\\/bfnrt':
            self._state = "string"
        else:
            return None
        return c

    def _in_hex(self, c: str) -> str | None:
        if c not in _HEX:
            return None
        self._rest = self._rest[1:]
        if not self._rest:
            self._state = "string"
        return c

    def _in_word(self, c: str) -> str | None:
        if c != self._rest[0]:
            return None
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return c

    def _in_number(self, c: str) -> str | None:
        for characters, state in _NUMBER[self._number]:
            if c in characters:
                self._number = state
                return c
        if self._number not in _WHOLE:
            return None
        self._end_value()
        return None if self.done else self._in_after(c)

    def _close(self, c: str) -> str:
        self._stack.pop()
        self._end_value()
        return c

    def _end_value(self) -> None:
        self._state = "after"
        self.done = not self._stack


def read_value(stream: Stream, emit: Callable[[str], None], end: str = "") -> Steps[bool]:
    """Reads one JSON value and emits its text. False if it is broken off or malformed; what cannot follow stays unread.

    With `end`, a value that lacks only its closing brackets before this marker is closed.
    """
    scanner = Scanner()
    while not scanner.done:
        character = yield from stream.peek()
        if not character:
            return False
        passed = scanner.feed(character)
        if passed is not None:
            yield from stream.take()
            emit(passed)
        elif not scanner.done:
            return (yield from _close_before(stream, scanner, emit, end))
    return True


def _close_before(stream: Stream, scanner: Scanner, emit: Callable[[str], None], end: str) -> Steps[bool]:
    closing = scanner.closing()
    if not end or closing is None or not (yield from stream.sees(end)):
        return False
    emit(closing)
    return True


def read_string(stream: Stream) -> Steps[str | None]:
    """Reads a JSON string. Returns None if the next value is not a string, or is malformed."""
    if (yield from stream.peek()) != '"':
        return None
    parts: list[str] = []
    if not (yield from read_value(stream, parts.append)):
        return None
    return decoded_string("".join(parts))


def decoded_string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def encoded(value: str) -> str:
    """A string as JSON text."""
    return msgspec.json.encode(value).decode()


def is_json(text: str) -> bool:
    """Whether the text is exactly one JSON value."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return True
