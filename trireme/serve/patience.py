"""Connections that dawdle: a request's head must come within seconds and bounds, or the connection is closed.

Knows uvicorn's protocol classes; nothing of requests. Bodies have their own bounds, where they are read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 15.0
HEAD_BYTES = 64 << 10


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """uvicorn's protocol with an eye on heads. Whenever `cycle` changes, a head has come whole."""

    _watch: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_watch()
        super().connection_lost(exc)

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
