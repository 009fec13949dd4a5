"""PLACEHOLDER of part B until part C's file lands: overwrite freely. Passes text through."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class CallDelta(msgspec.Struct):
    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct):
    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []


class OutputParser:
    has_calls = False

    def push(self, text: str) -> Delta:
        return Delta(text)

    def finish(self) -> Delta:
        return Delta()


def parser_for(
    template: str | None, model_type: str, *, tools: bool, reasoning: bool = True, override: str | None = None
) -> Callable[[], OutputParser]:
    return OutputParser
