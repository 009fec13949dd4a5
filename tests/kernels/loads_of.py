"""Prints how many loads an operator's kernels have on their way when they wait for one, by the machine code for an H200 that is not
here: `python loads_of.py max.dim float64 225x1056x119 1`.

A kernel that asks for one element, waits, and asks for the next reads at a fraction of the memory's speed; no other figure shows it
without the chip. A process of its own, because Triton decides once whether it interprets.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import compile_for
import torch
import triton
from triton.backends.compiler import GPUTarget

from trireme.kernels import chips, registry

DISASSEMBLER = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*);")
WIDTHS = {".64": 2, ".128": 4}


def machine_code(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(DISASSEMBLER), "-c", file.name], capture_output=True, text=True, check=True).stdout


def at_waits(code: str) -> tuple[int, list[int]]:
    """How many loads there are, and how many were on their way at each wait. What was asked for first comes first."""
    pending, waits, loads = list[set[int]](), list[int](), 0
    for operation, operands in INSTRUCTION.findall(code):
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", operands)]
        loading = operation.startswith("LDG")
        used = {*registers, *(number + 1 for number in registers[1:])} if loading else set(registers)  # an address has two
        met = [i for i, one in enumerate(pending) if one & used]
        if met:
            waits.append(len(pending))
            pending = pending[met[-1] + 1 :]
        if loading:
            loads += 1
            width = next((count for mark, count in WIDTHS.items() if mark in operation), 1)
            pending.append(set(range(registers[0], registers[0] + width)))
    return loads, waits


def main() -> None:
    name, dtype, shape, *dims = sys.argv[1:]
    compile_for.stand_in(GPUTarget("cuda", 90, 32), replace(chips.HOPPER, **compile_for.CPU))
    compiling = triton.compile

    def told(source: Any, **how: Any) -> Any:
        built = compiling(source, **how)
        loads, waits = at_waits(machine_code(built.asm["cubin"]))
        print(f"{source.fn.__name__}: {loads} loads, on their way at each wait {' '.join(map(str, waits))}")
        return built

    triton.compile = told
    sizes = [int(size) for size in shape.split("x")]
    registry.OPERATORS[name].function(torch.empty(sizes, dtype=getattr(torch, dtype)), *(int(dim) for dim in dims))


if __name__ == "__main__":
    main()
