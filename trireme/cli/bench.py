"""`trireme bench KIND`: measurements. Each kind has its flags in trireme.bench.flags, and a module with run.

Knows the kinds by name; what measures is imported only to be run.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from trireme.bench.flags import FLAGS
from trireme.command.parser import Defaults, Parser

KINDS = {
    "latency": "one stream: time to first token, time per token",
    "throughput": "many requests at once, of real lengths",
    "startup": "from the command line to the first token",
    "kernels": "the Triton operator library against torch",
    "gpu": "the CUDA backend on the shapes and the trace of the baseline",
    "steps": "where the time of a GPU step goes, kernel by kernel",
    "cpu": "the CPU kernels against the memory bandwidth",
    "kv": "attention of a decode step by kind of KV",
    "quality": "perplexity and greedy agreement of each weight method",
    "peers": "this engine beside llama.cpp, vllm and transformers",
    "overhead": "serving against the offline engine, the same requests",
    "serve": "load on any OpenAI-compatible server",
}
_MODULES = {"latency": "engine", "throughput": "engine", "cpu": "cpu_kernels"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, text in KINDS.items():
        kinds.add_parser(name, help=text, add_help=False)
    parser.parse_args = lambda argv=None, namespace=None: _parse(parser, argv)  # type: ignore[method-assign,assignment]


def _parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses the kind first, then the flags of that kind."""
    if not argv or argv[0] not in KINDS:
        return argparse.ArgumentParser.parse_args(parser, argv)
    about = KINDS[argv[0]]
    inner = Parser(prog=f"trireme bench {argv[0]}", description=f"{about[0].upper()}{about[1:]}.", formatter_class=Defaults)
    FLAGS[argv[0]](inner)
    args = inner.parse_args(argv[1:])
    args.kind = argv[0]
    return args


def module_of(kind: str) -> ModuleType:
    """The module that measures. Importing it may take seconds."""
    return importlib.import_module(f"trireme.bench.{_MODULES.get(kind, kind)}")


def run(args: argparse.Namespace) -> int:
    return module_of(args.kind).run(args) or 0
