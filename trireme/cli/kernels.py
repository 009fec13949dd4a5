"""`trireme kernels list`: the operators of the Triton library and how fast they were when last measured."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list"], default="list")


def run(args: argparse.Namespace) -> int:
    from trireme.kernels import registry

    for row in registry.describe():
        ratio = f"{row.ratio:5.2f} x torch" if row.ratio else "not measured"
        print(f"{row.name:<40} {'differentiable' if row.differentiable else '':<15} {ratio}")
    return 0
