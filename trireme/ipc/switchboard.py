"""Many channels in one poll loop: reads what arrives, sends backlogs, and closes channels that lag too far. Knows no message."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from typing import Any

from trireme.ipc.channel import Channel, ChannelClosed

Readable = Callable[[], None]
_READ, _WRITE = select.POLLIN, select.POLLOUT


class Switchboard:
    """Uses `poll` rather than `selectors`, because every token waits for a turn of this loop and there are few descriptors."""

    def __init__(self, max_backlog: int = 64 << 20):
        self._poll = select.poll()
        self._readable: dict[int, Readable] = {}  # descriptor -> what to call when it is readable
        self._channels: dict[Channel, tuple[int, Callable[[str], None]]] = {}  # joined channels: descriptor, what to call on a loss
        self._at: dict[int, Channel] = {}  # joined channels by descriptor
        self._woken_by: list[Channel] = []
        self._woken_at: list[int] = []
        self._late: set[Channel] = set()  # channels with a backlog, which are also polled for writing
        self._max_backlog = max_backlog

    def watch(self, source: Any, readable: Readable) -> None:
        """Calls `readable` whenever the source, a socket or file descriptor, has something to read."""
        self._watch(source if isinstance(source, int) else source.fileno(), readable)

    def _watch(self, descriptor: int, readable: Readable) -> None:
        self._readable[descriptor] = readable
        self._poll.register(descriptor, _READ)

    def _unwatch(self, descriptor: int) -> None:
        del self._readable[descriptor]
        self._poll.unregister(descriptor)

    def wake_for(self, channels: list[Channel], readable: Readable) -> None:
        """Calls `readable` for these channels instead of the ones given before. Their owner must read and flush them itself."""
        if channels != self._woken_by:
            for channel, descriptor in zip(self._woken_by, self._woken_at, strict=True):
                self._unwatch(descriptor)
                self._late.discard(channel)
            self._woken_by, self._woken_at = channels, [channel.fileno() for channel in channels]
            for descriptor in self._woken_at:
                self._watch(descriptor, readable)

    def join(self, channel: Channel, heard: Callable[[Any], None], gone: Callable[[str], None]) -> None:
        """Adds a channel: `heard` gets every message; `gone` is called once, with the reason, when the connection is lost.

        A turn reads one piece of each channel, so a peer that sends without pause does not block the others.
        """
        descriptor = channel.fileno()

        def readable() -> None:
            for message in channel.read():
                if channel not in self._channels:
                    return
                heard(message)

        self._channels[channel], self._at[descriptor] = (descriptor, gone), channel
        self._watch(descriptor, readable)

    def leave(self, channel: Channel) -> None:
        """Removes and closes a channel, without calling `gone`."""
        if channel in self._channels:
            descriptor, _ = self._channels.pop(channel)
            del self._at[descriptor]
            self._unwatch(descriptor)
        self._late.discard(channel)
        channel.close()

    def post(self, channel: Channel, message: Any) -> None:
        """Sends without waiting. A loss is reported only in the next turn, so that `gone` never runs inside this call."""
        try:
            channel.post(message)
        except ChannelClosed:
            return
        if channel.backlog and channel in self._channels:
            self._await_room(channel, self._channels[channel][0])

    def turn(self, timeout: float) -> None:
        """Waits for input or the timeout, and then delivers everything that has arrived."""
        for channel, descriptor in zip(self._woken_by, self._woken_at, strict=True):
            if channel.backlog:
                self._await_room(channel, descriptor)
        if self._late:
            self._see_to_backlogs()
        for descriptor, events in self._poll.poll(1000 * timeout):
            self._serve(descriptor, events)

    def _serve(self, descriptor: int, events: int) -> None:
        readable, channel = self._readable.get(descriptor), self._at.get(descriptor)
        if readable is None:
            return  # it was removed earlier in this turn
        if channel is None:
            readable()  # a watched source, or a channel that its owner reads
            return
        try:
            if events & _WRITE:
                channel.flush()
            if events != _WRITE:
                readable()
        except ChannelClosed as error:
            self._lose(channel, str(error))

    def _await_room(self, channel: Channel, descriptor: int) -> None:
        if channel not in self._late:
            self._late.add(channel)
            self._poll.modify(descriptor, _READ | _WRITE)

    def _see_to_backlogs(self) -> None:
        for channel in list(self._late):
            if not channel.backlog:
                self._late.discard(channel)
                self._poll.modify(channel.fileno(), _READ)
            elif channel.backlog > self._max_backlog and channel in self._channels:
                self._lose(channel, f"more than {self._max_backlog} bytes behind")

    def _lose(self, channel: Channel, reason: str) -> None:
        if channel in self._channels:
            _, gone = self._channels[channel]
            self.leave(channel)
            gone(reason)


def listen_at(path: str) -> socket.socket:
    """A listening unix socket that only this user can connect to."""
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
