"""The flags of every kind of `trireme bench`: names and defaults.

Knows nothing of what measures and imports none of it, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from trireme.bench.choices import BASELINE, INSTALL, KV_KINDS, LOADS, MEASURES, METHODS
from trireme.command.flags import add_settings


def engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of each prompt")
    parser.add_argument("--output-tokens", type=int, default=128, help="length of each answer")
    parser.add_argument("--batch", type=int, default=1, help="latency: requests that run together")
    parser.add_argument("--repeat", type=int, default=3, help="latency: the median of so many")
    parser.add_argument("--requests", type=int, default=64, help="throughput: how many")
    parser.add_argument("--sharegpt", action="store_true", help="throughput: lengths of real conversations")
    parser.add_argument("--json", help="write the figures to this file")
    add_settings(parser)


def startup_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=3)
    add_settings(parser)


def kernels_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for kernels.json and measured.csv")
    parser.add_argument("--only", default="", help="comma-separated operators; default all")
    parser.add_argument("--all", action="store_true", help="print every row, not only products, fused steps and losses")
    parser.add_argument(
        "--tune",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="first tune matrix products (with --sweep: whatever it draws) for about so long; writes tuned.csv",
    )
    parser.add_argument("--budget", type=float, default=170.0, help="stop starting new cases after this many seconds")
    parser.add_argument(
        "--sweep", type=int, metavar="SEED", help="instead of the table, some 1500 odd shapes and views drawn from a seed"
    )


def gpu_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default=",".join(BASELINE), help="which models, by comma")
    parser.add_argument("--only", default="step,prefill,first,trace,http", help="which figures, by comma")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--max-step-tokens", type=int, default=8192)
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--requests", type=int, default=512, help="of the trace")
    parser.add_argument("--http-workers", type=int, default=4, help="HTTP processes of the server")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the ratios into this file")


def steps_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="llama8b", help="which models, by comma")
    parser.add_argument("--loads", default=",".join(LOADS), help="which loads, by comma")
    parser.add_argument("--top", type=int, default=9, help="kernels to print")
    parser.add_argument("--max-step-tokens", type=int, default=8192)
    parser.add_argument("--json", type=pathlib.Path, help="write everything to this file")


def cpu_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, nargs="+", default=[0], help="numbers of threads to try; 0: every core")
    parser.add_argument(
        "--isa", default="auto", help="the instruction set; a name this machine cannot run lists those it can [auto]"
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 32, 512], help="rows of activations of the wide products")
    parser.add_argument("--formats", action="store_true", help="products of published formats beside GGUF's types, nothing else")
    parser.add_argument("--step-of", metavar="MODEL", help="print Python's share of a decode step of this model, nothing else")


def kv_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=8, help="sequences of the step")
    parser.add_argument("--tokens", type=int, default=32768, help="that each of them sees")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16, help="slots in a page; pages lie scattered")
    parser.add_argument("--kinds", nargs="+", default=list(KV_KINDS), help="the first is what the others are compared with")
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of plain KV and queries"
    )
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: every core")
    parser.add_argument("--repeat", type=int, default=7, help="samples; the median counts")
    parser.add_argument("--json", help="write the figures to this file")


def quality_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="the first is what the others are compared with")
    parser.add_argument("--text", help="a text file to use instead of the opening of Alice's Adventures in Wonderland")
    parser.add_argument("--window", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--few-tokens", type=int, default=8, help="tokens of a step where few rows are measured; 1 as in answers")
    parser.add_argument("--few-windows", type=int, default=sys.maxsize, help="windows that are read in few rows too; 0: none [all]")
    parser.add_argument("--continue-tokens", type=int, default=64, help="greedy tokens after the first part of each window")
    parser.add_argument(
        "--kv-dtype", nargs="+", default=["auto"], dest="kv_kinds", help="kinds of KV, each with each method [auto]"
    )
    parser.add_argument("--plain", action="store_true", help="also compute each by the plain bodies, of the same rounded values")
    parser.add_argument("--json", help="write the figures to this file")
    add_settings(parser, skip=("quantize", "kv_dtype"))


def peers_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="a GGUF model: a path, or a name from `trireme models`")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine; the median counts")
    parser.add_argument("--engines", nargs="+", default=["trireme", *INSTALL], choices=["trireme", *INSTALL])
    parser.add_argument("--measures", nargs="+", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--env", action="append", default=[], metavar="ENGINE=FOLDER", help="use this environment, install nothing")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--plot", help="draw them into this file (needs matplotlib)")


def overhead_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="rounds at each door; the median counts")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_settings(parser)


def serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server [http://127.0.0.1:8000]")
    parser.add_argument("--model", help="the model's name (default: the first that the server lists)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--chat", action="store_true", help="ask /v1/chat/completions instead of /v1/completions")
    parser.add_argument(
        "--workload",
        default="random",
        choices=("random", "sharegpt", "prefix", "multiturn"),
        help="what is asked: prompts of one length, of real conversations' lengths, with shared beginnings, or turns that build on "
        "each other [random]",
    )
    parser.add_argument("--requests", type=int, default=100, help="in all, in each run [100]")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each prompt, or of its own part, about [128]")
    parser.add_argument("--output-tokens", type=int, default=64, help="of each answer; the end of text is ignored [64]")
    parser.add_argument("--prefix-tokens", type=int, default=512, help="prefix: shared tokens [512]")
    parser.add_argument("--groups", type=int, default=4, help="prefix: different prefixes [4]")
    parser.add_argument("--turns", type=int, default=4, help="multiturn: turns of each conversation [4]")
    parser.add_argument("--max-tokens", type=int, default=2048, help="sharegpt: longest prompt plus answer [2048]")
    parser.add_argument("--request-rate", type=float, default=float("inf"), help="open loop: requests per second [all at once]")
    parser.add_argument("--burstiness", type=float, default=1.0, help="open loop: 1 is Poisson, less is burstier [1]")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[0], help="closed loop: requests at once; several: a run each; 0: no bound"
    )
    parser.add_argument("--goodput", nargs="+", default=[], metavar="BOUND", help="ttft:MS tpot:MS e2e:MS of a good request")
    parser.add_argument("--warmup", type=int, default=2, help="requests before the clock starts [2]")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and arrivals [1]")
    parser.add_argument("--json", type=pathlib.Path, help="write figures and samples here")
    parser.add_argument("--plot", type=pathlib.Path, help="write a picture here (needs matplotlib)")


FLAGS = {
    "latency": engine_flags,
    "throughput": engine_flags,
    "startup": startup_flags,
    "kernels": kernels_flags,
    "gpu": gpu_flags,
    "steps": steps_flags,
    "cpu": cpu_flags,
    "kv": kv_flags,
    "quality": quality_flags,
    "peers": peers_flags,
    "overhead": overhead_flags,
    "serve": serve_flags,
}
