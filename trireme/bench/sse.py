"""A small HTTP client for load: one request, its server-sent events with their times. Knows HTTP/1.1, no OpenAI."""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator

from trireme.errors import BadConfig, TriremeError


class RequestFailed(TriremeError):
    """The server refused, or the connection broke."""


class Server:
    """Where requests go. Each request has a connection of its own, so that none waits for another's."""

    def __init__(self, url: str, api_key: str | None = None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadConfig(f"{url!r} is no http URL.", "give one like http://127.0.0.1:8000")
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key

    async def get(self, path: str) -> bytes:
        return b"".join([chunk async for _, chunk in self._exchange("GET", path, b"")])

    async def events(self, path: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
        """(when it came, its data) of each event."""
        rest = b""
        async for when, chunk in self._exchange("POST", path, body):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if line.startswith(b"data:"):
                    yield when, line[5:].strip()

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator[tuple[float, bytes]]:
        context = ssl.create_default_context() if self._secure else None
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context, limit=1 << 20)
        except OSError as error:
            raise RequestFailed(f"Cannot connect to {self._host}:{self._port}: {error}.", "is the server running?") from None
        try:
            writer.write(self._head(method, path, len(body)) + body)
            status, headers = await _read_head(reader)
            chunks = _chunks(reader, headers)
            if status != 200:
                said = b"".join([chunk async for chunk in chunks])
                raise RequestFailed(f"{status}: {said[:200].decode('utf-8', 'replace')}")
            async for chunk in chunks:
                yield time.perf_counter(), chunk
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise RequestFailed(f"The connection broke: {type(error).__name__}.") from None
        finally:
            writer.close()

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self._base}{path} HTTP/1.1", f"host: {self._host}:{self._port}", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {length}"]
        if self._key:
            lines.append(f"authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return int(head[0].split()[1]), headers


async def _chunks(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    else:
        left = int(headers.get("content-length", 1 << 62))
        while left > 0 and (chunk := await reader.read(min(left, 1 << 16))):
            left -= len(chunk)
            yield chunk
