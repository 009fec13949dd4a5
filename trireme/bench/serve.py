"""`trireme bench serve`: load on any OpenAI-compatible server; a table, JSON and a plot of what its users would feel.

Knows figures; the load itself is in `load`, the flags in `flags`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import pathlib
import statistics
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from trireme.bench.load import Load, Pace, Sample, Shape, asks_of
from trireme.bench.sse import Server
from trireme.errors import BadConfig

PERCENTILES = (50, 90, 99)
_BOUNDS = {"ttft": "first", "tpot": "per_token", "e2e": "whole"}


def run(args: argparse.Namespace) -> int:
    bounds = _bounds(args.goodput)
    results = asyncio.run(_measure(args, bounds))
    Console().print(_table(results))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    if args.plot:
        _plot(results, args.plot)
    return 0 if all(result["failed"] == 0 for result in results) else 1


async def _measure(args: argparse.Namespace, bounds: dict[str, float]) -> list[dict[str, Any]]:
    server = Server(args.url, args.api_key)
    model = args.model or msgspec.json.decode(await server.get("/v1/models"))["data"][0]["id"]
    load = Load(server, model, chat=args.chat)
    shape = Shape(
        args.requests,
        args.prompt_tokens,
        args.output_tokens,
        args.prefix_tokens,
        args.groups,
        args.turns,
        args.max_tokens,
        args.seed,
    )
    for number in range(args.warmup):
        await load.ask(f"warm up {number}", 4)
    results = []
    for round_number, concurrency in enumerate(args.concurrency):
        shape.seed = args.seed + round_number  # new prompts each time, so that no prefix cache helps
        pace = Pace(args.request_rate, concurrency, args.burstiness, args.seed)
        asks = asks_of(args.workload, shape)
        samples, seconds = await load.run(asks, pace, _ticker(len(asks)))
        about = {
            "url": args.url,
            "model": model,
            "workload": args.workload,
            "concurrency": concurrency,
            "rate": str(args.request_rate),
        }
        results.append(about | figures(samples, seconds, bounds))
    return results


def _ticker(total: int) -> Any:
    """Counts finished requests on a terminal. Shows nothing if there is no terminal."""
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done}/{total}", end="" if done < total else "\n", file=sys.stderr, flush=True)

    return tick


def _bounds(texts: list[str]) -> dict[str, float]:
    bounds = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in _BOUNDS or not value.replace(".", "", 1).isdigit():
            raise BadConfig(f"{text!r} is no bound.", "write e.g. --goodput ttft:500 tpot:50")
        bounds[name] = float(value) / 1e3
    return bounds


def figures(samples: list[Sample], seconds: float, bounds: dict[str, float]) -> dict[str, Any]:
    """The figures of a run. Goodput counts only the requests that met every bound."""
    good = [sample for sample in samples if sample.error is None]
    kept = [s for s in good if all(getattr(s, _BOUNDS[name]) <= bound for name, bound in bounds.items())]
    errors = sorted({sample.error for sample in samples if sample.error})
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": errors[:5],
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": sum(s.output_tokens for s in good) / seconds,
        "total_tokens_per_second": sum(s.output_tokens + s.prompt_tokens for s in good) / seconds,
        "goodput": len(kept) / seconds if bounds else None,
        "good_share": len(kept) / max(len(samples), 1) if bounds else None,
        "ttft_ms": _percentiles([s.first for s in good]),
        "tpot_ms": _percentiles([s.per_token for s in good if s.output_tokens > 1]),
        "itl_ms": _percentiles([gap for s in good for gap in s.gaps]),
        "e2e_ms": _percentiles([s.whole for s in good]),
        "samples": [[s.begun, s.first, s.whole, s.prompt_tokens, s.output_tokens] for s in good],
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ranked = sorted(values)
    found = {f"p{p}": 1e3 * ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in PERCENTILES}
    return {"mean": 1e3 * statistics.fmean(ranked), **found}


_ROWS = (
    ("requests", "requests"),
    ("failed", "failed"),
    ("seconds", "seconds"),
    ("requests/s", "requests_per_second"),
    ("output tokens/s", "output_tokens_per_second"),
    ("all tokens/s", "total_tokens_per_second"),
    ("good requests/s", "goodput"),
)


def _table(results: list[dict[str, Any]]) -> Table:
    first = results[0]
    table = Table(title=f"{first['model']} at {first['url']}, {first['workload']}")
    table.add_column("")
    for result in results:
        table.add_column(_paced(result), justify="right")
    for name, key in _ROWS:
        if any(result[key] is not None for result in results):
            table.add_row(name, *(_shown(result[key]) for result in results))
    for name in ("ttft", "tpot", "itl", "e2e"):
        for percentile in ("p50", "p90", "p99"):
            table.add_row(f"{name.upper()} {percentile}, ms", *(_shown(r[f"{name}_ms"].get(percentile)) for r in results))
    for result in results:
        for error in result["errors"]:
            table.add_row("error", error[:80])
    return table


def _paced(result: dict[str, Any]) -> str:
    """Describes in words how requests were sent."""
    places, rate = result["concurrency"], float(result["rate"])
    if rate == float("inf"):
        return f"{places or 'all'} at once"
    return f"{rate:g} per second" + (f", at most {places}" if places else "")


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _plot(results: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Plots the distributions of time to first token and time per token, one line per run."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise BadConfig("--plot needs matplotlib.", "pip install matplotlib") from None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for result in results:
        label = _paced(result)
        firsts = sorted(1e3 * sample[1] for sample in result["samples"])
        pers = sorted(1e3 * (sample[2] - sample[1]) / max(sample[4] - 1, 1) for sample in result["samples"])
        for axis, values in zip(axes, (firsts, pers), strict=True):
            axis.plot(values, [(i + 1) / len(values) for i in range(len(values))], label=label)
    for axis, title in zip(axes, ("time to first token, ms", "time per output token, ms"), strict=True):
        axis.set(xlabel=title, ylabel="share of requests", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
