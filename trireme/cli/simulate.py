"""`trireme simulate`: policies compared in virtual time, as a table, JSON or a picture. Knows reports, not how they come about."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trireme.errors import BadConfig

if TYPE_CHECKING:
    from trireme.sched.simulator import Load, Report, Setup
    from trireme.sched.traces import Arrival

TELL_SECONDS = 0.2  # between two lines of progress
POLICIES = "past_future,aggressive,conservative,batch_decode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policies", default=POLICIES, help=f"comma-separated (default: {POLICIES})")
    add("--trace", default="sharegpt", help="sharegpt (real lengths), uniform, decode_heavy, prompt_heavy, or a CSV file of yours")
    add("--requests", type=int, help="how many requests of the trace (default: 1500, or all of a file)")
    come = parser.add_mutually_exclusive_group()
    come.add_argument("--clients", help="comma-separated loads: clients that each wait for their answer (default: 350)")
    come.add_argument("--rate", help="comma-separated loads: requests per second")
    come.add_argument("--at-once", action="store_true", help="all requests come together")
    add("--kv-tokens", type=int, help="KV slots of the machine (default: 112000)")
    add("--base", type=float, help="cost of a step, seconds (default: 0.010)")
    add("--per-token", type=float, help="and for each token it computes (default: 80e-6)")
    add("--per-context", type=float, help="and for each cached token it attends to (default: 0.33e-6)")
    add("--first", type=float, default=10.0, help="latency bound: seconds to the first token (default: 10)")
    add("--between", type=float, default=1.5, help="latency bound: seconds between two tokens (default: 1.5)")
    add("--page-size", type=int, default=16, help="KV slots per page; 0 is static (default: 16)")
    add("--max-running", type=int, default=1000, help="requests computed together at most (default: 1000)")
    add("--max-step-tokens", type=int, default=2048, help="tokens computed in one step at most (default: 2048)")
    add("--max-tokens", type=int, default=2048, help="what every request says it may generate (default: 2048)")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print the reports as JSON")
    add("--plot", type=pathlib.Path, metavar="FILE.png", help="draw goodput, evictions and memory use")


def run(args: argparse.Namespace) -> int:
    from trireme.sched.simulator import simulate

    if args.requests is not None and args.requests < 1:
        raise BadConfig(f"requests is {args.requests}.", "simulate at least one")
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    trace = _trace(args)
    loads = _loads(args, recorded=trace[0].at is not None)
    with _told(len(trace)) as told:
        reports = simulate(policies, loads, trace, _setup(args), told)
    if args.json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=2))
    else:
        print(_table(reports))
    if args.plot:
        _plot(reports, args.plot, f"{args.trace}, {len(trace)} requests")
    return 0


def _trace(args: argparse.Namespace) -> list[Arrival]:
    from trireme.sched.traces import trace_by_name, trace_of_file

    path = pathlib.Path(args.trace)
    if path.suffix or path.exists():
        return trace_of_file(path)[: args.requests]
    return trace_by_name(args.trace, args.requests or 1500, args.seed)


@contextlib.contextmanager
def _told(count: int) -> Iterator[Callable[[str, str, int], None]]:
    """Returns a function that shows on a terminal how far a simulation is."""
    if not sys.stderr.isatty():
        yield lambda policy, load, ended: None
        return
    latest = 0.0

    def tell(policy: str, load: str, ended: int) -> None:
        nonlocal latest
        if time.monotonic() - latest > TELL_SECONDS:
            latest = time.monotonic()
            print(f"\r\033[K{policy}, {load}: {ended} of {count} requests", end="", file=sys.stderr, flush=True)

    yield tell
    print("\r\033[K", end="", file=sys.stderr, flush=True)


def _loads(args: argparse.Namespace, recorded: bool) -> list[Load]:
    """The loads that are asked for. A trace with times of its own is run at those if none is."""
    from trireme.sched.simulator import Load

    if recorded and not (args.at_once or args.rate or args.clients):
        return [Load(recorded=True)]
    try:
        if args.at_once:
            return [Load()]
        if args.rate:
            return [Load(rate=_positive(float(text))) for text in args.rate.split(",")]
        return [Load(clients=int(_positive(int(text)))) for text in (args.clients or "350").split(",")]
    except ValueError:
        raise BadConfig(
            f"The load {args.rate or args.clients!r} is not understood.", "give numbers above 0, as in 100,200"
        ) from None


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError(value)
    return value


def _setup(args: argparse.Namespace) -> Setup:
    from trireme.sched.simulator import Bound, Machine, Setup

    given = {name: getattr(args, name) for name in ("base", "per_token", "per_context", "kv_tokens")}
    return Setup(
        machine=Machine(**{name: value for name, value in given.items() if value is not None}),
        bound=Bound(args.first, args.between),
        page_size=args.page_size,
        max_running=args.max_running,
        max_step_tokens=args.max_step_tokens,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )


COLUMNS = (
    ("policy", lambda r: r.policy),
    ("load", lambda r: r.load),
    ("tokens/s", lambda r: f"{r.throughput:.0f}"),
    ("goodput", lambda r: f"{r.goodput:.0f}"),
    ("in bound", lambda r: f"{r.within_bound:.0%}"),
    ("first token p50/p99 s", lambda r: f"{r.first_token_p50:.2f}/{r.first_token_p99:.2f}"),
    ("longest gap p99 s", lambda r: f"{r.gap_p99:.2f}"),
    ("evictions", lambda r: f"{r.evictions}"),
    ("memory", lambda r: f"{r.memory_use:.0%}"),
    ("running", lambda r: f"{r.running:.0f}"),
    ("scheduler ms/step mean/p99", lambda r: f"{r.scheduler_ms:.2f}/{r.scheduler_ms_p99:.2f}"),
)


def _table(reports: list[Report]) -> str:
    columns = [*COLUMNS]
    if any(len(report.first_token_p99_of) > 1 for report in reports):
        columns.insert(6, ("by priority p99 s", lambda r: " ".join(f"{p}: {s:.2f}" for p, s in r.first_token_p99_of.items())))
    cells = [[name for name, _ in columns]] + [[show(report) for _, show in columns] for report in reports]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells)


def _plot(reports: list[Report], path: pathlib.Path, title: str) -> None:
    """Three panels, a line per policy over the loads."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadConfig("matplotlib is not installed, and --plot needs it.", "pip install 'trireme-llm[plot]'") from None
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = (
        ("goodput, tokens/s within the bound", lambda r: r.goodput),
        ("evictions", lambda r: r.evictions),
        ("KV memory held, share", lambda r: r.memory_use),
    )
    for axes, (name, value) in zip(figure.subplots(1, 3), panels, strict=True):
        for policy in dict.fromkeys(report.policy for report in reports):
            mine = [report for report in reports if report.policy == policy]
            axes.plot([report.load for report in mine], [value(report) for report in mine], marker="o", label=policy)
        axes.set_title(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BadConfig(f"Cannot write {path}: {error}.", "choose another file, ending in .png") from None
