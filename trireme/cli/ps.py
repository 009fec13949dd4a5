"""`trireme ps`: lists this user's servers on this machine."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from trireme.serve.runtime import Record, running_servers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    servers = running_servers()
    if args.json:
        print(msgspec.json.encode(servers).decode())
    elif servers:
        _print_table(servers)
    else:
        print("No server runs here. `trireme serve` starts one.", file=sys.stderr)
    return 0


def _print_table(servers: list[Record]) -> None:
    rows = [("PID", "MODEL", "STATE", "URL", "UP")]
    rows += [(str(s.pid), s.model, s.state, s.url, _duration(time.time() - s.started)) for s in servers]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {seconds}s"
