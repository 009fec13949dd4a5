"""The engine's own kernels on a GPU: checked against the op table's plain bodies, then timed in graphs, several cuts of each.

Knows cases; nothing of engines. `python -m trireme.bench.llm_kernels --out DIR [--only attention,decode,...]`
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from trireme.bench import llm_cases, llm_quantized
from trireme.bench.llm_cases import Case

CONCURRENT = 12  # processes that compile ahead of the measurement
KNOWN = llm_cases.GROUPS | llm_quantized.GROUPS  # the groups of cases by name


def device_time(call: Callable[[int], object], calls: int) -> float:
    """Microseconds of one call inside a graph of `calls` of them: the median of seven replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        times = []
        for _ in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[1:])


def error(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖, NaN where anything is not a number."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def measure(case: Case) -> dict[str, object]:
    """Checks and times every variant. For one that cannot run, prints the reason."""
    expected = case.reference() if case.reference else None
    found: dict[str, object] = {"extra": case.extra, "bytes": case.num_bytes, "flops": case.flops}
    times: dict[str, float] = {}
    notes: dict[str, str] = {}
    for label, call in case.variants.items():
        try:
            out = call(0)
            if expected is not None and out is not None and not label.startswith("("):
                wrong = error(out, expected)
                if not wrong <= case.tolerance:
                    notes[label] = f"WRONG by {wrong:.2g}"
            times[label] = device_time(call, case.calls)
        except Exception as problem:
            notes[label] = str(problem).splitlines()[0][:80] if str(problem) else type(problem).__name__
    return found | {"us": times, "notes": notes}


def line(name: str, result: dict, case: Case) -> str:
    times: dict[str, float] = result["us"]
    rivals = {label: t for label, t in times.items() if label.startswith(("(", "torch"))}
    ranked = sorted(
        (t, label) for label, t in times.items() if label not in rivals and "WRONG" not in result["notes"].get(label, "")
    )
    text = f"{name:34}"
    if ranked:
        rate = f" {case.num_bytes / ranked[0][0] / 1e3:5.0f}GB/s" if case.num_bytes else ""
        rate += f" {case.flops / ranked[0][0] / 1e6:4.0f}TF" if case.flops else ""
        text += f"{ranked[0][0]:8.1f}us{rate} | " + " ".join(f"{label}={t:.1f}" for t, label in ranked[:5])
    text += " | " + " ".join(f"{label}={t:.1f}" for label, t in rivals.items())
    if result["extra"]:
        text += f" {list(result['extra'].values())}"
    if result["notes"]:
        text += " !! " + "; ".join(f"{label}: {note}" for label, note in list(result["notes"].items())[:2])
    return text


def compile_ahead(groups: list[str], part: int, parts: int) -> None:
    """Runs every variant once, so that Triton's cache on disk holds it; one of several processes."""
    index = 0
    for group in groups:
        for case in KNOWN[group]():
            for call in case.variants.values():
                index += 1
                if index % parts == part:
                    try:
                        call(0)
                    except Exception:  # the process that times it will report the error
                        continue
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default=",".join(KNOWN))
    args = parser.parse_args()
    groups = args.only.split(",")
    context = multiprocessing.get_context("spawn")
    ahead = [context.Process(target=compile_ahead, args=(groups, i, CONCURRENT)) for i in range(CONCURRENT)]
    for process in ahead:
        process.start()
    for process in ahead:
        process.join(180)
    results: dict[str, dict] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    for group in groups:
        print(f"--- {group}", flush=True)
        for case in KNOWN[group]():
            result = measure(case)
            results.setdefault(group, {})[case.name] = result
            print(line(case.name, result, case), flush=True)
            (args.out / "llm_kernels.json").write_text(json.dumps(results, indent=1))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
