"""A small HTTP client for load: one request, its server-sent events with their times. Knows HTTP/1.1, no OpenAI.

It shares the machine with the server it measures, so while an answer comes it only notes when which bytes came; what they mean is
worked out at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
import urllib.parse
from bisect import bisect_left
from dataclasses import dataclass

from trireme.errors import BadConfig, TriremeError


class RequestFailed(TriremeError):
    """The server refused, or the connection broke."""


class _Reception(asyncio.Protocol):
    """The bytes of one answer and when they came, until the server ends it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.times: list[float] = []
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left: int | None = None  # the bytes still to come, if the head gives a length

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.pieces.append(data)
        if len(self.pieces) == 1 or self._left is not None:
            self._count(data)
        if self._left == 0 or data == b"0\r\n\r\n" or data.endswith(b"\r\n0\r\n\r\n"):
            self._transport.close()

    def _count(self, data: bytes) -> None:
        if len(self.pieces) == 1:
            head, found, body = data.partition(b"\r\n\r\n")
            length = _headers(head).get("content-length", "")
            if not found or not length.isdigit():
                return
            self._left, data = int(length), body
        assert self._left is not None
        self._left = max(0, self._left - len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


@dataclass
class Answer:
    """A complete answer: its body, and for each piece of bytes its end in the body and its time."""

    status: int
    body: bytes
    ends: list[int]
    times: list[float]

    def events(self) -> list[tuple[float, bytes]]:
        """For each server-sent event: (the time of its last byte, its data)."""
        found, at = [], 0
        for line in self.body.split(b"\n"):
            at += len(line) + 1
            if line.startswith(b"data:"):
                found.append((self.times[min(bisect_left(self.ends, at), len(self.times) - 1)], line[5:].strip()))
        return found


class Server:
    """The server to send requests to. Each request has its own connection, so that none waits for another."""

    def __init__(self, url: str, api_key: str | None = None):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadConfig(f"{url!r} is no http URL.", "give one like http://127.0.0.1:8000")
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._key = api_key

    async def get(self, path: str) -> bytes:
        return (await self._exchange("GET", path, b"")).body

    async def post(self, path: str, body: bytes) -> Answer:
        return await self._exchange("POST", path, body)

    async def _exchange(self, method: str, path: str, body: bytes) -> Answer:
        context = ssl.create_default_context() if self._secure else None
        loop = asyncio.get_running_loop()
        try:
            transport, reception = await loop.create_connection(_Reception, self._host, self._port, ssl=context)
        except OSError as error:
            raise RequestFailed(f"Cannot connect to {self._host}:{self._port}: {error}.", "is the server running?") from None
        try:
            transport.write(self._head(method, path, len(body)) + body)
            await reception.over
        finally:
            transport.close()
        try:
            answer = _answer(reception)
        except (ValueError, IndexError):
            raise RequestFailed("The connection broke in mid-answer.") from None
        if answer.status != 200:
            raise RequestFailed(f"{answer.status}: {answer.body[:200].decode('utf-8', 'replace')}")
        return answer

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [f"{method} {self._base}{path} HTTP/1.1", f"host: {self._host}:{self._port}", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {length}"]
        if self._key:
            lines.append(f"authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode()


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


def _answer(reception: _Reception) -> Answer:
    """Parses an answer. Raises ValueError or IndexError if it is incomplete."""
    raw, ends = b"".join(reception.pieces), list(itertools.accumulate(map(len, reception.pieces)))
    start = raw.index(b"\r\n\r\n") + 4
    headers = _headers(raw[:start])
    status = int(raw.split(None, 2)[1])
    if "chunked" in headers.get("transfer-encoding", ""):
        return Answer(status, *_unchunked(raw, start, ends), reception.times)
    body = raw[start:]
    if len(body) < int(headers.get("content-length", "0")):
        raise ValueError("cut off")
    return Answer(status, body, [max(0, end - start) for end in ends], reception.times)


def _unchunked(raw: bytes, at: int, ends: list[int]) -> tuple[bytes, list[int]]:
    """The body without its HTTP chunks, and how much of it had come at each of `ends`."""
    chunks: list[bytes] = []
    size, piece = 0, 0
    moved = [0] * len(ends)  # the ends as offsets in the body
    while True:
        line_end = raw.index(b"\r\n", at)
        length = int(raw[at:line_end].split(b";")[0], 16)
        at = line_end + 2
        while piece < len(ends) and ends[piece] < at + length:
            moved[piece] = size + max(0, ends[piece] - at)
            piece += 1
        if not length:
            moved[piece:] = [size] * (len(ends) - piece)
            return b"".join(chunks), moved
        chunks.append(raw[at : at + length])
        size += length
        at += length + 2
