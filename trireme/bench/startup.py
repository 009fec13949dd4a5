"""From the command line to the first token, phase by phase, each start in a process of its own; and the memory it took."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from trireme.command.fetch import fetched
from trireme.command.flags import config_from

_CHILD = """
import resource, sys, time
marks = [time.monotonic()]
from trireme.command.startup import uncollected
from trireme.config import resolve
with uncollected():
    from trireme.command.early import import_torch, read_model, torch_libraries_loading
    config = resolve({"model": sys.argv[1], "backend": sys.argv[2], "quantize": sys.argv[3]})
    marks.append(time.monotonic())
    with torch_libraries_loading():
        kept, tokenizer = read_model(config)
    marks.append(time.monotonic())
    import_torch()
    marks.append(time.monotonic())
    from trireme.llm import LLM
    from trireme.types import SamplingParams
    marks.append(time.monotonic())
    llm = LLM(config=config, tokenizer=tokenizer)
    marks.append(time.monotonic())
next(iter(llm.stream([1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0))))
marks.append(time.monotonic())
llm.close()
print(*(after - before for before, after in zip(marks, marks[1:])), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
NAMES = (
    "imports before torch, s",
    "model file beside torch's libraries, s",
    "rest of torch's import, s",
    "imports after torch, s",
    "load, s",
    "first token, s",
    "peak memory, MiB",
    "whole process, s",
)


def run(args: argparse.Namespace) -> int:
    config = fetched(config_from(args))
    command = [sys.executable, "-c", _CHILD, config.model.model, config.device.backend, config.model.quantize]
    rows = []
    for _ in range(args.repeat):
        begun = time.monotonic()
        child = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append([float(part) for part in child.stdout.split()] + [time.monotonic() - begun])
    for name, values in zip(NAMES, zip(*rows, strict=True), strict=True):
        print(f"{name:<38} {statistics.median(values):.2f}")
    return 0
