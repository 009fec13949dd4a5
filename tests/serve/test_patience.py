"""Heads that never end: closed after a while or beyond a size, while others are served on the same loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from trireme.serve import patience
from trireme.serve.patience import PatientProtocol


async def hello(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


def with_server(action: Any) -> None:
    async def run() -> None:
        config = uvicorn.Config(hello, port=0, http=PatientProtocol, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await action(server.servers[0].sockets[0].getsockname()[1])
        finally:
            server.should_exit = True
            await task

    asyncio.run(run())


async def talk(port: int, *parts: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


def test_slow_heads_are_closed_and_others_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HEAD_SECONDS", 0.5)

    async def action(port: int) -> None:
        whole = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        begun = [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: "] * 50
        slow = [asyncio.create_task(talk(port, part)) for part in begun]
        assert b"hi" in await talk(port, whole)
        assert {(await answer)[:12] for answer in slow} == {b"HTTP/1.1 408"}

    with_server(action)


def test_a_second_head_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HEAD_SECONDS", 0.5)

    async def action(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc")
        assert (await reader.readuntil(b"hi")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HTTP/1.1\r\nx-b")
        assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 408")
        writer.close()

    with_server(action)


def test_endless_heads_are_closed() -> None:
    async def action(port: int) -> None:
        answer = await talk(port, b"GET / HTTP/1.1\r\nhost: x\r\n", *(b"x-%d: %b\r\n" % (i, b"a" * 8000) for i in range(12)))
        assert answer.startswith(b"HTTP/1.1 431")
        body = b"a" * 200_000
        whole = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        assert b"hi" in await talk(port, whole, body)

    with_server(action)
