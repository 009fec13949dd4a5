"""An HTTP process whose chat parser fails for messages with the word "poison"; `/open` leads to the plain app of the other tests.

The real application in all else: what is tested is what one request's failure does to its neighbours.
"""

from __future__ import annotations

from typing import Any

from tests.serve import http_process
from trireme.api import app
from trireme.api.chat import turn as chat
from trireme.api.chat.parsing import Delta, OutputParser, ParserFor
from trireme.serve.client import Context
from trireme.serve.http import serve_http

PIECES = 3  # that go well before


class PoisonedParser(OutputParser):
    num_pushed = 0

    def push(self, text: str) -> Delta:
        self.num_pushed += 1
        if self.num_pushed > PIECES:
            raise ZeroDivisionError("a parser's mistake")
        return super().push(text)


class PoisonedParserFor(ParserFor):
    def __call__(self) -> OutputParser:
        return PoisonedParser(self)


_parser_of = chat.parser_of


def _poisoned(service: Any, job: chat.ChatJob, tokens: list[int]) -> ParserFor:
    found = _parser_of(service, job, tokens)
    poisoned = "poison" in job.messages[-1]["content"]
    return PoisonedParserFor(found.format, found.offer, found.tags, found.opened) if poisoned else found


def create_app(context: Context) -> Any:
    chat.parser_of = _poisoned
    real, plain = app.create_app(context), http_process.create_app(context)

    async def either(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path")
        await (plain if path in ("/open", "/state", "/stats") else real)(scope, receive, send)

    return either


if __name__ == "__main__":
    serve_http(create_app)
