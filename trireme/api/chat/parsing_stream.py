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
    """A piece of a tool call. The first piece has the name; the arguments are JSON text."""

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
    """Holds the text that is not yet read, and the delta that is being built from it."""

    def __init__(self, silent: Sequence[str] = ()):
        self.delta = Delta()
        self.num_calls = 0
        self._silent = tuple(silent)  # markers that end a turn; they are not part of its text
        self._text, self._at = "", 0
        self._closed = False
        self._kept: list[str] | None = None
        self._space = ""  # white space that becomes content only if more content follows

    # --- in -------------------------------------------------------------------------------------------------------------------

    def push(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def close(self) -> None:
        self._closed = True

    def peek(self) -> Steps[str]:
        """Returns the next character and leaves it unread. Returns an empty string at the end."""
        while self._at >= len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Steps[str]:
        """Reads the next character. Returns an empty string at the end."""
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
        """Whether this marker comes next. It stays unread."""
        while True:
            rest = self._text[self._at : self._at + len(marker)]
            if rest == marker or self._closed or not marker.startswith(rest):
                return rest == marker
            yield

    def skip_space(self) -> Steps[str]:
        """Reads white space and returns it."""
        space = ""
        while (character := (yield from self.peek())) and character in WHITE:
            space += yield from self.take()
        return space

    def until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Steps[str]:
        """Emits the text before the first of the markers, then reads and returns the marker. Returns "" at the end of the text."""
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
        """Returns (the text, the marker after it). An empty marker means that the text has ended."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        return "".join(parts), marker

    def keep(self) -> None:
        """Remembers what is read from here on, so that `give_up` can emit it as content."""
        self._kept = []

    def give_up(self, before: str = "") -> None:
        """Emits everything read since `keep` as content."""
        self.say(before + "".join(self._kept or ()))
        self._kept = None

    def settle(self) -> None:
        """Forgets what was read since `keep`, because it has been parsed."""
        self._kept = None

    def _advance(self, count: int) -> None:
        if self._kept is not None:
            self._kept.append(self._text[self._at : self._at + count])
        self._at += count

    # --- out ------------------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Emits content. White space at its end is held back, because it is dropped if a call follows."""
        bare = text.rstrip(WHITE)
        if bare:
            self.delta.content += self._space + bare
            self._space = text[len(bare) :]
        else:
            self._space += text

    def say_rest(self) -> None:
        """Emits the white space that was held back. At the end of the text it is content."""
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
        """Adds text to the arguments of the current call."""
        calls, index = self.delta.calls, self.num_calls - 1
        if calls and calls[-1].index == index:
            calls[-1].arguments += text
        elif text:
            calls.append(CallDelta(index, arguments=text))

    def out(self) -> Delta:
        """Returns what was emitted since the last call of this method."""
        delta, self.delta = self.delta, Delta(calls=[])
        return delta


def _begun(text: str, markers: Sequence[str]) -> int:
    """The number of characters at the end of the text that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
