"""`trireme kernels list`: the operators of the Triton library and how fast they were when last measured."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list"], default="list")


def run(args: argparse.Namespace) -> int:
    from trireme.kernels.aten import registry

    print(f"{'operator':<40} {'gradient':<10} speed last measured")
    for row in registry.describe():
        ratio = f"{row['ratio']:5.2f} x torch" if row["ratio"] else "not measured"
        name = row["name"] if row["overload"] == "default" else f"{row['name']}.{row['overload']}"
        print(f"{name:<40} {row['gradient']:<10} {ratio}")
    return 0
