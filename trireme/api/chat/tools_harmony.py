"""The message format of gpt-oss: channels for reasoning, tool calls and the answer. Knows its markers alone."""

from __future__ import annotations

import itertools

from trireme.api.chat.parsing_stream import WHITE, Steps, Stream
from trireme.api.chat.tools_json import read_arguments

START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL = (
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "return", "call")
)
ENDS = (END, RETURN, CALL, START)
MAX_HEADER = 512


def read_harmony(stream: Stream) -> Steps[None]:
    """Reads messages until the text ends. The first may begin inside its header, if the prompt has the header's beginning."""
    while (yield from stream.peek()):
        stream.keep()
        header = yield from _header(stream)
        if header is None:
            stream.give_up()
            yield from stream.until(ENDS, stream.say)
            continue
        stream.settle()
        yield from _message(stream, header)


def _header(stream: Stream) -> Steps[str | None]:
    """The words before a message, up to its marker. None if this is not a header."""
    yield from stream.skip_space()
    yield from stream.follows(START)
    first = yield from stream.peek()
    marked = (yield from stream.sees(CHANNEL)) or (yield from stream.sees("assistant")) or (yield from stream.sees("to="))
    if not first or not marked:
        return None
    header = ""
    while not (yield from stream.follows(MESSAGE)):
        character = yield from stream.take()
        if not character or len(header) > MAX_HEADER:
            return None
        header += character
    return header


def _message(stream: Stream, header: str) -> Steps[None]:
    words = header.replace(CHANNEL, " <channel> ").replace(CONSTRAIN, " <constrain> ").split()
    recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), "")
    channel = next((word for before, word in itertools.pairwise(words) if before == "<channel>"), "")
    if recipient:
        name = recipient.removeprefix("functions.").strip(WHITE)
        if name and (yield from read_arguments(stream, name, CALL)):
            yield from stream.until(ENDS, _nowhere)
            return
    yield from stream.until(ENDS, stream.think if channel == "analysis" else stream.say)


def _nowhere(text: str) -> None:
    """Ignores the text between a call and its end."""
