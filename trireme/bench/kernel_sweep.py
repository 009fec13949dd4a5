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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trireme import kernels
from trireme.bench.kernel_cases import Case
from trireme.bench.kernel_clock import TURNS, Clock, compile_ahead, picked, rehearse
from trireme.kernels import chips
from trireme.kernels.aten import counters
from trireme.kernels.aten.calls import tune

_HALF, _SINGLE = torch.bfloat16, torch.float32
_FLOATS = (_HALF, _SINGLE, torch.float16, torch.float64)
_WHOLES = (torch.int32, torch.int64, torch.uint8)
_NUMBERS = (*_FLOATS, *_WHOLES)
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
_FOLDS = ["sum.dim_IntList", "amax", "argmax", "any.dim", "var_mean.correction", "cumsum", "linalg_vector_norm", "softmax.int"]
_Call = Callable[..., Any]
_ONE: dict[str, tuple[_Call, Sequence[torch.dtype]]] = {
    "exp": (torch.exp, _FLOATS), "gelu": (F.gelu, _FLOATS), "abs": (torch.abs, _NUMBERS), "cos": (torch.cos, _FLOATS),
    "sin": (torch.sin, _FLOATS), "rsqrt": (torch.rsqrt, _FLOATS), "tanh": (torch.tanh, _FLOATS), "silu": (F.silu, _FLOATS),
    "neg": (torch.neg, _NUMBERS), "relu": (torch.relu, _NUMBERS), "isnan": (torch.isnan, _FLOATS),
    "isfinite": (torch.isfinite, _FLOATS), "isinf": (torch.isinf, _FLOATS), "sigmoid": (torch.sigmoid, _FLOATS),
    "reciprocal": (torch.reciprocal, _FLOATS), "bitwise_not": (torch.bitwise_not, (*_WHOLES, torch.bool)),
    "clamp": (lambda x: x.clamp(1, 3), _NUMBERS), "pow.Scalar": (lambda x: torch.pow(2.5, x), _FLOATS),
}  # fmt: skip
_BY: dict[str, tuple[_Call, Sequence[torch.dtype], Sequence[Any]]] = {  # a tensor and one of these
    "gelu": (lambda x, kind: F.gelu(x, approximate=kind), _FLOATS, ("tanh",)),
    "pow.Tensor_Scalar": (torch.pow, _FLOATS, (2, 3, 0.5, -1.0, 2.5)),
    "eq.Scalar": (torch.eq, _NUMBERS, (1,)), "ne.Scalar": (torch.ne, _NUMBERS, (1,)), "lt.Scalar": (torch.lt, _NUMBERS, (1,)),
    "le.Scalar": (torch.le, _NUMBERS, (1,)), "gt.Scalar": (torch.gt, _NUMBERS, (1,)), "ge.Scalar": (torch.ge, _NUMBERS, (1,)),
    "bitwise_and.Scalar": (torch.bitwise_and, _WHOLES, (7,)), "bitwise_or.Scalar": (torch.bitwise_or, _WHOLES, (7,)),
    "bitwise_and.Scalar_Tensor": (lambda x, y: torch.bitwise_and(y, x), _WHOLES, (7,)),
    "bitwise_or.Scalar_Tensor": (lambda x, y: torch.bitwise_or(y, x), _WHOLES, (7,)),
}  # fmt: skip
_TWO: dict[str, tuple[_Call, Sequence[torch.dtype]]] = {
    "add.Tensor": (torch.add, _NUMBERS), "mul.Tensor": (torch.mul, _NUMBERS), "div.Tensor": (torch.div, _FLOATS),
    "sub.Tensor": (torch.sub, _NUMBERS), "eq.Tensor": (torch.eq, _NUMBERS), "ne.Tensor": (torch.ne, _NUMBERS),
    "lt.Tensor": (torch.lt, _NUMBERS), "le.Tensor": (torch.le, _NUMBERS), "gt.Tensor": (torch.gt, _NUMBERS),
    "ge.Tensor": (torch.ge, _NUMBERS), "pow.Tensor_Tensor": (torch.pow, _FLOATS), "isclose": (torch.isclose, _FLOATS),
    "clamp.Tensor": (torch.clamp, _NUMBERS), "bitwise_and.Tensor": (torch.bitwise_and, _WHOLES),
    "bitwise_or.Tensor": (torch.bitwise_or, _WHOLES),
}  # fmt: skip
_ALONG: dict[str, Callable[..., Any]] = {
    "sum.dim_IntList": lambda x, d: x.sum(d), "mean.dim": lambda x, d: x.mean(d), "amax": lambda x, d: x.amax(d),
    "argmax": lambda x, d: x.argmax(d), "max.dim": lambda x, d: x.max(d)[0], "min.dim": lambda x, d: x.min(d)[1],
    "prod.dim_int": lambda x, d: x.prod(d), "any.dim": lambda x, d: x.any(d), "all.dim": lambda x, d: x.all(d),
    "var_mean.correction": lambda x, d: torch.var_mean(x, d, correction=0), "cumsum": lambda x, d: x.cumsum(d),
    "linalg_vector_norm": lambda x, d: torch.linalg.vector_norm(x, 2, d), "softmax.int": lambda x, d: x.softmax(d),
    "log_softmax.int": lambda x, d: x.log_softmax(d), "any.dims": lambda x, d: x.any([d]), "all.dims": lambda x, d: x.all([d]),
}  # fmt: skip
_TRUTHS = {"any.dim", "all.dim", "any.dims", "all.dims", "any", "all"}
_OF_NUMBERS = {"sum.dim_IntList", "amax", "argmax", "max.dim", "min.dim", "prod.dim_int", "cumsum", "sum", "max", "min", "prod"}
_WHOLE: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "max": torch.max, "min": torch.min, "prod": torch.prod, "any": torch.any,
    "all": torch.all,
}  # fmt: skip
_IMAGES = [(8, 320, 64, 64), (2, 512, 4099), (16, 30, 33, 35), (4, 1280, 16, 16), (64, 32, 100, 10)]
_LINEARS = [  # columns and the summed dimension in models of 0.5 to 70 billion parameters
    (1024, 1024), (2048, 2048), (16384, 2048), (2048, 8192), (2560, 9728), (3584, 3584), (4608, 3584), (37888, 3584), (3584, 18944),
    (5120, 5120), (27648, 5120), (5120, 13824), (8192, 8192), (10240, 8192), (8192, 28672), (17920, 1536), (1536, 8960),
    (22016, 4096), (4096, 11008), (151936, 896), (50264, 768), (256, 7168),
]  # fmt: skip
_ODD = [(1000, 1001, 1002), (512, 4097, 512), (1024, 1024, 1024), (100, 2048, 8192)]
_BATCHES = [(8, 512, 512, 512), (16, 128, 4096, 128), (32, 16, 128, 2048), (8, 1000, 1000, 1000), (1024, 32, 32, 32)]


def _drawn(shape: tuple[int, ...], kind: torch.dtype | int) -> torch.Tensor:
    """Random numbers of a type, or indices below a bound."""
    device = chips.current().device_type
    if isinstance(kind, int):
        return torch.randint(0, kind, shape, device=device)
    if kind is torch.bool:
        return torch.rand(shape, device=device) > 0.5
    if not kind.is_floating_point:
        return torch.randint(0, 5, shape, dtype=kind, device=device)
    return torch.rand(shape, device=device).to(kind) + 0.1


def _case(op: str, label: str, call: Callable[..., Any], *inputs: Any, view: Callable[..., Any] | None = None) -> Case:
    """A call on tensors of drawn shapes and types, or on views of them."""

    def make() -> tuple[Any, ...]:
        tensors = tuple(_drawn(shape, kind) for shape, kind in inputs)
        seen = tensors if view is None else view(*tensors)
        return seen if isinstance(seen, tuple) else (seen,)

    return Case(op, label, make, call, call, (op,), 0.0)


def _named(shape: tuple[int, ...], dtype: torch.dtype, more: str = "") -> str:
    return f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}{', ' + more if more else ''}"


def _shapes(rng: random.Random, count: int) -> list[tuple[int, int]]:
    """Half of the shapes are from the list and half are random: 2¹⁹ to 2²⁵ elements in rows of any length."""
    shapes: list[tuple[int, int]] = rng.sample(_FLAT, count // 2)
    while len(shapes) < count:
        size, length = 2 ** rng.uniform(19, 25), _length(rng, 20)
        shapes.append((max(1, round(size / length)), length))
    return shapes


def _deep_shapes(rng: random.Random, count: int) -> list[tuple[int, int, int]]:
    """The same for shapes of three dimensions."""
    shapes: list[tuple[int, int, int]] = rng.sample(_DEEP, count // 2)
    while len(shapes) < count:
        size, rows, length = 2 ** rng.uniform(19, 25), _length(rng, 12), _length(rng, 14)
        shapes.append((max(1, round(size / rows / length)), rows, length))
    return shapes


def _length(rng: random.Random, most: int) -> int:
    """Any up to a power of two; every other time even, and then as often of 2, 4 or 8 as of 16 elements."""
    even = rng.choice((1, 1, 1, 16, 16, 2, 4, 8))
    return max(even, round(2 ** rng.uniform(1, most) / even) * even)


def _elementwise(rng: random.Random) -> Iterator[Case]:
    for op, (call, types) in _ONE.items():
        for shape in _shapes(rng, 3):
            for dtype, name in zip(rng.sample(types, 3), rng.sample(sorted(_VIEWS), 3), strict=True):
                yield _case(op, _named(shape, dtype, name), call, (shape, dtype), view=_VIEWS[name])
    for op, (call, types, numbers) in _BY.items():
        for shape, number in itertools.product(_shapes(rng, 2), numbers):
            dtype, name = rng.choice(types), rng.choice(sorted(_VIEWS))
            label = _named(shape, dtype, f"{name + ', ' if name else ''}by {number}")
            yield _case(op, label, functools.partial(_by, call, number), (shape, dtype), view=_VIEWS[name])
    for op, (call, types) in _TWO.items():
        for shape in _shapes(rng, 4):
            for dtype, name in zip(rng.sample(types, 3), rng.sample(sorted(_PAIRS), 3), strict=True):
                if name != "wider" or not op.startswith(("isclose", "bitwise")):
                    yield _case(op, _named(shape, dtype, name), call, (shape, dtype), (shape, dtype), view=_PAIRS[name])
    for shape in _shapes(rng, 6):
        dtype = rng.choice(_NUMBERS)
        label, some = _named(shape, dtype), (shape, dtype)
        yield _case("where.self", label, torch.where, (shape, torch.bool), some, some)
        yield _case("where.ScalarOther", label, lambda c, x: torch.where(c, x, 1), (shape, torch.bool), some)
        yield _case("where.ScalarSelf", label, lambda c, x: torch.where(c, 1, x), (shape, torch.bool), some)
        yield _case("triu", label, torch.triu, some)
        for dims in ([0], [1], [0, 1]):
            yield _case("flip", f"{label}, {dims}", functools.partial(torch.flip, dims=dims), some)
        yield _case("outer", label, torch.outer, ((shape[0],), dtype), ((shape[1],), dtype))


def _by(call: _Call, number: Any, x: torch.Tensor) -> Any:
    return call(x, number)


def _types(op: str) -> Sequence[torch.dtype]:
    return (torch.bool, torch.uint8) if op in _TRUTHS else _NUMBERS if op in _OF_NUMBERS else _FLOATS


def _reductions(rng: random.Random) -> Iterator[Case]:
    for op, call in _ALONG.items():
        usual = torch.bool if op in _TRUTHS else _HALF
        flat = [(shape, rng.choice((usual, _SINGLE, *_types(op))), dim) for shape in _shapes(rng, 8) for dim in (0, 1)]
        deep = [(shape, rng.choice((usual, usual, *_types(op))), dim) for shape in _deep_shapes(rng, 6) for dim in (0, 1, 2)]
        for shape, dtype, dim in [*flat, *deep]:
            yield _case(op, _named(shape, dtype, f"along {dim}"), lambda x, call=call, dim=dim: call(x, dim), (shape, dtype))
        for shape in _deep_shapes(rng, 4):
            label = _named(shape, usual, "turned, along 1")
            yield _case(op, label, lambda x, call=call: call(x, 1), (shape, usual), view=lambda x: x.transpose(0, 2))
    for op, call in _WHOLE.items():
        for shape in [(1000003,), (1 << 24,), (5000, 1001)]:
            for dtype in rng.sample(_types(op), 2):
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
    for shape in _IMAGES:
        dtype = rng.choice(_FLOATS[:3])
        weights = ((shape[1],), dtype)
        yield _case("native_group_norm", _named(shape, dtype), lambda x, w: F.group_norm(x, 2, w, w), (shape, dtype), weights)


def _products(rng: random.Random) -> Iterator[Case]:
    for (n, k), rows in itertools.product(_LINEARS, (1, 2, 8, 16, 32, rng.choice((48, 64, 128, 200, 256, 512, 1000, 1024, 2048)))):
        x = ((rows, k), _HALF)
        yield _case("mm", f"{rows}x{k}x{n} linear", torch.mm, x, ((n, k), _HALF), view=lambda x, w: (x, w.t()))
        yield _case("mm", f"{rows}x{k}x{n}", torch.mm, x, ((k, n), _HALF))
        if rows in (8, 32) or rows > 32:
            label, bias = f"{rows}x{k}x{n} linear", ((n,), _HALF)
            yield _case("addmm", label, torch.addmm, bias, x, ((n, k), _HALF), view=lambda b, x, w: (b, x, w.t()))
    for (m, k, n), dtype in itertools.product(_ODD, (_HALF, _SINGLE)):
        yield _case("mm", _named((m, k, n), dtype), torch.mm, ((m, k), dtype), ((k, n), dtype))
    for (b, m, k, n), dtype in itertools.product(_BATCHES, (_HALF, _SINGLE)):
        yield _case("bmm", _named((b, m, k, n), dtype), torch.bmm, ((b, m, k), dtype), ((b, k, n), dtype))
    for turned in (True, False) * 8:  # each item has few rows
        rows, k, n = rng.choice((1, 2, 4, 8, 16, 32, rng.randint(1, 32))), _length(rng, 13), _length(rng, 13)
        items = max(2, round(2 ** rng.uniform(19, 25) / (k * n)))
        label, few = f"{items}x{rows}x{k}x{n}", ((items, rows, k), _HALF)
        if turned:
            tall = ((items, n, k), _HALF)
            yield _case("bmm", f"{label} linear", torch.bmm, few, tall, view=lambda x, w: (x, w.transpose(1, 2)))
        else:
            yield _case("bmm", label, torch.bmm, few, ((items, k, n), _HALF))
    for (m, k), dtype in itertools.product([(100000, 33), (33, 100000), (50257, 768), (128, 16384)], (_HALF, _SINGLE)):
        yield _case("mv", _named((m, k), dtype), torch.mv, ((m, k), dtype), ((k,), dtype))


def _small_matrices(rng: random.Random) -> Iterator[Case]:
    """Folds down many matrices of a few columns, 2 to 96 MiB of them, which draws of any shape hardly meet."""
    for op, _ in itertools.product(_FOLDS, range(12)):
        dtype, length, columns = rng.choice(_types(op)), round(2 ** rng.uniform(4.4, 11.2)), round(2 ** rng.uniform(1.2, 7))
        shape = (max(2, round(2 ** rng.uniform(21, 26.6) / (length * columns * dtype.itemsize))), length, columns)
        yield _middle(op, shape, dtype)


def _middle(op: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    """A reduction along the middle dimension."""
    return _case(op, _named(shape, dtype, "along 1"), lambda x, call=_ALONG[op]: call(x, 1), (shape, dtype))


FAMILIES: dict[str, Callable[[random.Random], Iterator[Case]]] = {
    "elementwise and moves": _elementwise, "reductions, softmax, running sums": _reductions, "norms, loss, embedding": _norms,
    "products": _products, "folds down small matrices": _small_matrices,
}  # fmt: skip


def sweep_cases(seed: int) -> list[tuple[str, Case]]:
    """The families and cases of one draw. The same seed gives the same cases everywhere."""
    rng = random.Random(seed)
    return [(family, case) for family, cases in FAMILIES.items() for case in cases(rng)]


@functools.lru_cache(1)
def listed(seed: int) -> list[tuple[str, Case]]:
    """The cases of a seed, drawn once in each process."""
    return sweep_cases(seed)


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


def _rehearse_drawn(job: tuple[int, int, bool]) -> None:
    seed, index, tuning = job
    if tuning:
        tune.rehearse()
    rehearse(listed(seed)[index][1])


def _bytes(tensors: tuple[Any, ...]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def compare(family: str, case: Case) -> Compared | None:
    """Both sides of a case of the sweep, losses more carefully; nothing of one that neither reads nor writes 1 MiB."""
    inputs = case.make()
    result = case.theirs(*inputs)
    size = max(_bytes(inputs), _bytes(result if isinstance(result, tuple) else (result,)))
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
    """Times the cases of one draw. Prints the result of each family and every ratio below 0.9."""
    began = time.monotonic()
    cases = listed(args.sweep)
    chosen = picked(args.only, [case for _, case in cases])
    tuning = args.tune > 0
    compile_ahead(_rehearse_drawn, [(args.sweep, i, tuning) for i in chosen], max(120.0, args.tune))
    if tuning:
        tune.enable()
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
        counters.release()
    (args.out / "sweep.json").write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
    if tuning:
        print(f"{tune.export(args.out / 'tuned.csv')} classes of shapes tuned")
    for family in dict.fromkeys(row.family for row in found):
        ratios = [row.ratio for row in found if row.family == family]
        mean = statistics.geometric_mean(ratios)
        print(f"{family}: geometric mean {mean:.2f} over {len(ratios)}, {sum(r < 0.9 for r in ratios)} under 0.9")
    for row in sorted((row for row in found if row.ratio < 0.9), key=lambda row: row.ratio):
        print(f"{row.ratio:.2f} {row.op} {row.shape}: torch {row.torch_us:.1f} us, ours {row.ours_us:.1f}, {row.mebibytes:.1f} MiB")
    print(f"took {time.monotonic() - began:.0f} s; {failed} failed, {skipped} left out by the time budget")
    return 1 if failed else 0
