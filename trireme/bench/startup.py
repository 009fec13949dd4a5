"""From the command line to the first token, phase by phase, each start in a process of its own; and the memory it took."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from trireme.cli.fetch import fetched
from trireme.cli.flags import add_settings, config_from

_CHILD = """
import resource, sys, time
begun = time.monotonic()
from trireme.cli.startup import uncollected
with uncollected():
    import torch
    arrived = time.monotonic()
    from trireme.llm import LLM
    from trireme.types import SamplingParams
    imported = time.monotonic()
    llm = LLM(sys.argv[1], backend=sys.argv[2], quantize=sys.argv[3])
    loaded = time.monotonic()
next(iter(llm.stream([1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))))
print(arrived - begun, imported - arrived, loaded - imported, time.monotonic() - loaded)
llm.close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
NAMES = ("import of torch, s", "other imports, s", "load, s", "first token, s", "peak memory, MiB", "whole process, s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=3)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    config = fetched(config_from(args))
    command = [sys.executable, "-c", _CHILD, config.model.model, config.device.backend, config.model.quantize]
    rows = []
    for _ in range(args.repeat):
        begun = time.monotonic()
        child = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append([float(part) for part in child.stdout.split()] + [time.monotonic() - begun])
    for name, values in zip(NAMES, zip(*rows, strict=True), strict=True):
        print(f"{name:<20} {statistics.median(values):.2f}")
    return 0
