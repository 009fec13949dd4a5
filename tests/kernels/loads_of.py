"""Prints how many loads an operator's kernels have on their way when they wait for one, by the machine code for an H200 that is not
here: `python loads_of.py max.dim float64 225x1056x119 1` (several calls with a comma between two). Or of all reductions that the
sweep of a seed draws, or that a part of the grid has, those with the fewest bytes on their way: `python loads_of.py --sweep 50
--only mean,sum`, `--grid 1`.

A kernel that asks for one element, waits, and asks for the next reads at a fraction of the memory's speed; no other figure shows it
without the chip. A process of its own, because Triton decides once whether it interprets.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import compile_for
import torch
import triton
from triton.backends.compiler import GPUTarget

from trireme import kernels
from trireme.bench import kernel_sweep
from trireme.bench.kernel_cases import Case
from trireme.bench.kernel_clock import picked
from trireme.kernels import chips
from trireme.kernels.aten import registry

CHIP, REGISTERS, THREADS, BLOCKS = chips.HOPPER, 65536, 2048, 32  # and what one of its multiprocessors holds
DISASSEMBLER = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*);")
WIDTHS = {".128": 16, ".64": 8, "16": 2, "8": 1}  # bytes of a load by a mark in its name; others have four


@dataclass
class Loads:
    """What the machine code of one kernel loads into registers."""

    count: int
    waits: list[int]  # how many were on their way at each wait
    bytes: float  # of one, in the mean
    copies: int  # from memory into shared memory, for which nobody waits by name
    registers: int

    @property
    def together(self) -> float:
        return statistics.mean(self.waits or [self.count])


@dataclass
class Start:
    """One start of a kernel."""

    kernel: str
    loads: Loads
    warps: int
    programs: int
    shared: int

    @property
    def on_their_way(self) -> float:
        """Bytes that one multiprocessor has asked for and not yet got, as a rule: of 20,000 an H200 reads at its full speed."""
        threads = 32 * self.warps
        held = min(
            THREADS // threads, REGISTERS // (self.loads.registers * threads), CHIP.shared_memory // (self.shared + 1024), BLOCKS
        )
        return self.loads.together * self.loads.bytes * threads * min(held, self.programs / CHIP.multiprocessors)

    def __str__(self) -> str:
        waits = " ".join(map(str, self.loads.waits[:40]))
        return f"{self.kernel}, {self.warps} warps: {self.loads.count} loads, on their way at each wait {waits}"


def machine_code(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(DISASSEMBLER), "-c", file.name], capture_output=True, text=True, check=True).stdout


def loads_in(code: str) -> Loads:
    """What was asked for first comes first."""
    pending, waits, sizes, copies = list[set[int]](), list[int](), list[int](), 0
    for operation, operands in INSTRUCTION.findall(code):
        copies += operation.startswith("LDGSTS")
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", operands)]
        loading = operation.startswith("LDG") and not operation.startswith("LDGSTS") and registers
        used = {*registers, *(number + 1 for number in registers[1:])} if loading else set(registers)  # an address has two
        met = [i for i, one in enumerate(pending) if one & used]
        if met:
            waits.append(len(pending))
            pending = pending[met[-1] + 1 :]
        if loading:
            sizes.append(next((size for mark, size in WIDTHS.items() if mark in operation), 4))
            pending.append(set(range(registers[0], registers[0] + max(1, sizes[-1] // 4))))
    most = max((int(number) for number in re.findall(r"\bR(\d+)\b", code)), default=15)
    return Loads(len(sizes), waits, statistics.mean(sizes or [0]), copies, most + 1)


class Counting(compile_for.Compiling):
    """Stands in for a kernel's function: calling it notes the start."""

    known: dict[str, tuple[Loads, int]] = {}
    starts: list[Start] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **how: self.note(grid, args, **how)

    def note(self, grid: Any, args: Any, num_warps: int, num_stages: int, launch_pdl: bool = False, **constants: Any) -> None:
        source = self.source(args, constants)
        form = compile_for.form_of(source, num_warps, num_stages)
        if form not in self.known:
            built = self.build(source, num_warps, num_stages)
            self.known[form] = loads_in(machine_code(built.asm["cubin"])), built.metadata.shared
        loads, shared = self.known[form]
        self.starts.append(Start(self.jit.fn.__name__, loads, num_warps, torch.Size(grid).numel(), shared))


def drawn(listed: list[tuple[str, Case]], only: str) -> list[tuple[str, Start]]:
    """The reductions of a draw or the grid, those with the fewest bytes on their way first."""
    kernel_sweep._drawn = lambda shape, kind: torch.empty(shape, dtype=torch.int64 if isinstance(kind, int) else kind)
    cases = [case for family, case in listed if family.startswith(("reductions", "rows", "folds"))]
    found = []
    for case in (cases[i] for i in picked(only, cases)):
        Counting.starts.clear()
        try:
            with kernels.use(include=case.enables):
                case.ours(*case.make())
        except RuntimeError as error:  # what goes by clusters asks the driver how many fit
            print(f"left out, for want of a driver: {case.op} {case.label}: {error}")
            continue
        found += [
            (f"{case.op} {case.label}", start) for start in Counting.starts[:1] if start.loads.count and not start.loads.copies
        ]
    return sorted(found, key=lambda one: one[1].on_their_way)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", nargs="*", help="OPERATOR DTYPE SHAPE [DIM ...], ...")
    parser.add_argument("--sweep", type=int, help="the seed of a draw")
    parser.add_argument("--grid", type=int, help="a part of the grid")
    parser.add_argument("--only", default="", help="operators of either")
    args = parser.parse_args()
    if args.sweep is None and args.grid is None and len(" ".join(args.call).split()) < 3:
        parser.error("give OPERATOR DTYPE SHAPE, --sweep SEED or --grid PART")
    compile_for.stand_in(GPUTarget("cuda", 90, 32), replace(CHIP, **compile_for.CPU), Counting)
    if args.sweep is not None or args.grid is not None:
        for call, start in drawn(kernel_sweep.listed(args.grid, args.sweep), args.only)[:60]:
            print(f"{start.on_their_way:,.0f} bytes: {call}: {start}")
        return
    for call in " ".join(args.call).split(","):
        name, dtype, shape, *dims = call.split()
        sizes = [int(size) for size in shape.split("x")]
        Counting.starts.clear()
        registry.OPERATORS[name].function(torch.empty(sizes, dtype=getattr(torch, dtype)), *(int(dim) for dim in dims))
        for start in Counting.starts:
            print(f"{call.strip()}: {start}")


if __name__ == "__main__":
    main()
