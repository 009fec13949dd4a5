"""The interface to systemd: it may pass a listening socket and wants to be told of readiness. Knows only its variables."""

from __future__ import annotations

import contextlib
import os
import socket

from trireme.errors import BadConfig

FIRST = 3  # the descriptor of the first socket, by systemd's convention


def inherited_listener() -> socket.socket | None:
    """The socket that systemd has opened for this process, or None. The variables are removed, so that children do not see them."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    if count != "1":
        raise BadConfig(f"systemd gave {count} sockets.", "write one ListenStream= in the .socket unit")
    os.set_inheritable(FIRST, False)
    return socket.socket(fileno=FIRST)


def notify(*lines: str) -> None:
    """Sends systemd a message if it asked for them (Type=notify). Failures to send are ignored."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place:
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto("\n".join(lines).encode(), address)
