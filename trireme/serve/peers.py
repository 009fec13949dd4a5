"""The router's peers: HTTP processes and detokenizers, by the names they gave. Knows channels; nothing of requests."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

from trireme.ipc.channel import Channel
from trireme.ipc.serving import Hello, ToRouter, Welcome
from trireme.ipc.switchboard import Switchboard

DETOKENIZER = "detokenizer"  # the prefix of its name; all other peers are HTTP processes


class Peers:
    """Calls `came(name)` when a peer has given its name, `heard(name, message)` for its messages, `gone(name)` when it is lost."""

    def __init__(
        self,
        board: Switchboard,
        listener: socket.socket,
        came: Callable[[str], None],
        heard: Callable[[str, Any], None],
        gone: Callable[[str], None],
    ):
        self._board, self._listener = board, listener
        self._came, self._heard, self._gone = came, heard, gone
        self._channels: dict[str, Channel] = {}
        board.watch(listener, self._accept)

    @property
    def has_detokenizer(self) -> bool:
        return any(name.startswith(DETOKENIZER) for name in self._channels)

    def http(self) -> Iterator[str]:
        """The names of the HTTP processes."""
        return (name for name in self._channels if not name.startswith(DETOKENIZER))

    def post(self, name: str, message: Any) -> None:
        """Sends the message if that peer is still connected."""
        if name in self._channels:
            self._board.post(self._channels[name], message)

    def to_detokenizer(self, message: Any) -> None:
        for name, channel in self._channels.items():
            if name.startswith(DETOKENIZER):
                self._board.post(channel, message)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        channel: Channel = Channel(connection, ToRouter)
        name: list[str] = []

        def heard(message: Any) -> None:
            if isinstance(message, Hello):
                name.append(message.name)
                self._channels[message.name] = channel
                self._board.post(channel, Welcome())
                self._came(message.name)
            elif name:
                self._heard(name[0], message)

        def gone(reason: str) -> None:
            if name and self._channels.get(name[0]) is channel:
                del self._channels[name[0]]
                self._gone(name[0])

        self._board.join(channel, heard, gone)
