"""A channel for asyncio: the same frames as ipc/channel.py, read and written by the event loop. Knows no message."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from trireme.ipc.channel import ChannelClosed, Frames, frame

MAX_BACKLOG = 64 << 20  # bytes; the connection to a peer with more unread data is closed


Heard = Callable[[Any], None]
Gone = Callable[[], None]


class AsyncChannel(asyncio.Protocol):
    """One end of a stream socket. `heard` gets every message; `gone` is called once, when the connection is lost."""

    def __init__(self, receives: Any, heard: Heard, gone: Gone):
        self._frames: Frames = Frames(receives)
        self.heard, self._gone = heard, gone
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(cls, path: str, receives: Any, heard: Heard, gone: Gone) -> AsyncChannel:
        """Connects to a listening unix socket; OSError if nobody listens."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(receives, heard, gone), path)
        return channel

    @classmethod
    async def adopt(cls, sock: socket.socket, receives: Any, heard: Heard, gone: Gone) -> AsyncChannel:
        """Takes over a connected socket."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(receives, heard, gone), sock=sock)
        return channel

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def post(self, message: msgspec.Struct) -> None:
        """Sends without waiting. If the connection is lost, the message is dropped; `gone` reports the loss."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame(message))
        if self._transport.get_write_buffer_size() > MAX_BACKLOG:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's transport can write

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._frames.feed(data)
        except ChannelClosed:
            self.close()
            return
        for message in messages:
            self.heard(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()
