"""Where a step's time goes on a GPU: kernels by time, how busy the device is, and the bytes the weights alone must move.

Knows the offline API and torch's profiler; nothing of kernels. `python -m trireme.bench.steps --shapes llama8b`
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile

from trireme.backends.cuda.device import release
from trireme.bench.choices import LOADS
from trireme.bench.engine import Prompts, measure
from trireme.bench.flags import steps_flags
from trireme.bench.shapes import write_model
from trireme.llm import LLM
from trireme.worker.worker import LocalWorker


def account(llm: LLM, draw: Prompts, requests: int, prompt: int, outputs: int) -> dict[str, object]:
    """The kernel time by name over one run, and the duration of the run with and without the profiler."""
    for _ in range(3):
        measure(llm, [draw(prompt) for _ in range(requests)], outputs)
    prompts = [draw(prompt) for _ in range(requests)]
    assert isinstance(llm.worker, LocalWorker)
    with waits(llm.worker.runner) as waited:
        begun = time.perf_counter()
        measure(llm, prompts, outputs)
        wall = time.perf_counter() - begun
    prompts = [draw(prompt) for _ in range(requests)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        measure(llm, prompts, outputs)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            name = re.sub(r"<.*|\(.*", "", event.name)[:48]
            spent[name] += event.time_range.elapsed_us()
            calls[name] += 1
            spans.append((event.time_range.start, event.time_range.end))
    first, last = min(s for s, _ in spans), max(e for _, e in spans)
    middle = (first + last) / 2
    return {
        "wall, us": wall * 1e6,
        "span, us": last - first,
        "busy, us": _union(spans),
        "waits, us": [round(seconds * 1e6, 1) for seconds in waited],
        "late busy share": _union([(max(s, middle), e) for s, e in spans if e > middle]) / (last - middle),
        "kernels": [(name, round(us, 1), calls[name]) for name, us in spent.most_common(24)],
    }


@contextmanager
def waits(runner: Any) -> Iterator[list[float]]:
    """The seconds for which the engine waits for each step's answer. Where it never waits, the device waits for the host."""
    waited, collect = list[float](), runner.collect

    def timed() -> Any:
        begun = time.perf_counter()
        answer = collect()
        waited.append(time.perf_counter() - begun)
        return answer

    runner.collect = timed
    try:
        yield waited
    finally:
        del runner.collect


def _union(spans: list[tuple[float, float]]) -> float:
    """The time during which at least one kernel ran."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return busy


def run(args: argparse.Namespace) -> int:
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes.split(","):
            found |= one_shape(write_model(shape, pathlib.Path(folder)), args)
            gc.collect()
            release()
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    return 0


def one_shape(path: pathlib.Path, args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The account of every load on one model."""
    found: dict[str, dict[str, object]] = {}
    settings: dict[str, Any] = {"backend": "cuda", "dtype": "bfloat16", "random_weights": True, "prefix_cache": False}
    with LLM(str(path), **settings, max_model_len=16384, max_step_tokens=args.max_step_tokens) as llm:
        draw = Prompts(llm.worker.ready.vocab_size)
        for name in args.loads.split(","):
            found[f"{path.name} {name}"] = account(llm, draw, *LOADS[name])
            show(f"{path.name} {name}", found[f"{path.name} {name}"], LOADS[name][2], args.top)
    return found


def show(name: str, result: dict, steps: int, top: int) -> None:
    wall, span, busy = (result[key] / steps for key in ("wall, us", "span, us", "busy, us"))
    late = f"{result['late busy share']:.1%} of the second half"  # where a load has both, that is answers alone
    print(f"{name}: per step {wall:.0f} us wall, {span:.0f} from first to last kernel, {busy:.0f} busy; {late}", flush=True)
    waited = sorted(result["waits, us"][len(result["waits, us"]) // 2 :])
    print(f"    the host waits {statistics.median(waited):.0f} us for a step of the second half, {waited[0]:.0f} at least")
    for kernel, us, calls in result["kernels"][:top]:
        print(f"    {us / steps:9.1f} us  {calls / steps:6.1f} x {us / calls:7.2f}  {kernel}")


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    steps_flags(_parser)
    raise SystemExit(run(_parser.parse_args()))
