"""`trireme stop`: asks a server of this user to end, and waits until it has."""

from __future__ import annotations

import argparse
import os
import signal
import time

from trireme.errors import BadConfig
from trireme.serve.runtime import Record, birth_of, running_servers

LOOK_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", nargs="?", help="its PID, model or URL, as `trireme ps` shows them; needed if several run")
    parser.add_argument("--all", action="store_true", help="end all servers of this user")
    parser.add_argument("--now", action="store_true", help="do not wait for answers that are being written")


def run(args: argparse.Namespace) -> int:
    for server in _chosen(running_servers(), args.server, args.all):
        _ask(server)
        if args.now:
            time.sleep(1.0)  # a second signal within half a second counts as the first
            _ask(server)
        while birth_of(server.pid) == server.born:
            time.sleep(LOOK_SECONDS)
        print(f"{server.model} at {server.url} has ended.")
    return 0


def _ask(server: Record) -> None:
    if birth_of(server.pid) == server.born:
        os.kill(server.pid, signal.SIGTERM)


def _chosen(servers: list[Record], wanted: str | None, everyone: bool) -> list[Record]:
    if not servers:
        raise BadConfig("No server of this user runs here.", "see `trireme ps`")
    if everyone:
        return servers
    found = [s for s in servers if wanted in (None, str(s.pid), s.model, s.url)]
    if len(found) != 1:
        shown = ", ".join(f"{s.pid} ({s.model})" for s in found or servers)
        raise BadConfig(f"{'Several servers fit' if found else 'No server fits'}: {shown}.", "give the PID, or --all")
    return found
