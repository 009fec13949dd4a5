"""Typed messages over a local socket: length, then msgpack. Knows framing and deadlines; never pickles."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME = 1 << 28  # bytes; a longer frame is a broken peer
_LENGTH = struct.Struct("<I")

Message = TypeVar("Message")


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel(Generic[Message]):
    """One end of a stream socket that carries messages of one family."""

    def __init__(self, sock: socket.socket, receives: Any):
        self.socket = sock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a whole message; waits while the other side's buffer is full."""
        body = self._encode(message)
        try:
            self.socket.sendall(_LENGTH.pack(len(body)) + body)
        except (BrokenPipeError, ConnectionResetError, OSError) as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None when the time is up first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self._take()) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.socket], [], [], left)[0]:
                return None
            try:
                piece = self.socket.recv(1 << 18)
            except (ConnectionResetError, OSError) as error:
                raise ChannelClosed(str(error)) from None
            if not piece:
                raise ChannelClosed("end of stream")
            self._buffer += piece
        return message

    def _take(self) -> Message | None:
        """A whole message out of what has arrived, if there is one."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME:
            raise ChannelClosed(f"a frame of {length} bytes; at most {MAX_FRAME} are taken")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = self._decode(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        return message

    def close(self) -> None:
        self.socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two joined sockets that no name leads to."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
