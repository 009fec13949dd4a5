"""Many channels in one loop: wakes for what comes first, sends backlogs on, cuts off whoever lags too far. Knows no message."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Callable
from typing import Any

from trireme.ipc.channel import Channel, ChannelClosed

Readable = Callable[[], None]
MESSAGES_A_TURN = 512  # of one channel, so that whoever talks without end keeps nobody from being heard


class Switchboard:
    def __init__(self, max_backlog: int = 64 << 20):
        self._selector = selectors.DefaultSelector()
        self._channels: dict[Channel, tuple[Readable, Callable[[str], None]]] = {}
        self._woken_by: list[Channel] = []
        self._unheard: set[Channel] = set()  # with messages that arrived and had to wait for the next turn
        self._late: set[Channel] = set()  # with a backlog: they are also watched for room to write
        self._max_backlog = max_backlog

    def watch(self, source: Any, readable: Readable) -> None:
        """Calls `readable` whenever there is something to read at the source: a socket, a file descriptor."""
        self._selector.register(source, selectors.EVENT_READ, readable)

    def wake_for(self, channels: list[Channel]) -> None:
        """Wakes up for these channels and no longer for the ones before; reading and flushing them is their owner's business."""
        if channels != self._woken_by:
            for channel in self._woken_by:
                self._selector.unregister(channel)
                self._late.discard(channel)
            self._woken_by = channels
            for channel in channels:
                self._selector.register(channel, selectors.EVENT_READ)

    def join(self, channel: Channel, heard: Callable[[Any], None], gone: Callable[[str], None]) -> None:
        """Takes a channel in: `heard` gets every message, `gone` is called once, with the reason, when the other side is lost."""

        def readable() -> None:
            self._unheard.discard(channel)
            for _ in range(MESSAGES_A_TURN):
                if channel not in self._channels or (message := channel.receive(timeout=0)) is None:
                    return
                heard(message)
            self._unheard.add(channel)

        self._channels[channel] = (readable, gone)
        self._selector.register(channel, selectors.EVENT_READ, readable)

    def leave(self, channel: Channel) -> None:
        """Lets a channel go, and closes it. Nobody is told."""
        if self._channels.pop(channel, None) is not None:
            self._selector.unregister(channel)
        self._unheard.discard(channel)
        self._late.discard(channel)
        channel.close()

    def post(self, channel: Channel, message: Any) -> None:
        """Sends without waiting. A loss shows in the next turn, so that no caller finds its own tables changed under it."""
        with contextlib.suppress(ChannelClosed):
            channel.post(message)

    def turn(self, timeout: float) -> None:
        """Waits until something comes or the time is up, and hands out everything that has come."""
        self._see_to_backlogs()
        waiting = list(self._unheard)
        for key, events in self._selector.select(0.0 if waiting else timeout):
            channel = key.fileobj if isinstance(key.fileobj, Channel) else None
            if channel is None:
                key.data()  # a watched source, not a channel
            elif channel in self._channels:
                self._serve(channel, events)
        for channel in waiting:
            if channel in self._unheard:
                self._serve(channel, selectors.EVENT_READ)

    def _serve(self, channel: Channel, events: int) -> None:
        readable, _ = self._channels[channel]
        try:
            if events & selectors.EVENT_WRITE:
                channel.flush()
            if events & selectors.EVENT_READ:
                readable()
        except ChannelClosed as error:
            self._lose(channel, str(error))

    def _see_to_backlogs(self) -> None:
        for channel in [channel for channel in self._channels if channel.backlog > self._max_backlog]:
            self._lose(channel, f"more than {self._max_backlog} bytes behind")
        for channel in (*self._channels, *self._woken_by):
            if channel.backlog and channel not in self._late:
                self._late.add(channel)
                self._watch_for(channel, selectors.EVENT_READ | selectors.EVENT_WRITE)
            elif not channel.backlog and channel in self._late:
                self._late.discard(channel)
                self._watch_for(channel, selectors.EVENT_READ)

    def _watch_for(self, channel: Channel, events: int) -> None:
        self._selector.modify(channel, events, self._selector.get_key(channel).data)

    def _lose(self, channel: Channel, reason: str) -> None:
        if channel in self._channels:
            _, gone = self._channels[channel]
            self.leave(channel)
            gone(reason)


def listen_at(path: str) -> socket.socket:
    """A listening unix socket that only this user may reach."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(path):
        os.unlink(path)  # left by a process that was killed
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def connect_to(path: str) -> socket.socket:
    """A connection to a listening unix socket; OSError if nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection
