"""Times every operator of the library against torch eager: device time in recorded graphs, launch cost without.
Knows shapes and clocks; it judges nothing and leaves losses in the table."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trireme import kernels
from trireme.bench.flags import kernels_flags
from trireme.bench.kernel_cases import Case, all_cases, product_shapes
from trireme.bench.kernel_clock import TURNS, Clock, compile_ahead, device_time, picked, rehearse
from trireme.bench.kernel_sweep import sweep
from trireme.kernels import chips
from trireme.kernels.aten import counters
from trireme.kernels.aten.calls import tune
from trireme.kernels.aten.products import matmul
from trireme.kernels.launch import Unsupported

_SHARES = 4  # side processes that share the candidates of one product
_LAUNCHES, _LAUNCH_TURNS = 40, 9
_WARM_CALLS = 4  # a new call, noted, repeated, and once more
_ALWAYS = (
    "mm",
    "addmm",
    "bmm",
    "silu_and_mul",
    "skip_rms_norm",
    "rotary_embedding",
    "rms_norm",
    "softmax.int",
)  # the rows of the short table


@dataclass
class Row:
    """One measured case. Times are in microseconds; `ratio` is torch's time divided by ours."""

    op: str
    shape: str
    torch_us: float
    ours_us: float
    ratio: float
    unit: str  # "GB/s" or "TFLOP/s"
    rate: float
    share: float  # share of the measured ceiling, which is the rate of the largest copy or product
    torch_launch_us: float
    ours_launch_us: float
    copy_share: float = 0.0  # share of the rate at which the same number of bytes is copied
    error: str = ""


def launch_cost(call: Callable[[], Any]) -> float:
    """Microseconds the host spends on one call: a sample, taken over few enough that the device's queue does not fill."""
    module = chips.device_module()
    for _ in range(_WARM_CALLS):
        call()
    module.synchronize()
    begin = time.perf_counter()
    for _ in range(_LAUNCHES):
        call()
    spent = time.perf_counter() - begin
    module.synchronize()
    return spent * 1e6 / _LAUNCHES


def launch_costs(theirs: Callable[[], Any], ours: Callable[[], Any], names: tuple[str, ...]) -> tuple[float, float]:
    """What launching costs torch and us, medians of samples in turns: a busy host is as slow for both."""
    samples = []
    for _ in range(_LAUNCH_TURNS):
        cost = launch_cost(theirs)
        with kernels.use(include=names):
            samples.append((cost, launch_cost(ours)))
    torch_costs, our_costs = zip(*samples, strict=True)
    return statistics.median(torch_costs), statistics.median(our_costs)


def measure(case: Case, ceilings: dict[str, float]) -> Row:
    """Measures both sides of one case. A failure becomes a row that gives its reason."""
    empty = Row(case.op, case.label, 0, 0, 0, case.unit, 0, 0, 0, 0)
    try:
        inputs = case.make()
        theirs, ours = (lambda: case.theirs(*inputs)), (lambda: case.ours(*inputs))
        clock = Clock(theirs, case.recorded)
        with kernels.use(include=case.enables):
            our_clock = Clock(ours, case.recorded)
        # In turns, there and back: whoever computes first has a cool chip, on an H200 worth 11 % of the largest products; of long
        # calls more, until its clock has settled.
        for turn in range(TURNS if clock.repeats > 1 else 4 * TURNS):
            for side in (clock, our_clock) if turn % 2 == 0 else (our_clock, clock):
                with kernels.use(include=case.enables if side is our_clock else ()):
                    side.turn()
        torch_us, ours_us = clock.median, our_clock.median
        torch_launch, ours_launch = launch_costs(theirs, ours, case.enables) if case.launch else (0.0, 0.0)
    except Exception as error:
        empty.error = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        return empty
    rate = case.work / (ours_us * 1e-6) / (1e9 if case.unit == "GB/s" else 1e12)
    share = rate / ceilings[case.unit]
    return Row(case.op, case.label, torch_us, ours_us, torch_us / ours_us, case.unit, rate, share, torch_launch, ours_launch)


def measured_ceilings() -> dict[str, float]:
    """Copy bandwidth (read plus write) of as much as fills any cache, and the rate of torch's largest bf16 product."""
    a, b = torch.randn(2, 8192, 8192, device=chips.current().device_type).bfloat16()
    product = 2 * 8192**3 / (device_time(lambda: a @ b, True) * 1e-6) / 1e12
    return {"GB/s": copy_rate(2 << 30), "TFLOP/s": product}


@functools.cache
def copy_rate(moved: int) -> float:
    """The GB/s of a copy that reads and writes so many bytes in total."""
    x = torch.randn(max(1, moved // 4), device=chips.current().device_type).bfloat16()
    y = torch.empty_like(x)
    return 4 * x.numel() / (device_time(lambda: torch.neg(x, out=y), True) * 1e-6) / 1e9


def _products(shape: tuple[int, int, int]) -> None:
    """Runs the products of this shape that are timed, so that `tune` meets them: the linear, with a bias, and the plain one."""
    rows, k, n = shape
    device = chips.current().device_type
    a, w = (torch.randn(*sizes, device=device, dtype=torch.bfloat16) for sizes in ((rows, k), (n, k)))
    calls: list[Callable[[], Any]] = [lambda: matmul.mm(a, w.t())] if rows <= 8192 else []
    if rows in (4096, 8192) or (rows, k, n) == (32, 4096, 4096):
        calls.append(lambda: matmul.addmm(w[:, 0].contiguous(), a, w.t()))
    if rows >= 4096:
        turned = w.t().contiguous()
        calls.append(lambda: matmul.mm(a, turned))
    for call in calls:
        with contextlib.suppress(Unsupported):  # torch's own kernel was faster
            call()


def _rehearse_product(job: tuple[tuple[int, int, int], int]) -> None:
    shape, share = job
    tune.rehearse(share, _SHARES)
    _products(shape)


def _rehearse_case(index: int) -> None:
    rehearse(list(all_cases())[index])


def tune_products(path: Path, seconds: float) -> int:
    """Tunes the matrix products of common models, as many as the time allows, and writes the table that ships with the package."""
    deadline = time.monotonic() + seconds
    compile_ahead(_rehearse_product, [(shape, share) for shape in product_shapes() for share in range(_SHARES)], 0.6 * seconds)
    tune.enable()
    for shape in product_shapes():
        if time.monotonic() < deadline:
            _products(shape)
            counters.release()
    tune.enable(False)
    return tune.export(path)


def report(rows: list[Row], ceilings: dict[str, float]) -> str:
    """The table for readers, in the order of the cases."""
    head = f"{'op':<22} {'shape':<26} {'torch':>9} {'ours':>9} {'ratio':>6} {'rate':>8} {'':<7} {'share':>5} {'copy':>5}"
    lines = [f"{head}  launch torch/ours"]
    for row in rows:
        if row.error:
            lines.append(f"{row.op:<22} {row.shape:<26} {row.error}")
            continue
        launch = f"{row.torch_launch_us:5.1f}/{row.ours_launch_us:5.1f}" if row.ours_launch_us else ""
        copy = f"{row.copy_share:.0%}" if row.copy_share else ""
        lines.append(
            f"{row.op:<22} {row.shape:<26} {row.torch_us:9.2f} {row.ours_us:9.2f} {row.ratio:6.2f} {row.rate:8.0f} {row.unit:<7}"
            f" {row.share:5.0%} {copy:>5}  {launch}"
        )
    lines.append(f"ceilings: copy {ceilings['GB/s']:.0f} GB/s, product {ceilings['TFLOP/s']:.0f} TFLOP/s")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """One line over all cases: the mean ratio, the losses, and the launch cost."""
    good = [row for row in rows if not row.error]
    if not good:
        return "nothing measured"
    mean = statistics.geometric_mean(row.ratio for row in good)
    started = [row for row in good if row.ours_launch_us]
    launch = ""
    if started:
        theirs, ours = (statistics.median(getattr(row, name) for row in started) for name in ("torch_launch_us", "ours_launch_us"))
        launch = f"; median launch {theirs:.1f} µs torch, {ours:.1f} µs ours"
    return f"geometric mean {mean:.3f} over {len(good)} cases; {sum(row.ratio < 0.9 for row in good)} under 0.9{launch}"


def by_operator(rows: list[Row]) -> dict[str, float]:
    """The geometric mean ratio of each operator, as `kernels list` shows it."""
    grouped: dict[str, list[float]] = {}
    for row in rows:
        if not row.error:
            grouped.setdefault(row.op, []).append(row.ratio)
    return {op: round(statistics.geometric_mean(ratios), 3) for op, ratios in sorted(grouped.items())}


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table and writes the files. Returns 1 if there is no GPU."""
    if chips.current().interpreted:
        print("kernels are interpreted here: there is no device to time; run this on a machine with a GPU")
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    if args.sweep is not None:
        return sweep(args)
    began = time.monotonic()
    if args.tune:
        count = tune_products(args.out / "tuned.csv", args.tune)
        print(f"{count} tuned entries after {time.monotonic() - began:.0f} s", flush=True)
    cases = list(all_cases())
    chosen = picked(args.only, cases)
    compile_ahead(_rehearse_case, chosen)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    ceilings = measured_ceilings()
    deadline = time.monotonic() + args.budget
    rows, skipped = [], 0
    for case in (cases[i] for i in chosen):
        if time.monotonic() > deadline:
            skipped += 1
            continue
        row = measure(case, ceilings)
        if case.unit == "GB/s" and not row.error:
            with contextlib.suppress(RuntimeError):  # there is not enough memory for it
                row.copy_share = row.rate / copy_rate(int(case.work))
        rows.append(row)
        counters.release()
        torch.get_device_module(chips.current().device_type).empty_cache()
    result = {"chip": chips.current().name, "torch": torch.__version__, "ceilings": ceilings, "rows": [asdict(row) for row in rows]}
    (args.out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    ratios = "".join(f"{name},{ratio}\n" for name, ratio in by_operator(rows).items())
    (args.out / "measured.csv").write_text("operator,ratio\n" + ratios)
    (args.out / "kernels.txt").write_text(report(rows, ceilings) + "\n")
    short = rows if args.all or args.only else [row for row in rows if row.error or row.ratio < 0.95 or row.op in _ALWAYS]
    print(report(short, ceilings))
    print(summary(rows))
    print(f"took {time.monotonic() - began:.0f} s" + (f"; {skipped} cases left out by the time budget" if skipped else ""))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="trireme bench kernels", description=__doc__)
    kernels_flags(parser)
    if "OUT" in os.environ:
        parser.set_defaults(out=Path(os.environ["OUT"]))
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
