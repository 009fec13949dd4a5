"""Slow and ended connections: limits the time and size of request heads, and reports a client's leaving to those who serve it.

Knows uvicorn's protocol classes; nothing of requests. Bodies have their own bounds, where they are read.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 15.0
HEAD_BYTES = 64 << 10
MAX_PIPELINED = 8  # requests that may wait behind one that is being answered
PUSH = "trireme.push"  # an ASGI extension: writes pieces of a stream without a message and a coroutine for each
LEAVING = "trireme.leaving"  # another one: a set of functions that are called as soon as the client has left


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's protocol, which also watches request heads. Whenever `cycle` changes, a whole head has come."""

    _watch: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._leaving: set[Callable[[], None]] = set()
        self._begin_watch()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if before is None or before.response_complete:
            if self._watch is None:
                self._begin_watch()
            self._head_bytes += len(data)
        super().data_received(data)
        if self.cycle is not before:
            self._end_watch()
        elif self._watch is not None and self._head_bytes > HEAD_BYTES:
            self._close(b"431 Request Header Fields Too Large")

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            extensions = self.scope.setdefault("extensions", {})
            extensions[PUSH], extensions[LEAVING] = functools.partial(_push, self.cycle), self._leaving
        if len(self.pipeline) > MAX_PIPELINED:
            self._close(b"429 Too Many Requests")
        elif self.pipeline:
            self.flow.resume_reading()  # otherwise the connection's end would be seen only after the answer

    def eof_received(self) -> None:
        super().eof_received()
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_watch()
        super().connection_lost(exc)
        self._leave()

    def _leave(self) -> None:
        """Tells all requests of this connection at once; uvicorn would tell only the newest one, and later."""
        for leave in list(self._leaving):
            leave()

    def _begin_watch(self) -> None:
        self._head_bytes = 0
        self._watch = self.loop.call_later(HEAD_SECONDS, self._close, b"408 Request Timeout")

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _close(self, status: bytes) -> None:
        self._end_watch()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


def _push(cycle: Any, piece: bytes) -> bool:
    """Writes a piece of a chunked answer that has begun, if the client has taken what came before."""
    streaming = cycle.chunked_encoding and cycle.response_started and not cycle.response_complete
    if not piece or not streaming or cycle.disconnected or cycle.flow.write_paused:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    return True
