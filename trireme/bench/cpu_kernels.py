"""Micro-benchmark of the CPU kernels: GB/s for one row, GOP/s for many, beside torch and the memory's read speed.

Knows shapes only, unless a model is named to see what Python takes of its step. Figures of a busy machine mean little: read the
ratios of one run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from trireme.backends.cpu.library import isa, library, set_isa, set_threads
from trireme.backends.cpu.methods import Packed
from trireme.backends.cpu.program import Program, Sequences
from trireme.backends.cpu.weights import PackedWeight
from trireme.blocks import BLOCKS
from trireme.hub.schemes import join
from trireme.hub.weights import Weight
from trireme.llm import LLM
from trireme.ops import KVCache
from trireme.types import SamplingParams

SHAPES = ((960, 576), (3072, 576), (576, 1536), (8192, 2048))  # out × in: layers of SmolLM2-135M, and a larger one
KINDS = ("f32", "bf16", "f16", "q8", "q4", "q4_min", "nf4", "q4_k", "q6_k")
SUPER_BLOCKS = {"q4_k": ("Q4_K", 144), "q6_k": ("Q6_K", 210)}  # bytes of 256 weights; these kinds can be read but not made
FORMATS = {"GPTQ": "Q4_0", "AWQ": "Q4_K", "int8 by row": "Q8_0"}  # published forms, and the GGUF type of as many bits
FORMATS_SHAPE = (14336, 4096)
TURNS = 100
COLD_BYTES = 400 << 20  # copies of one weight are read in turn over this much memory, so that caches do not help


def best_seconds(call: Callable[[], object], budget: float = 0.25) -> float:
    """The time of the fastest call among those that fit in `budget` seconds; at least three calls are made."""
    best, end, count = float("inf"), time.perf_counter() + budget, 0
    while count < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def read_speed() -> float:
    """The speed of reading memory once, in GB/s, measured with torch's sum."""
    data = torch.ones(COLD_BYTES // 4)
    return data.nbytes / best_seconds(data.sum, 1.0) / 1e9


def drawn(kind: str, rows: int, columns: int) -> PackedWeight:
    """Random weights of a kind. The number of columns is rounded up to what the kind needs."""
    if kind not in SUPER_BLOCKS:
        return PackedWeight.from_floats(kind, torch.randn(rows, columns))
    name, size = SUPER_BLOCKS[kind]
    # The bytes are small and finite when read as halves.
    blocks = torch.randint(0, 60, (rows, -(-columns // 256) * size), dtype=torch.uint8)
    return PackedWeight.from_gguf(name, blocks, -(-columns // 256) * 256)


def one_row(kind: str, rows: int, columns: int) -> float:
    """The GB/s of weights read for one activation row, with cold caches."""
    weight = drawn(kind, rows, columns)
    copies = max(2, COLD_BYTES // weight.nbytes)
    program, source, output = Program(), torch.randn(1, weight.columns), torch.empty(1, rows)
    for _ in range(copies):
        program.linear(PackedWeight(kind, rows, weight.columns, weight.data.clone()), source, output)
    return copies * weight.nbytes / best_seconds(program.run, 0.5) / 1e9


def many_rows(kind: str, rows: int, columns: int, tokens: int) -> float:
    """The GOP/s for `tokens` activation rows, including the time to quantise them."""
    weight = drawn(kind, rows, columns)
    program, source, output = Program(), torch.randn(tokens, weight.columns), torch.empty(tokens, rows)
    program.linear(weight, source, output)
    return 2 * rows * weight.columns * tokens / best_seconds(program.run) / 1e9


def torch_many_rows(dtype: torch.dtype, rows: int, columns: int, tokens: int) -> float:
    weight, source = torch.randn(rows, columns, dtype=dtype), torch.randn(tokens, columns, dtype=dtype)
    return 2 * rows * columns * tokens / best_seconds(lambda: torch.nn.functional.linear(source, weight)) / 1e9


def attention_speed(tokens: int, context: int) -> tuple[float, float]:
    """The milliseconds and GFLOP/s of one sequence's last `tokens` queries: 9 query heads on 3 KV heads, as in SmolLM2."""
    heads, kv_heads, width = 9, 3, 64
    keys, values = torch.randn(context, kv_heads, width), torch.randn(context, kv_heads, width)
    query, output = torch.randn(tokens, heads, width), torch.empty(tokens, heads, width)
    program = Program()
    numbers = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    pages = torch.arange(context, dtype=torch.int32)[None]
    sequences = Sequences(numbers(0, tokens), numbers(context), pages, numbers(0), 1)
    program.attention(query, output.view(tokens, -1), KVCache(keys, values), sequences, 0.125)
    seconds = best_seconds(program.run)
    pairs = tokens * (context - tokens) + tokens * (tokens + 1) // 2
    return seconds * 1e3, 4 * pairs * heads * width / seconds / 1e9


def published(name: str, rows: int, columns: int) -> PackedWeight:
    """A random matrix of a format of FORMATS, packed as loading a model packs it."""
    draw = np.random.default_rng(0)
    scale = draw.uniform(0.002, 0.03, (columns // 128, rows)).astype(np.float16)
    tensors = {".scales": Weight("m.scales", "F16", scale)}
    if name == "GPTQ":
        tensors[".qweight"] = Weight("m.qweight", "I32", draw.integers(0, 1 << 31, (columns // 8, rows), dtype=np.int32))
    elif name == "AWQ":
        tensors[".qweight"] = Weight("m.qweight", "I32", draw.integers(0, 1 << 31, (columns, rows // 8), dtype=np.int32))
        tensors[".qzeros"] = Weight("m.qzeros", "I32", draw.integers(0, 1 << 31, (columns // 128, rows // 8), dtype=np.int32))
    else:
        tensors = {
            ".weight": Weight("m.weight", "I8", draw.integers(-127, 128, (rows, columns), dtype=np.int8)),
            ".weight_scale": Weight("m.weight_scale", "F32", scale[:1].T.astype(np.float32)),
        }
    (matrix,) = join({f"m{end}": tensor for end, tensor in tensors.items()}, {"bits": 4, "group_size": 128}).values()
    return Packed.load([matrix], None, torch.float32, torch.device("cpu")).weights[0]


def blocks_of_gguf(kind: str, rows: int, columns: int) -> PackedWeight:
    """Random blocks; their bytes are small and finite when read as halves."""
    values, size = BLOCKS[kind]
    blocks = torch.randint(0, 60, (rows, columns // values * size), dtype=torch.uint8)
    return PackedWeight.from_gguf(kind, blocks, columns)


def in_turns(weights: dict[str, PackedWeight], tokens: int, turns: int = TURNS) -> dict[str, float]:
    """The least seconds of each product of `tokens` rows. They are computed in turns, so that a busy hour is shared."""
    programs, kept = {}, []
    for name, weight in weights.items():
        source, output = torch.randn(tokens, weight.columns), torch.empty(tokens, weight.rows)
        programs[name] = Program()
        programs[name].linear(weight, source, output)
        kept.append((source, output))  # a program has only their addresses
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(turns):
        for name, program in programs.items():
            start = time.perf_counter()
            program.run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _formats(tokens: list[int], rows: int, columns: int) -> None:
    """Published formats beside GGUF's types: milliseconds of a product, and the format's over the type's."""
    print(f"{f'{rows}×{columns}':24}{'packed as':>10}" + "".join(f"{f'{n} rows, ms':>24}" for n in tokens))
    for name, kind in FORMATS.items():
        both = {name: published(name, rows, columns), kind: blocks_of_gguf(kind, rows, columns)}
        found = [in_turns(both, n) for n in tokens]
        figures = "".join(f"{f'{t[name] * 1e3:.2f} / {t[kind] * 1e3:.2f} = {t[name] / t[kind]:.2f}':>24}" for t in found)
        print(f"{f'{name} / {kind}':24}{both[name].kind:>10}{figures}", flush=True)


def step_times(model: str, threads: int, tokens: int = 200) -> tuple[float, float]:
    """Returns (whole, outside of the C kernels): the milliseconds of one stream's decode step, without the first token."""
    kernels, inner, spent = library(), library().trireme_run, 0.0

    def timed(steps: int, count: int) -> None:
        nonlocal spent
        begun = time.perf_counter()
        inner(steps, count)
        spent += time.perf_counter() - begun

    vars(kernels)["trireme_run"] = timed  # whatever is recorded from now on finds this one
    try:
        with LLM(model, backend="cpu", threads=threads, prefix_cache=False) as llm:
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
            pieces = llm.stream([1, 2, 3], sampling)
            next(pieces)
            begun, before = time.perf_counter(), spent
            for _ in pieces:
                pass
            whole, inside = time.perf_counter() - begun, spent - before
    finally:
        vars(kernels)["trireme_run"] = inner
    return whole / (tokens - 1) * 1e3, (whole - inside) / (tokens - 1) * 1e3


def run(args: argparse.Namespace) -> int:
    set_isa(args.isa)
    for number in args.threads:
        threads = set_threads(number)
        torch.set_num_threads(threads)
        if args.step_of:
            whole, outside = step_times(args.step_of, threads)
            print(
                f"{isa()}, {threads} threads: a step of one stream {whole:.2f} ms, Python {outside:.2f} ms, {outside / whole:.1%}"
            )
            continue
        if args.formats:
            print(f"{isa()}, {threads} threads")
            _formats([1, *args.tokens], *FORMATS_SHAPE)
            continue
        limit = read_speed()
        print(f"{isa()}, {threads} threads; memory read {limit:.1f} GB/s")
        _products(args.tokens, limit)
        for tokens, context in ((1, 512), (1, 4096), (512, 512), (2048, 2048)):
            milliseconds, speed = attention_speed(tokens, context)
            print(f"attention {tokens} of {context}: {milliseconds:.3f} ms, {speed:.0f} GFLOP/s", flush=True)
    return 0


def _products(tokens: list[int], limit: float) -> None:
    print(f"{'kind':10}{'out × in':>12}{'1 row GB/s':>12}{'of reading':>12}" + "".join(f"{f'{n} rows GOP/s':>16}" for n in tokens))
    for rows, columns in SHAPES:
        for kind in KINDS:
            speed = one_row(kind, rows, columns)
            figures = "".join(f"{many_rows(kind, rows, columns, n):16.0f}" for n in tokens)
            print(f"{kind:10}{f'{rows}×{columns}':>12}{speed:12.1f}{speed / limit:12.0%}{figures}", flush=True)
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            figures = "".join(f"{torch_many_rows(dtype, rows, columns, n):16.0f}" for n in tokens)
            print(f"{f'torch {name}':10}{f'{rows}×{columns}':>12}{'':24}{figures}", flush=True)
