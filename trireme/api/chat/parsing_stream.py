"""A model's text on its way to content, reasoning and tool calls: what comes in, what goes out. Knows no format.

A format is a generator over a `Stream`: it reads characters and yields when it has read all there is. What it does depends on the
characters alone, never on how they were cut into pieces, so every cut gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")
Steps = Generator[None, None, T]

WHITE = " \t\r\n"


class CallDelta(msgspec.Struct):
    """A piece of a tool call: its first has the name; arguments are JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct):
    """What a piece of text added."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []


class Stream:
    """The unread text, and the delta that is being made from it."""

    def __init__(self, silent: Sequence[str] = ()):
        self.delta = Delta()
        self.num_calls = 0
        self._silent = tuple(silent)  # markers that end a turn and are no part of its text
        self._text, self._at = "", 0
        self._closed = False
        self._kept: list[str] | None = None
        self._space = ""  # white space that is content only if more content follows

    # --- in -------------------------------------------------------------------------------------------------------------------

    def push(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def close(self) -> None:
        self._closed = True

    def peek(self) -> Steps[str]:
        """The next character, still unread; empty at the end."""
        while self._at >= len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Steps[str]:
        """The next character; empty at the end."""
        character = yield from self.peek()
        if character:
            self._at += 1
            if self._kept is not None:
                self._kept.append(character)
        return character

    def follows(self, *markers: str) -> Steps[str]:
        """Which of these markers comes next, read; empty if none does. Where one begins another, the longer stands first."""
        for marker in markers:
            if (yield from self.sees(marker)):
                self._advance(len(marker))
                return marker
        return ""

    def sees(self, marker: str) -> Steps[bool]:
        """Whether this marker comes next; it stays unread."""
        while True:
            rest = self._text[self._at : self._at + len(marker)]
            if rest == marker or self._closed or not marker.startswith(rest):
                return rest == marker
            yield

    def skip_space(self) -> Steps[str]:
        """Reads white space; returns it."""
        space = ""
        while (character := (yield from self.peek())) and character in WHITE:
            space += yield from self.take()
        return space

    def until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Steps[str]:
        """Emits text up to the first of the markers, which is read and returned; empty at the end of the text."""
        wanted = (*markers, *self._silent)
        while True:
            rest = self._text[self._at :]
            found = [(at, marker) for marker in wanted if (at := rest.find(marker)) >= 0]
            if found:
                at, marker = min(found)
                emit(rest[:at])
                self._advance(at + len(marker))
                if marker not in markers:
                    continue
                return marker
            held = 0 if self._closed else _begun(rest, wanted)
            emit(rest[: len(rest) - held])
            self._advance(len(rest) - held)
            if self._closed:
                return ""
            yield

    def text_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """(text, the marker after it); an empty marker means that the text has ended."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        return "".join(parts), marker

    def keep(self) -> None:
        """From here on, what is read can be given back as content."""
        self._kept = []

    def give_up(self, before: str = "") -> None:
        """What was read since `keep` is content after all."""
        self.say(before + "".join(self._kept or ()))
        self._kept = None

    def settle(self) -> None:
        """What was read since `keep` has been understood."""
        self._kept = None

    def _advance(self, count: int) -> None:
        if self._kept is not None:
            self._kept.append(self._text[self._at : self._at + count])
        self._at += count

    # --- out ------------------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Content. White space at its end waits for what follows: before a call it is dropped."""
        bare = text.rstrip(WHITE)
        if bare:
            self.delta.content += self._space + bare
            self._space = text[len(bare) :]
        else:
            self._space += text

    def say_rest(self) -> None:
        """White space at the very end of a text is content."""
        if not self.num_calls:
            self.delta.content += self._space
        self._space = ""

    def think(self, text: str) -> None:
        self.delta.reasoning += text

    def call(self, name: str, id: str | None = None) -> None:
        """Begins a tool call."""
        self._space = ""
        self._kept = None
        self.delta.calls.append(CallDelta(self.num_calls, id, name))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """More of the arguments of the call in hand."""
        calls, index = self.delta.calls, self.num_calls - 1
        if calls and calls[-1].index == index:
            calls[-1].arguments += text
        elif text:
            calls.append(CallDelta(index, arguments=text))

    def out(self) -> Delta:
        """What has come out since the last time."""
        delta, self.delta = self.delta, Delta(calls=[])
        return delta


def _begun(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
