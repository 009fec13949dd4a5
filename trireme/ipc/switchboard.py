"""Many channels in one loop: wakes for what comes first, sends backlogs on, cuts off whoever lags too far. Knows no message."""

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
    """`poll` rather than `selectors`: a handful of descriptors, and a turn is on the way of every token."""

    def __init__(self, max_backlog: int = 64 << 20):
        self._poll = select.poll()
        self._readable: dict[int, Readable] = {}  # descriptor -> what is done when there is something to read
        self._channels: dict[Channel, tuple[int, Callable[[str], None]]] = {}  # those that joined: descriptor, who hears of a loss
        self._at: dict[int, Channel] = {}  # the same by descriptor
        self._woken_by: list[Channel] = []
        self._woken_at: list[int] = []
        self._late: set[Channel] = set()  # with a backlog: they are also watched for room to write
        self._max_backlog = max_backlog

    def watch(self, source: Any, readable: Readable) -> None:
        """Calls `readable` whenever there is something to read at the source: a socket, a file descriptor."""
        self._watch(source if isinstance(source, int) else source.fileno(), readable)

    def _watch(self, descriptor: int, readable: Readable) -> None:
        self._readable[descriptor] = readable
        self._poll.register(descriptor, _READ)

    def _unwatch(self, descriptor: int) -> None:
        del self._readable[descriptor]
        self._poll.unregister(descriptor)

    def wake_for(self, channels: list[Channel], readable: Readable) -> None:
        """Calls `readable` for these channels and no longer for the ones before; reading and flushing is their owner's business."""
        if channels != self._woken_by:
            for channel, descriptor in zip(self._woken_by, self._woken_at, strict=True):
                self._unwatch(descriptor)
                self._late.discard(channel)
            self._woken_by, self._woken_at = channels, [channel.fileno() for channel in channels]
            for descriptor in self._woken_at:
                self._watch(descriptor, readable)

    def join(self, channel: Channel, heard: Callable[[Any], None], gone: Callable[[str], None]) -> None:
        """Takes a channel in: `heard` gets every message, `gone` is called once, with the reason, when the other side is lost.

        A turn reads one piece of each channel, so whoever talks without end keeps nobody from being heard.
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
        """Lets a channel go, and closes it. Nobody is told."""
        if channel in self._channels:
            descriptor, _ = self._channels.pop(channel)
            del self._at[descriptor]
            self._unwatch(descriptor)
        self._late.discard(channel)
        channel.close()

    def post(self, channel: Channel, message: Any) -> None:
        """Sends without waiting. A loss shows in the next turn, so that no caller finds its own tables changed under it."""
        try:
            channel.post(message)
        except ChannelClosed:
            return
        if channel.backlog and channel in self._channels:
            self._await_room(channel, self._channels[channel][0])

    def turn(self, timeout: float) -> None:
        """Waits until something comes or the time is up, and hands out everything that has come."""
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
            return  # it has left in this very turn
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
