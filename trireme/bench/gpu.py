"""The engine on one GPU, on the shapes and the trace of the baseline: ours, the peer's, the ratio. Random weights, greedy.

Knows the offline API; nothing of kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from trireme.backends.cuda.device import release
from trireme.bench.choices import BASELINE
from trireme.bench.clocks import Clocks
from trireme.bench.engine import Prompts, measure
from trireme.bench.flags import gpu_flags
from trireme.bench.overhead import Served
from trireme.bench.shapes import trace, write_model
from trireme.config import resolve
from trireme.llm import LLM
from trireme.types import SamplingParams

BATCHES = (1, 8, 32, 128, 256)
PROMPTS = ((8, 2048), (1, 8192), (1, 1024))


def run(args: argparse.Namespace) -> int:
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes.split(","):
            with Clocks() as clocks:
                figures[shape], notes = measure_shape(write_model(shape, pathlib.Path(folder)), args, clocks)
            print_table(shape, figures[shape], notes)
            gc.collect()
            release()
            if args.json:
                args.json.write_text(json.dumps({"ours": figures, "vllm": BASELINE}, indent=1))
    if args.plot:
        plot(figures, args.plot)
    return 0


def measure_shape(path: pathlib.Path, args: argparse.Namespace, clocks: Clocks) -> tuple[dict[str, float], dict[str, str]]:
    """Every figure of one model, and the GPU's clock during the measurement."""
    figures: dict[str, float] = {}
    notes: dict[str, str] = {}

    def note(name: str, measured: Callable[[], float]) -> None:
        begun = time.perf_counter()
        figures[name], notes[name] = measured(), clocks.since(begun)

    begun = time.perf_counter()
    settings: dict[str, Any] = {"backend": args.backend, "dtype": "bfloat16", "random_weights": True, "prefix_cache": False}
    settings |= {"max_model_len": 16384, "max_step_tokens": args.max_step_tokens, "max_running": args.max_running}
    with LLM(str(path), **settings) as llm:
        draw = Prompts(llm.worker.ready.vocab_size)
        measure(llm, [draw(128)], 2)
        figures["start, s"] = time.perf_counter() - begun
        if "step" in args.only:
            for batch in BATCHES:
                note(f"step x{batch}, ms", partial(step_time, llm, draw, batch, 256 if batch == 1 else 128))
        if "prefill" in args.only:
            for count, length in PROMPTS:
                note(f"prefill {count}x{length}, tok/s", partial(prompt_rate, llm, draw, count, length))
        if "first" in args.only:
            figures["first token 1x128, ms"] = first_time(llm, draw, 1, 128) * 1e3
        if "trace" in args.only:
            note("trace, output tok/s", partial(trace_rate, llm, draw, args.requests))
        ready, device = llm.worker.ready, getattr(llm.worker, "backend", None)
        if device is not None and device.held_bytes():
            figures["workspace and graphs, GiB"] = (device.held_bytes() - ready.weight_bytes - ready.kv_bytes) / 2**30
    if "http" in args.only:
        del llm, device
        gc.collect()
        release()  # the server needs the memory
        figures["trace over HTTP, output tok/s"] = served_rate(path, settings, args)
    return figures, notes


def step_time(llm: LLM, draw: Prompts, batch: int, outputs: int) -> float:
    """The milliseconds of one decode step: the time after the first token, divided by the number of steps."""
    measure(llm, [draw(128) for _ in range(batch)], 8)
    times = []
    for _ in range(3):
        first, _ = measure(llm, [draw(128) for _ in range(batch)], 1)
        whole, _ = measure(llm, [draw(128) for _ in range(batch)], outputs)
        times.append((whole - first) / (outputs - 1) * 1e3)
    return statistics.median(times)


def first_time(llm: LLM, draw: Prompts, count: int, length: int) -> float:
    """The seconds until every prompt has its first token."""
    return statistics.median(measure(llm, [draw(length) for _ in range(count)], 1)[0] for _ in range(6))


def prompt_rate(llm: LLM, draw: Prompts, count: int, length: int) -> float:
    """The prompt tokens per second until every prompt has its first token."""
    return count * length / first_time(llm, draw, count, length)


def trace_rate(llm: LLM, draw: Prompts, requests: int) -> float:
    """Output tokens per second over a trace whose requests all come at once. The second of two runs counts, as its graphs exist."""
    lengths = trace(requests)
    rate = 0.0
    for _ in range(2):
        prompts = [draw(prompt) for prompt, _ in lengths]
        sampling = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in lengths]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, sampling)
        rate = sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - begun)
    return rate


def served_rate(path: pathlib.Path, settings: dict[str, Any], args: argparse.Namespace) -> float:
    """The same trace through a server's processes, with streams. The second of two runs counts."""
    lengths = trace(args.requests)
    sampling = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in lengths]
    draw = Prompts(json.loads((path / "config.json").read_text())["vocab_size"])
    config, rate = resolve({"model": str(path), **settings}, environ={}), 0.0
    with Served(config, str(path.parent), "--http-workers", str(args.http_workers)) as server:
        for _ in range(2):
            rate = server.ask([draw(prompt) for prompt, _ in lengths], sampling).tokens_per_second
    return rate


def print_table(shape: str, figures: dict[str, float], notes: dict[str, str]) -> None:
    print(f"{shape:<26} {'trireme':>10} {'vllm':>10} {'ratio':>7}")
    for name, value in figures.items():
        peer = BASELINE.get(shape, {}).get(name)
        beside = f" {peer:>10,.2f} {gain(name, value, peer):>6.2f}x" if peer else " " * 19
        print(f"  {name:<24} {value:>10,.2f}{beside}  {notes.get(name, '')}".rstrip(), flush=True)


def gain(name: str, ours: float, peer: float) -> float:
    """How many times better than the peer the figure is."""
    return ours / peer if name.endswith("tok/s") else peer / ours


def plot(figures: dict[str, dict[str, float]], path: pathlib.Path) -> None:
    """A bar chart: how many times better than the baseline, by figure and shape."""
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(11, 5))
    names = [name for name in BASELINE["llama8b"] if any(name in f for f in figures.values())]
    for i, (shape, found) in enumerate(figures.items()):
        gains = [gain(n, found[n], BASELINE[shape][n]) if n in found and shape in BASELINE else 0.0 for n in names]
        axes.bar([j + (i - 1) * 0.27 for j in range(len(names))], gains, 0.27, label=shape)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("times better than vLLM 0.26")
    axes.legend()
    chart.tight_layout()
    chart.savefig(path, dpi=120)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    gpu_flags(_parser)
    raise SystemExit(run(_parser.parse_args()))
