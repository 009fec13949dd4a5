"""Traces of requests for the simulator: built in, drawn, or read from a file. Knows lengths, priorities and times; no scheduler."""

from __future__ import annotations

import csv
import importlib.resources
import math
import pathlib
from dataclasses import dataclass

import numpy as np

from trireme.errors import BadConfig


@dataclass(frozen=True)
class Arrival:
    """One request of a trace."""

    prompt: int
    output: int
    priority: int = 0
    at: float | None = None  # seconds after the first request; None: the trace says nothing


MOST_TOKENS = 1 << 24  # of one request in a file
_NUMBERS = {"prompt_tokens": 1, "output_tokens": 1, "priority": None}  # column -> the least value
COLUMNS = "prompt_tokens,output_tokens and, if you like, priority and arrival_seconds"


def sharegpt_lengths() -> list[Arrival]:
    """The lengths of the first turns of 4,000 real conversations."""
    text = importlib.resources.files("trireme.sched").joinpath("data/sharegpt_lengths.csv").read_text()
    return [Arrival(int(line["prompt_tokens"]), int(line["output_tokens"])) for line in csv.DictReader(text.splitlines())]


# Synthetic traces: the smallest and largest lengths of prompt and output, drawn uniformly.
SHAPES = {
    "uniform": (32, 1024, 32, 1024),
    "decode_heavy": (32, 512, 512, 2048),
    "prompt_heavy": (1024, 4096, 32, 512),
}


def trace_by_name(name: str, count: int, seed: int) -> list[Arrival]:
    """`count` requests of the named trace."""
    rng = np.random.default_rng(seed)
    if name == "sharegpt":
        lengths = sharegpt_lengths()
        return [lengths[index] for index in rng.permutation(max(count, len(lengths)))[:count] % len(lengths)]
    if name not in SHAPES:
        raise BadConfig(f"No trace is called {name!r}.", f"use one of: sharegpt, {', '.join(SHAPES)}, or a file such as trace.csv")
    low_prompt, high_prompt, low_output, high_output = SHAPES[name]
    prompts = rng.integers(low_prompt, high_prompt, count, endpoint=True).tolist()
    outputs = rng.integers(low_output, high_output, count, endpoint=True).tolist()
    return [Arrival(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def trace_of_file(path: pathlib.Path) -> list[Arrival]:
    """The requests of a CSV file, one a line, in the order of their arrival."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = {"prompt_tokens", "output_tokens"} - set(reader.fieldnames or ())
            if missing:
                raise BadConfig(f"{path} has no column {min(missing)}.", f"begin it with a line of names: {COLUMNS}")
            found = [_arrival(path, reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadConfig(f"Cannot read {path}: {error}.", "give a CSV file") from None
    if not found:
        raise BadConfig(f"{path} has no requests.", "write one a line")
    if len({arrival.at is None for arrival in found}) > 1:
        raise BadConfig(f"{path} gives arrival_seconds for some requests only.", "give it for all or for none")
    return sorted(found, key=lambda arrival: arrival.at or 0.0)


def _arrival(path: pathlib.Path, number: int, line: dict[str, str | None]) -> Arrival:
    at = (line.get("arrival_seconds") or "").strip()
    try:
        counts = {name: int((line.get(name) or "").strip() or (0 if least is None else "?")) for name, least in _NUMBERS.items()}
        when = float(at) if at else None
    except ValueError:
        raise BadConfig(f"{path}, line {number}: a value is not a number.", f"the columns are {COLUMNS}") from None
    for name, least in _NUMBERS.items():
        if least is not None and not least <= counts[name] <= MOST_TOKENS:
            raise BadConfig(f"{path}, line {number}: {name} is {counts[name]}.", f"give a number from {least} to {MOST_TOKENS}")
    if when is not None and not (math.isfinite(when) and when >= 0):
        raise BadConfig(f"{path}, line {number}: arrival_seconds is {at}.", "give seconds from the first request on, 0 or more")
    return Arrival(counts["prompt_tokens"], counts["output_tokens"], counts["priority"], when)
