"""`trireme backends` lists what can compute here; `trireme backends check NAME` holds one against the specification.

Knows how findings are shown; what is checked lives with the backends and the worker.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from trireme.command.startup import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("list", help="the backends, and why one cannot run here (the default)")
    check = actions.add_parser("check", help="every op and small models on a backend, against the plain bodies")
    check.add_argument("name", help="a backend from the list")
    check.add_argument("--op", action="append", default=[], metavar="OP", help="only this op (may be repeated); no models then")
    check.add_argument("--all", action="store_true", help="a line for every case, not one per op and type")


def run(args: argparse.Namespace) -> int:
    return _check(args) if args.action == "check" else _list()


def _list() -> int:
    from trireme.backends import names, reason_against

    chosen = False
    for name in names():
        with shown(f"Asking the backend {name}"):
            reason = reason_against(name)
        automatic = reason is None and not chosen
        chosen = chosen or reason is None
        print(f"{name:<12} {f'not here: {reason}' if reason else 'available'}{' (the automatic choice)' if automatic else ''}")
    return 0


def _check(args: argparse.Namespace) -> int:
    """Prints a table of findings. Returns 1 if any is out of bounds."""
    from trireme.backends import open_backend
    from trireme.config import DeviceOptions
    from trireme.errors import BadRequest

    with shown("Importing torch"):
        from trireme.backends.conformance import check_ops
        from trireme.ops import Ops
        from trireme.worker.conformance import check_models

    for op in args.op:
        if not hasattr(Ops, op):
            raise BadRequest(f"No op {op!r}.", "see trireme/ops/table.py for their names")
    with shown(f"Opening the backend {args.name}"):
        backend = open_backend(DeviceOptions(backend=args.name))
    print(f"{'op':<17} {'type':<9} {'error':>8} {'allowed':>8}      case", flush=True)
    findings: list[Any] = []
    for _, found in itertools.groupby(check_ops(backend, args.op), key=lambda finding: finding.op):
        findings += _show(list(found), args.all)
    if not args.op:
        findings += _show(list(check_models(args.name)), args.all)
    failed = [finding for finding in findings if not finding.ok]
    print(f"{args.name}: {len(findings) - len(failed)} of {len(findings)} within bounds")
    return 1 if failed else 0


def _show(findings: list[Any], every: bool) -> list[Any]:
    """Prints the worst finding of each op and type, and every one that is out of bounds, as soon as it is known. Returns all."""
    worst: dict[tuple[str, str], Any] = {}
    for finding in findings:
        key = (finding.op, finding.dtype)
        before = worst.get(key)
        if before is None or _badness(finding) > _badness(before):
            worst[key] = finding
    shown = [f for f in findings if every or not f.ok or worst[f.op, f.dtype] is f]
    for f in shown:
        verdict, note = "ok  " if f.ok else "FAIL", f" ({f.note})" if f.note else ""
        print(f"{f.op:<17} {f.dtype:<9} {f.error:8.1e} {f.tolerance:8.1e} {verdict} {f.case}{note}", flush=True)
    return findings


def _badness(finding: Any) -> float:
    """The error as a share of the allowed error."""
    return finding.error / finding.tolerance if finding.tolerance else finding.error * 1e9
