"""An HTTP process for tests of the other processes: the real client behind an app without any protocol.

POST /open takes {"tokens", "sampling"} and answers with one JSON line per piece; an error is a line of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any

import msgspec

from trireme.api.transport.failures import failure_of
from trireme.errors import BadRequest, TriremeError
from trireme.serve.client import Context, Stream
from trireme.serve.http import serve_http
from trireme.types import SamplingParams


class Asked(msgspec.Struct):
    tokens: list[int] = []
    prompt: str | None = None
    sampling: SamplingParams = SamplingParams()


def create_app(context: Context) -> Any:
    client = context.client

    async def answer(send: Any, status: int, body: Any, more: bool = False, extra: dict[str, str] | None = None) -> None:
        headers = [(name.encode(), value.encode()) for name, value in (extra or {}).items()]
        headers += [(b"content-type", b"application/json"), (b"x-pid", str(os.getpid()).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": msgspec.json.encode(body) if body is not None else b"", "more_body": more}
        )

    async def stream(asked: Asked, receive: Any, send: Any) -> None:
        tokens = asked.tokens if asked.prompt is None else client.tokenizer.encode(asked.prompt)
        try:
            asked.sampling.check_fields()
            opened = await client.open(tokens, asked.sampling, request_id="same-for-all")
        except TriremeError as error:
            status = 400 if isinstance(error, BadRequest) else 503
            said = {"error": str(error), "kind": type(error).__name__}
            return await answer(send, status, said, extra=failure_of(error).headers)
        async with opened:
            await answer(send, 200, None, more=True)
            speaking = asyncio.create_task(speak(opened, send))
            leaving = asyncio.create_task(receive())  # nothing more is to come but the disconnect
            await asyncio.wait([speaking, leaving], return_when=asyncio.FIRST_COMPLETED)
            for task in (speaking, leaving):
                task.cancel()

    async def speak(opened: Stream, send: Any) -> None:
        try:
            async for piece in opened:
                await send({"type": "http.response.body", "body": msgspec.json.encode(piece) + b"\n", "more_body": True})
        except TriremeError as error:
            line = msgspec.json.encode({"error": str(error), "kind": type(error).__name__}) + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http", scope["type"]
        if scope["path"] == "/open":
            body, more = b"", True
            while more:
                part = await receive()
                body, more = body + part.get("body", b""), part.get("more_body", False)
            await stream(msgspec.json.decode(body, type=Asked), receive, send)
        elif scope["path"] == "/stats":
            try:
                await answer(send, 200, await client.stats())
            except TriremeError as error:
                await answer(send, 503, {"error": str(error)})
        else:
            info = dataclasses.asdict(client.info) | {"config": {}}
            await answer(send, 200, dataclasses.asdict(client.state()) | {"info": info, "pid": os.getpid()})

    return app


if __name__ == "__main__":
    serve_http(create_app)
