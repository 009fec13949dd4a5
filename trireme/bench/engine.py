"""The engine measured offline: latency of one stream, throughput of many requests. Prints a table; --json keeps the figures."""

from __future__ import annotations

import argparse
import pathlib
import random
import statistics
import time
from typing import Any

import msgspec

from trireme.command.fetch import fetched
from trireme.command.flags import config_from
from trireme.command.startup import phases
from trireme.llm import LLM
from trireme.sched.traces import trace_by_name
from trireme.types import SamplingParams

# A step's time is the difference of two runs, which may come out as zero or negative.
_TOO_SHORT = "too short to tell. Fix: more --output-tokens, or a larger --repeat"


def run(args: argparse.Namespace) -> int:
    config = fetched(config_from(args))
    with phases() as report, LLM(config=config, report=report) as llm:
        figures = latency(llm, args) if args.kind == "latency" else throughput(llm, args)
        ready = llm.worker.ready
        figures = {"backend": ready.backend, "dtype": ready.dtype, "quantize": config.model.quantize, **figures}
    for name, value in figures.items():
        print(f"{name:<24} {value:.2f}" if isinstance(value, float) else f"{name:<24} {value}")
    if args.json:
        pathlib.Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1))
    return 0


def latency(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over repeats for `batch` requests together: the time to the first token, and the time per later token."""
    firsts, pers = [], []
    draw = Prompts(llm.worker.ready.vocab_size)
    measure(llm, [draw(args.prompt_tokens)] * 1, 8)  # warm
    for _ in range(args.repeat):
        prompts = [draw(args.prompt_tokens) for _ in range(args.batch)]
        first, _ = measure(llm, prompts, 1)
        whole, count = measure(llm, [draw(args.prompt_tokens) for _ in range(args.batch)], args.output_tokens)
        firsts.append(first)
        pers.append((whole - first) / max(count / args.batch - 1, 1))
    first, per = statistics.median(firsts), statistics.median(pers)
    steps: dict[str, Any] = {"step, ms": per * 1e3, "output tokens/s": args.batch / per} if per > 0 else {"step, ms": _TOO_SHORT}
    return {
        "prompt tokens": args.prompt_tokens,
        "batch": args.batch,
        "first token, ms": first * 1e3,
        "prompt tokens/s": args.batch * args.prompt_tokens / first,
        **steps,
    }


def throughput(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """All requests at once, greedy, with fixed output lengths. Returns tokens per second over the whole time."""
    lengths = sharegpt(args.requests) if args.sharegpt else [(args.prompt_tokens, args.output_tokens)] * args.requests
    limit = llm.worker.ready.max_model_len
    lengths = [(min(p, limit - 2), min(o, limit - 1 - min(p, limit - 2))) for p, o in lengths]
    draw = Prompts(llm.worker.ready.vocab_size)
    prompts = [draw(p) for p, _ in lengths]
    sampling = [SamplingParams(temperature=0.0, max_tokens=o, ignore_eos=True) for _, o in lengths]
    measure(llm, [draw(16)], 4)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, sampling, progress=True)
    took = time.perf_counter() - begun
    made, read = sum(len(o.token_ids) for o in outputs), sum(p for p, _ in lengths)
    return {"requests": len(prompts), "seconds": took, "output tokens/s": made / took, "all tokens/s": (made + read) / took}


def measure(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, int]:
    """Returns (seconds, generated tokens) for these prompts together."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    return time.perf_counter() - begun, sum(len(o.token_ids) for o in outputs)


class Prompts:
    """Makes random prompts, so that no prefix cache helps."""

    def __init__(self, vocab: int, seed: int = 7):
        self.random, self.vocab = random.Random(seed), vocab

    def __call__(self, length: int) -> list[int]:
        return [self.random.randrange(10, self.vocab - 10) for _ in range(length)]


def sharegpt(count: int, seed: int = 1) -> list[tuple[int, int]]:
    """The (prompt, output) lengths of real conversations."""
    return [(arrival.prompt, arrival.output) for arrival in trace_by_name("sharegpt", count, seed)]
