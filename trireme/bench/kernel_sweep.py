"""Shapes that nobody tuned for: operators drawn with odd sizes, views, types and the linears of many models, from 1 MiB on.
The table of `kernel_cases` can be fitted to its shapes; to these it cannot, since another seed draws others."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trireme import kernels
from trireme.bench.kernel_cases import Case
from trireme.bench.kernels import TURNS, Clock, compile_ahead, picked, rehearse
from trireme.kernels import chips, streamed

_HALF, _SINGLE = torch.bfloat16, torch.float32
_FLAT = [
    (1, 1 << 20), (8, 151936), (64, 50257), (1000, 1000), (4096, 4096), (16384, 128), (100000, 33), (1 << 19, 4), (3, 1000003),
    (4096, 257), (128, 16384), (2048, 5120), (32768, 64), (7, 300000), (513, 2049),
]  # fmt: skip
_DEEP = [(32, 4096, 128), (64, 77, 999), (8, 3, 100000), (128, 1024, 33), (2, 1000, 1024), (4096, 7, 64), (16, 16, 16384)]
_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "turned": lambda x: x.t(),
    "from 1": lambda x: x.flatten()[1:],
    "columns from 1": lambda x: x[:, 1:],
    "every other": lambda x: x[:, ::2],
    "half": lambda x: x[:, : x.shape[1] // 2],
}
_PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]] = {
    "": lambda x, y: (x, y),
    "row": lambda x, y: (x, y[0]),
    "column": lambda x, y: (x, y[:, :1]),
    "row and column": lambda x, y: (x[:, :1], y[:1]),
    "wider": lambda x, y: (x, y.float()),
    "columns from 1": lambda x, y: (x[:, 1:], y[:, 1:]),
    "both turned": lambda x, y: (x.t(), y.t()),
}
_ONE: dict[str, Callable[..., Any]] = {
    "exp": torch.exp, "gelu": F.gelu, "abs": torch.abs, "cos": torch.cos, "rsqrt": torch.rsqrt, "tanh": torch.tanh, "silu": F.silu,
    "neg": torch.neg, "isnan": torch.isnan, "reciprocal": torch.reciprocal, "sigmoid": torch.sigmoid,
}  # fmt: skip
_TWO: dict[str, Callable[..., Any]] = {
    "add.Tensor": torch.add, "mul.Tensor": torch.mul, "div.Tensor": torch.div, "sub.Tensor": torch.sub, "eq.Tensor": torch.eq,
    "lt.Tensor": torch.lt, "pow.Tensor_Tensor": torch.pow,
}  # fmt: skip
_ALONG: dict[str, Callable[..., Any]] = {
    "sum.dim_IntList": lambda x, d: x.sum(d), "mean.dim": lambda x, d: x.mean(d), "amax": lambda x, d: x.amax(d),
    "argmax": lambda x, d: x.argmax(d), "max.dim": lambda x, d: x.max(d)[0], "min.dim": lambda x, d: x.min(d)[1],
    "prod.dim_int": lambda x, d: x.prod(d), "any.dim": lambda x, d: x.any(d), "all.dim": lambda x, d: x.all(d),
    "var_mean.correction": lambda x, d: torch.var_mean(x, d, correction=0), "cumsum": lambda x, d: x.cumsum(d),
    "linalg_vector_norm": lambda x, d: torch.linalg.vector_norm(x, 2, d), "softmax.int": lambda x, d: x.softmax(d),
    "log_softmax.int": lambda x, d: x.log_softmax(d),
}  # fmt: skip
_WHOLE: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "min": torch.min,
    "prod": torch.prod,
}
_LINEARS = [  # columns and the summed dimension in models of 0.5 to 70 billion parameters
    (1024, 1024), (2048, 2048), (16384, 2048), (2048, 8192), (2560, 9728), (3584, 3584), (4608, 3584), (37888, 3584), (3584, 18944),
    (5120, 5120), (27648, 5120), (5120, 13824), (8192, 8192), (10240, 8192), (8192, 28672), (17920, 1536), (1536, 8960),
    (22016, 4096), (4096, 11008), (151936, 896), (50264, 768), (256, 7168),
]  # fmt: skip
_ODD = [(1000, 1001, 1002), (512, 4097, 512), (1024, 1024, 1024), (100, 2048, 8192)]
_BATCHES = [(8, 512, 512, 512), (16, 128, 4096, 128), (32, 16, 128, 2048), (8, 1000, 1000, 1000), (1024, 32, 32, 32)]


def _drawn(shape: tuple[int, ...], kind: torch.dtype | int) -> torch.Tensor:
    """Numbers of a type, or indices below a bound."""
    device = chips.current().device_type
    if isinstance(kind, int):
        return torch.randint(0, kind, shape, device=device)
    if kind is torch.bool:
        return torch.rand(shape, device=device) > 0.5
    return torch.rand(shape, device=device).to(kind) + 0.1


def _case(op: str, label: str, call: Callable[..., Any], *inputs: Any, view: Callable[..., Any] | None = None) -> Case:
    """A call on tensors drawn by shape and type, or on views of them."""

    def make() -> tuple[Any, ...]:
        tensors = tuple(_drawn(shape, kind) for shape, kind in inputs)
        seen = tensors if view is None else view(*tensors)
        return seen if isinstance(seen, tuple) else (seen,)

    return Case(op, label, make, call, call, (op,), 0.0)


def _named(shape: tuple[int, ...], dtype: torch.dtype, more: str = "") -> str:
    return f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}{', ' + more if more else ''}"


def _shapes(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Half of them from the list, half of any size: 2¹⁹ to 2²⁴ elements in rows of any length, every other time even."""
    shapes: list[tuple[int, int]] = rng.sample(_FLAT, count // 2)
    while len(shapes) < count:
        size = 2 ** rng.uniform(19, 24)
        even = rng.choice((1, 16))
        length = max(even, round(2 ** rng.uniform(1, 20) / even) * even)
        shapes.append((max(1, round(size / length)), length))
    return shapes


def _elementwise(rng: random.Random) -> Iterator[Case]:
    for op, call in _ONE.items():
        for shape, dtype in itertools.product(_shapes(rng, 3), (_HALF, _SINGLE)):
            for name in rng.sample(sorted(_VIEWS), 2):
                yield _case(op, _named(shape, dtype, name), call, (shape, dtype), view=_VIEWS[name])
    for op, call in _TWO.items():
        for shape, dtype in itertools.product(_shapes(rng, 4), (_HALF, _SINGLE)):
            for name in rng.sample(sorted(_PAIRS), 3):
                yield _case(op, _named(shape, dtype, name), call, (shape, dtype), (shape, dtype), view=_PAIRS[name])
    for shape in _shapes(rng, 6):
        label, some = _named(shape, _HALF), (shape, _HALF)
        yield _case("where.self", label, torch.where, (shape, torch.bool), some, some)
        yield _case("triu", label, torch.triu, some)
        for dims in ([0], [1], [0, 1]):
            yield _case("flip", f"{label}, {dims}", functools.partial(torch.flip, dims=dims), some)


def _reductions(rng: random.Random) -> Iterator[Case]:
    for op, call in _ALONG.items():
        types = (torch.bool,) if op in ("any.dim", "all.dim") else (_HALF, _SINGLE)
        flat = [(shape, rng.choice(types), dim) for shape in _shapes(rng, 8) for dim in (0, 1)]
        deep = [(shape, types[0], dim) for shape in _DEEP for dim in (0, 1, 2)]
        for shape, dtype, dim in [*flat, *deep]:
            yield _case(op, _named(shape, dtype, f"along {dim}"), lambda x, call=call, dim=dim: call(x, dim), (shape, dtype))
        for shape in _DEEP:
            label = _named(shape, types[0], "turned, along 1")
            yield _case(op, label, lambda x, call=call: call(x, 1), (shape, types[0]), view=lambda x: x.transpose(0, 2))
    for op, call in _WHOLE.items():
        for shape, dtype in itertools.product([(1000003,), (1 << 24,), (5000, 1001)], (_HALF, _SINGLE)):
            yield _case(op, _named(shape, dtype), call, (shape, dtype))


def _norms(rng: random.Random) -> Iterator[Case]:
    flat = [s for s in (*_FLAT, *_shapes(rng, 8)[4:]) if s[1] <= 300000]
    for (rows, length), dtype in itertools.product(flat, (_HALF, _SINGLE)):
        label, x, w = _named((rows, length), dtype), ((rows, length), dtype), ((length,), dtype)
        yield _case("native_layer_norm", label, lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b), x, w, w)
        yield _case("rms_norm", label, lambda x, w: F.rms_norm(x, x.shape[1:], w, 1e-5), x, w)
        yield _case("cross_entropy_loss", label, F.cross_entropy, x, ((rows,), length))
    for entries, width, count in ((151936, 896, 4096), (50257, 768, 8192), (1000, 64, 100000), (32000, 4096, 512)):
        yield _case("embedding", f"{count} of {entries}x{width}", F.embedding, ((count,), entries), ((entries, width), _HALF))


def _products(rng: random.Random) -> Iterator[Case]:
    for (n, k), rows in itertools.product(_LINEARS, (1, 2, 8, 16, 32, rng.choice((48, 64, 128, 200, 256, 512, 1000, 1024, 2048)))):
        x = ((rows, k), _HALF)
        yield _case("mm", f"{rows}x{k}x{n} linear", torch.mm, x, ((n, k), _HALF), view=lambda x, w: (x, w.t()))
        yield _case("mm", f"{rows}x{k}x{n}", torch.mm, x, ((k, n), _HALF))
    for (m, k, n), dtype in itertools.product(_ODD, (_HALF, _SINGLE)):
        yield _case("mm", _named((m, k, n), dtype), torch.mm, ((m, k), dtype), ((k, n), dtype))
    for (b, m, k, n), dtype in itertools.product(_BATCHES, (_HALF, _SINGLE)):
        yield _case("bmm", _named((b, m, k, n), dtype), torch.bmm, ((b, m, k), dtype), ((b, k, n), dtype))
    for (m, k), dtype in itertools.product([(100000, 33), (33, 100000), (50257, 768), (128, 16384)], (_HALF, _SINGLE)):
        yield _case("mv", _named((m, k), dtype), torch.mv, ((m, k), dtype), ((k,), dtype))


FAMILIES: dict[str, Callable[[random.Random], Iterator[Case]]] = {
    "elementwise and moves": _elementwise, "reductions, softmax, running sums": _reductions, "norms, loss, embedding": _norms,
    "products": _products,
}  # fmt: skip


def sweep_cases(seed: int) -> list[tuple[str, Case]]:
    """Families and cases of one draw, the same for one seed everywhere."""
    rng = random.Random(seed)
    return [(family, case) for family, cases in FAMILIES.items() for case in cases(rng)]


@dataclass
class Compared:
    """One measured case of the sweep."""

    family: str
    op: str
    shape: str
    torch_us: float
    ours_us: float
    ratio: float
    mebibytes: float


def _rehearse_drawn(job: tuple[int, int]) -> None:
    seed, index = job
    rehearse(sweep_cases(seed)[index][1])


def compare(family: str, case: Case) -> Compared | None:
    """Both sides of a case of the sweep, losses more carefully; nothing of one under 1 MiB."""
    inputs = case.make()
    size = sum(x.numel() * x.element_size() for x in inputs if isinstance(x, torch.Tensor))
    if size < 1 << 20:
        return None
    theirs = Clock(lambda: case.theirs(*inputs), True)
    with kernels.use(include=case.enables):
        ours = Clock(lambda: case.ours(*inputs), True)
    for turn in range(TURNS):
        theirs.turn()
        ours.turn()
        if turn == 0 and theirs.median > ours.median:
            break
    return Compared(family, case.op, case.label, theirs.median, ours.median, theirs.median / ours.median, size / 2**20)


def sweep(args: argparse.Namespace) -> int:
    """Times the cases of one draw; prints what each family comes to and every loss below 0.9."""
    began = time.monotonic()
    cases = sweep_cases(args.sweep)
    chosen = picked(args.only, [case for _, case in cases])
    compile_ahead(_rehearse_drawn, [(args.sweep, i) for i in chosen])
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    deadline = time.monotonic() + args.budget
    found, failed, skipped = list[Compared](), 0, 0
    for family, case in (cases[i] for i in chosen):
        if time.monotonic() > deadline:
            skipped += 1
            continue
        try:
            row = compare(family, case)
        except Exception as error:
            failed += 1
            print(f"{case.op} {case.label}: {type(error).__name__}: {error}".splitlines()[0][:160])
            continue
        found += [row] if row is not None else []
        streamed.release_counters()
    (args.out / "sweep.json").write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    for family in dict.fromkeys(row.family for row in found):
        ratios = [row.ratio for row in found if row.family == family]
        mean = statistics.geometric_mean(ratios)
        print(f"{family}: geometric mean {mean:.2f} over {len(ratios)}, {sum(r < 0.9 for r in ratios)} under 0.9")
    for row in sorted((row for row in found if row.ratio < 0.9), key=lambda row: row.ratio):
        print(f"{row.ratio:.2f} {row.op} {row.shape}: torch {row.torch_us:.1f} us, ours {row.ours_us:.1f}, {row.mebibytes:.1f} MiB")
    print(f"took {time.monotonic() - began:.0f} s; {failed} failed, {skipped} left out by the time budget")
    return 1 if failed else 0
