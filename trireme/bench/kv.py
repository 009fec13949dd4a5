"""Attention of a decode step by kind of KV: how long one layer takes whose rows see a long context, and how far it is from plain.

Knows backends, their ops and shapes; nothing of models.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor

from trireme import host
from trireme.backends import Backend, open_backend
from trireme.config import DeviceOptions
from trireme.errors import BadConfig, OutOfMemory
from trireme.ops import AttentionKind, CacheSpec, KVCache, StepLayout

CHUNK = 4096  # tokens that are kept at once while the cache is filled
WARM_CALLS = 3
SAMPLE_SECONDS = 0.02  # how long a sample is at least
GRAPH_CALLS = 10  # calls in a captured graph, where the device has them: launching is not measured then


class Figure(msgspec.Struct):
    """What one kind took."""

    kind: str
    ms: float
    ratio: float  # to the time of the first kind
    mib: float  # keys and values that a call reads
    gb_per_second: float
    apart: float  # how far the output is from that of the first kind, of its length


def run(args: argparse.Namespace) -> int:
    threads = args.threads or host.cores()
    torch.set_num_threads(threads)
    backend = open_backend(DeviceOptions(backend=args.backend, threads=threads))
    with torch.inference_mode():
        figures = measure(backend, args)
    first = figures[0].kind
    print(
        f"{backend.name}: {args.rows} rows of {args.tokens:,} tokens, {args.heads} heads of {args.head_dim}, {args.kv_heads} of KV"
    )
    print(f"{'KV':<8}{'ms':>9}{f'speed, to {first}':>18}{'MiB read':>10}{'GB/s':>8}{f'apart from {first}':>20}")
    for f in figures:
        print(f"{f.kind:<8}{f.ms:>9.3f}{f'{f.ratio:.2f} x':>18}{f.mib:>10.0f}{f.gb_per_second:>8.1f}{f.apart:>20.2%}")
    if args.json:
        pathlib.Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    return 0


def measure(backend: Backend, args: argparse.Namespace) -> list[Figure]:
    """The kinds in turn, the one that the others are compared with first."""
    for name in ("rows", "tokens", "heads", "kv_heads", "head_dim", "page_size", "repeat"):
        if getattr(args, name) < 1:
            raise BadConfig(f"--{name.replace('_', '-')} is {getattr(args, name)}.", "use a number above 0")
    if args.heads % args.kv_heads:
        raise BadConfig(f"{args.heads} heads cannot share {args.kv_heads} heads of KV.", "use a --kv-heads that divides --heads")
    unknown = [kind for kind in args.kinds if kind not in backend.kv_kinds]
    if unknown:
        raise BadConfig(f"The backend {backend.name} keeps no {unknown[0]} KV.", f"use --kinds {' '.join(backend.kv_kinds)}")
    dtype = backend.dtype(args.dtype, torch.bfloat16)
    figures: list[Figure] = []
    wanted: Tensor | None = None
    for kind in args.kinds:
        seconds, out, num_bytes = _one(backend, args, kind, dtype)
        wanted = out if wanted is None else wanted
        first = figures[0].ms if figures else seconds * 1e3
        apart = float((out - wanted).norm() / wanted.norm())
        figures.append(Figure(kind, seconds * 1e3, first / (seconds * 1e3), num_bytes / 2**20, num_bytes / seconds / 1e9, apart))
        print(f"{kind}: {seconds * 1e3:.3f} ms", file=sys.stderr, flush=True)
    return figures


def _one(backend: Backend, args: argparse.Namespace, kind: str, dtype: torch.dtype) -> tuple[float, Tensor, int]:
    """(seconds of a call, its output in float32, bytes of keys and values that it reads)"""
    spec = CacheSpec((args.kv_heads, args.head_dim), (args.kv_heads, args.head_dim)).as_kind(kind)
    layout, num_slots = _layout(backend, args)
    needed, free = num_slots * spec.bytes_per_token(dtype), backend.memory()[0]
    if needed > 0.9 * free:
        raise OutOfMemory(
            f"KV of kind {kind} needs {needed / 2**20:.0f} MiB; {free / 2**20:.0f} MiB are free.", "use fewer --tokens"
        )
    cache = backend.cache(spec, num_slots, dtype)
    _fill(backend, cache, num_slots, dtype)
    generator = torch.Generator(backend.device).manual_seed(1)
    query = torch.randn(args.rows, args.heads, args.head_dim, generator=generator, device=backend.device).to(dtype)
    plan, attends = backend.ops.plan_attention(layout), AttentionKind(scale=args.head_dim**-0.5)

    def call() -> Tensor:
        return backend.ops.attention(query, cache, plan, attends)

    out = call().float()
    return _seconds(backend, call, args.repeat), out, args.rows * args.tokens * spec.bytes_per_token(dtype)


def _layout(backend: Backend, args: argparse.Namespace) -> tuple[StepLayout, int]:
    """A step with one new token for each row, whose pages lie scattered; and how many slots there are."""
    pages = -(-args.tokens // args.page_size)
    table = np.random.default_rng(1).permutation(args.rows * pages).astype(np.int32).reshape(args.rows, pages)
    rows = np.arange(args.rows, dtype=np.int32)
    starts, counts = np.full(args.rows, args.tokens - 1, np.int32), np.ones(args.rows, np.int32)
    columns = table, rows, np.arange(args.rows + 1, dtype=np.int32), starts + counts
    on_device, rows_there, begins, lengths = (torch.from_numpy(x).to(backend.device) for x in columns)
    layout = StepLayout(args.page_size, rows, starts, counts, on_device, rows_there, begins, lengths)
    return layout, table.size * args.page_size


def _fill(backend: Backend, cache: KVCache, num_slots: int, dtype: torch.dtype) -> None:
    """Random keys and values, the same for every kind."""
    generator, (heads, width) = torch.Generator(backend.device).manual_seed(2), (cache.k.shape[1], cache.value_dim)
    for first in range(0, num_slots, CHUNK):
        slots = torch.arange(first, min(first + CHUNK, num_slots), dtype=torch.int32, device=backend.device)
        k, v = (torch.randn(len(slots), heads, width, generator=generator, device=backend.device).to(dtype) for _ in "kv")
        backend.ops.store_kv(k, v, cache, slots)


def _seconds(backend: Backend, call: Callable[[], object], repeat: int) -> float:
    """The median time of a call on the device."""
    for _ in range(WARM_CALLS):
        call()
    graph = backend.graph(lambda: [call() for _ in range(GRAPH_CALLS)]) if backend.device.type != "cpu" else None
    calls, step = (GRAPH_CALLS, graph) if graph else (1, call)
    times = max(1, int(SAMPLE_SECONDS / max(_sample(backend, step, 1), 1e-6)))
    return statistics.median(_sample(backend, step, times) for _ in range(repeat)) / (calls * times)


def _sample(backend: Backend, step: Callable[[], object], times: int) -> float:
    """The seconds that the device takes for so many steps."""
    stop = backend.stopwatch()
    for _ in range(times):
        step()
    told = stop()
    backend.mark()()
    return told()
