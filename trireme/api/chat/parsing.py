"""One incremental parser per answer: text in, content, reasoning and tool calls out. Knows how the formats' parts fit together.

However the text is cut into pieces, the joined result is the same; nothing that a model writes makes it raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trireme.api.chat.parsing_stream import CallDelta, Delta, Steps, Stream
from trireme.api.chat.reasoning import Tags, opened_by, read_reasoning, tags_for
from trireme.api.chat.tools import BY_NAME, Format, Offer, format_for
from trireme.errors import BadConfig

__all__ = ["CallDelta", "Delta", "OutputParser", "ParserFor", "parser_for"]


@dataclass(frozen=True)
class ParserFor:
    """Makes the parsers of one request, one per sequence."""

    format: Format
    offer: Offer | None  # None: the request has no tools, so no text is parsed as a call
    tags: Tags | None  # None: reasoning is not separated from content
    opened: bool = False  # whether the prompt has opened the reasoning

    @property
    def needs_special(self) -> bool:
        """Whether special tokens must be left in the text, because the format is told by them."""
        return self.format.own_reasoning or (self.format.special and (self.offer is not None or self._special_tags))

    @property
    def _special_tags(self) -> bool:
        return self.tags is not None and self.tags.opening != "<think>"

    def __call__(self) -> OutputParser:
        return OutputParser(self)


class OutputParser:
    """The parser of one sequence."""

    def __init__(self, kind: ParserFor | None = None):
        kind = kind or ParserFor(BY_NAME["generic"], None, None)
        self._stream = Stream(kind.format.silent if kind.needs_special else ())
        self._steps = _read(kind, self._stream)

    @property
    def has_calls(self) -> bool:
        return self._stream.num_calls > 0

    def push(self, text: str) -> Delta:
        """Returns what this piece of text adds. Text that may be the beginning of a marker is held back until more arrives."""
        self._stream.push(text)
        next(self._steps, None)
        return self._stream.out()

    def finish(self) -> Delta:
        """Call this at the end of the text. Returns what was held back."""
        self._stream.close()
        for _ in self._steps:
            pass
        self._stream.say_rest()
        return self._stream.out()


def _read(kind: ParserFor, stream: Stream) -> Steps[None]:
    if kind.format.own_reasoning:
        yield from kind.format.read(stream, kind.offer or Offer())
        return
    if kind.tags is not None:
        yield from read_reasoning(stream, kind.tags, kind.opened)
    if kind.offer is not None:
        yield from kind.format.read(stream, kind.offer)
    yield from stream.until((), stream.say)


def parser_for(
    template: str | None,
    model_type: str,
    *,
    tools: Sequence[dict[str, Any]] | bool,
    reasoning: bool = True,
    override: str | None = None,
    prompt_end: str = "",
) -> ParserFor:
    """The parser for a model's answers, found from its chat template. `prompt_end` is the end of the rendered prompt."""
    if override is not None and override not in BY_NAME:
        raise BadConfig(f"There is no tool format {override!r}.", f"use one of: {', '.join(BY_NAME)}")
    format = BY_NAME[override] if override is not None else format_for(template, model_type)
    tags = tags_for(template) if reasoning else None
    offer = Offer.of(tools) if tools else None
    return ParserFor(format, offer, tags, tags is not None and opened_by(prompt_end, tags))
