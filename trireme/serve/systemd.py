"""What systemd gives a service and wants to hear of it: a listening socket, and readiness. Knows its variables alone."""

from __future__ import annotations

import contextlib
import os
import socket

from trireme.errors import BadConfig

FIRST = 3  # the descriptor of the first socket, by systemd's convention


def inherited_listener() -> socket.socket | None:
    """The socket that systemd has opened for this process; None if it has not. Children see nothing of it."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    if count != "1":
        raise BadConfig(f"systemd gave {count} sockets.", "write one ListenStream= in the .socket unit")
    os.set_inheritable(FIRST, False)
    return socket.socket(fileno=FIRST)


def notify(*lines: str) -> None:
    """Tells systemd, where it asked for it (Type=notify). What it does not hear changes nothing here."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place:
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto("\n".join(lines).encode(), address)
