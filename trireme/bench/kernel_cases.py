"""The shapes that the operator library is timed on: those of language models, and generic ones of 64 MiB.
Knows inputs and how much work they are, never a clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from trireme import kernels
from trireme.kernels import chips

_BIG, _SMALL = (8192, 4096), (32, 4096)


@dataclass(frozen=True)
class Case:
    """One timed call. `work` is bytes moved or operations done; `enables` are the operators that `ours` replaces."""

    op: str
    label: str
    make: Callable[[], tuple[Any, ...]]
    theirs: Callable[..., Any]
    ours: Callable[..., Any]
    enables: tuple[str, ...]
    work: float
    unit: str = "GB/s"
    recorded: bool = True
    launch: bool = False


def _device() -> str:
    return chips.current().device_type


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=_device(), dtype=dtype)


def _case(op: str, label: str, make: Callable[[], tuple[Any, ...]], call: Callable[..., Any], work: float, **more: Any) -> Case:
    return Case(op, label, make, call, call, (op,), work, **more)


def pointwise_cases() -> Iterator[Case]:
    """Every elementwise operator over 32 × 4096 and 8192 × 4096 in bf16."""
    one: dict[str, Callable[..., Any]] = {
        "abs": torch.abs, "cos": torch.cos, "exp": torch.exp, "gelu": F.gelu, "neg": torch.neg, "reciprocal": torch.reciprocal,
        "relu": torch.relu, "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid, "silu": F.silu, "sin": torch.sin, "tanh": torch.tanh,
        "isfinite": torch.isfinite, "isinf": torch.isinf, "isnan": torch.isnan,
        "clamp": lambda x: x.clamp(-1, 1), "pow.Tensor_Scalar": lambda x: x**2.5, "pow.Scalar": lambda x: 2.5**x,
        "eq.Scalar": lambda x: x == 1, "ne.Scalar": lambda x: x != 1, "lt.Scalar": lambda x: x < 1, "le.Scalar": lambda x: x <= 1,
        "gt.Scalar": lambda x: x > 1, "ge.Scalar": lambda x: x >= 1,
    }  # fmt: skip
    two: dict[str, Callable[..., Any]] = {
        "add.Tensor": torch.add, "sub.Tensor": torch.sub, "mul.Tensor": torch.mul, "div.Tensor": torch.div,
        "pow.Tensor_Tensor": torch.pow, "eq.Tensor": torch.eq, "ne.Tensor": torch.ne, "lt.Tensor": torch.lt,
        "le.Tensor": torch.le, "gt.Tensor": torch.gt, "ge.Tensor": torch.ge,
        "isclose": torch.isclose, "clamp.Tensor": lambda x, y: torch.clamp(x, min=y),
    }  # fmt: skip
    booleans = {"isfinite", "isinf", "isnan", "isclose"}
    for shape in (_SMALL, _BIG):
        count, label = shape[0] * shape[1], f"{shape[0]}x{shape[1]} bf16"
        for table, inputs in ((one, 1), (two, 2)):
            for op, call in table.items():
                make = functools.partial(_positive, inputs, shape)
                result = 1 if op in booleans or op.partition(".")[0] in ("eq", "ne", "lt", "le", "gt", "ge") else 2
                yield _case(op, label, make, call, count * (2 * inputs + result), launch=shape == _SMALL)
    yield from _odd_pointwise()


def _positive(inputs: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(normal(*shape).abs() + 0.1 for _ in range(inputs))


def _odd_pointwise() -> Iterator[Case]:
    """Integers, conditions, broadcasts and crossed layouts."""
    count = _BIG[0] * _BIG[1]
    integers = lambda: tuple(torch.randint(0, 99, _BIG, device=_device(), dtype=torch.int32) for _ in range(2))  # noqa: E731
    for op, call in (("bitwise_and.Tensor", torch.bitwise_and), ("bitwise_or.Tensor", torch.bitwise_or)):
        yield _case(op, "8192x4096 int32", integers, call, count * 12)
    yield _case("bitwise_and.Scalar", "8192x4096 int32", integers, lambda x, y: x & 7, count * 8)
    and_number, or_number = torch.ops.aten.bitwise_and.Scalar_Tensor, torch.ops.aten.bitwise_or.Scalar_Tensor
    yield _case("bitwise_and.Scalar_Tensor", "8192x4096 int32", integers, lambda x, y: and_number(7, x), count * 8)
    yield _case("bitwise_or.Scalar", "8192x4096 int32", integers, lambda x, y: x | 7, count * 8)
    yield _case("bitwise_or.Scalar_Tensor", "8192x4096 int32", integers, lambda x, y: or_number(7, x), count * 8)
    yield _case("bitwise_not", "8192x4096 int32", integers, lambda x, y: ~x, count * 8)
    chosen = lambda: (normal(*_BIG) > 0, normal(*_BIG), normal(*_BIG))  # noqa: E731
    yield _case("where.self", "8192x4096 bf16", chosen, torch.where, count * 7)
    yield _case("where.ScalarSelf", "8192x4096 bf16", chosen, lambda c, x, y: torch.where(c, 1.0, y), count * 5)
    yield _case("where.ScalarOther", "8192x4096 bf16", chosen, lambda c, x, y: torch.where(c, x, 1.0), count * 5)
    yield _case("add.Tensor", "8192x4096 + row", lambda: (normal(*_BIG), normal(4096)), torch.add, count * 4)
    yield _case("add.Tensor", "8192x4096 + column", lambda: (normal(*_BIG), normal(8192, 1)), torch.add, count * 4)
    yield _case("add.Tensor", "4096x4096 + turned", lambda: (normal(4096, 4096), normal(4096, 4096).t()), torch.add, 4096**2 * 6)
    yield _case("mul.Tensor", "8192x4096 fp32", lambda: tuple(normal(2, *_BIG, dtype=torch.float32)), torch.mul, count * 12)
    yield _case("outer", "8192 x 4096 bf16", lambda: (normal(8192), normal(4096)), torch.outer, count * 2)
    yield _case("triu", "8192x4096 bf16", lambda: (normal(*_BIG),), torch.triu, count * 3)
    yield _case("flip", "8192x4096 bf16, last", lambda: (normal(*_BIG),), lambda x: x.flip(-1), count * 4)
    yield _case("flip", "8192x4096 bf16, first", lambda: (normal(*_BIG),), lambda x: x.flip(0), count * 4)
    yield _case("allclose", "8192x4096 bf16", lambda: (normal(*_BIG),), lambda x: torch.allclose(x, x), count * 4, recorded=False)


def reduction_cases() -> Iterator[Case]:
    count = _BIG[0] * _BIG[1]
    whole: dict[str, Callable[..., Any]] = {
        "sum": torch.sum, "mean": torch.mean, "prod": torch.prod, "max": torch.max, "min": torch.min,
        "any": torch.any, "all": torch.all,
    }  # fmt: skip
    for op, call in whole.items():
        yield _case(op, "8192x4096 whole", lambda: (normal(*_BIG),), call, count * 2)
    along: dict[str, Callable[..., Any]] = {
        "sum.dim_IntList": lambda x, d: x.sum(d), "mean.dim": lambda x, d: x.mean(d), "prod.dim_int": lambda x, d: x.prod(d),
        "max.dim": lambda x, d: x.max(d), "min.dim": lambda x, d: x.min(d), "amax": lambda x, d: x.amax(d),
        "argmax": lambda x, d: x.argmax(d), "any.dim": lambda x, d: x.any(d), "all.dim": lambda x, d: x.all(d),
        "any.dims": lambda x, d: x.any([d]), "all.dims": lambda x, d: x.all([d]),
        "var_mean.correction": lambda x, d: torch.var_mean(x, d),
        "linalg_vector_norm": lambda x, d: torch.linalg.vector_norm(x, dim=d),
        "cumsum": lambda x, d: x.cumsum(d),
    }  # fmt: skip
    for op, call in along.items():
        for dim in (1, 0):
            moved = count * (4 if op == "cumsum" else 2)
            make = functools.partial(lambda d: (normal(*_BIG), d), dim)
            yield _case(op, f"8192x4096 dim {dim}", make, call, moved)
    for op in ("mean.dim", "amax", "argmax", "all.dim"):  # a length that fills half a tile of powers of two
        yield _case(op, "8192x2304 dim 1", lambda: (normal(8192, 2304), 1), along[op], 8192 * 2304 * 2)
    yield _case("argmax", "32x128256", lambda: (normal(32, 128256),), lambda x: x.argmax(-1), 32 * 128256 * 2, launch=True)
    yield _case("sum.dim_IntList", "32x4096 dim 1", lambda: (normal(*_SMALL),), lambda x: x.sum(-1), 32 * 4096 * 2, launch=True)
    yield _case("cumsum", "33554432", lambda: (normal(1 << 25),), lambda x: x.cumsum(0), (1 << 25) * 4)


def row_cases() -> Iterator[Case]:
    """Softmax, norms, loss, lookups and random numbers."""
    weights = lambda *shape: (normal(*shape), normal(shape[-1]), normal(shape[-1]))  # noqa: E731
    for shape in ((8192, 4096), (32, 128256), (32, 4096)):
        label, moved = f"{shape[0]}x{shape[1]}", shape[0] * shape[1] * 4
        small = shape == (32, 4096)
        make = functools.partial(lambda s: (normal(*s),), shape)
        yield _case("softmax.int", label, make, lambda x: x.softmax(-1), moved, launch=small)
        yield _case("log_softmax.int", label, make, lambda x: x.log_softmax(-1), moved, launch=small)
    yield _case("softmax.int", "32x4096x256 dim 1", lambda: (normal(32, 4096, 256),), lambda x: x.softmax(1), (1 << 25) * 4)
    for shape in ((1, 4096), (32, 4096), (256, 4096), (8192, 4096)):
        label, moved = f"{shape[0]}x{shape[1]}", shape[0] * shape[1] * 4
        rows = functools.partial(weights, *shape)
        small = shape == (32, 4096)
        yield _case("rms_norm", label, rows, lambda x, w, b: F.rms_norm(x, w.shape, w, 1e-5), moved, launch=small)
        yield _case("native_layer_norm", label, rows, lambda x, w, b: F.layer_norm(x, w.shape, w, b), moved, launch=small)
    images = lambda: (normal(32, 64, 128, 128), normal(64))  # noqa: E731
    yield _case("native_group_norm", "32x64x128x128", images, lambda x, w: F.group_norm(x, 8, w, w), (1 << 25) * 4)
    losses = lambda: (normal(2048, 128256), torch.randint(0, 128256, (2048,), device=_device()))  # noqa: E731
    yield _case("cross_entropy_loss", "2048x128256", losses, F.cross_entropy, 2048 * 128256 * 2)
    table = lambda: (normal(128256, 4096), torch.randint(0, 128256, (8192,), device=_device()))  # noqa: E731
    yield _case("embedding", "8192 of 128256x4096", table, lambda w, i: F.embedding(i, w), 8192 * 4096 * 4)
    few = lambda: (normal(128256, 4096), torch.randint(0, 128256, (32,), device=_device()))  # noqa: E731
    yield _case("embedding", "32 of 128256x4096", few, lambda w, i: F.embedding(i, w), 32 * 4096 * 4, launch=True)
    big: dict[str, Any] = {"device": _device(), "dtype": torch.bfloat16}
    yield _case("rand", "8192x4096", tuple, lambda: torch.rand(_BIG, **big), (1 << 25) * 2, recorded=False)
    yield _case("randn", "8192x4096", tuple, lambda: torch.randn(_BIG, **big), (1 << 25) * 2, recorded=False)
    yield _case("rand_like", "8192x4096", lambda: (normal(*_BIG),), torch.rand_like, (1 << 25) * 2, recorded=False)
    dropped = lambda x: torch.native_dropout(x, 0.1, True)  # noqa: E731
    yield _case("native_dropout", "8192x4096", lambda: (normal(*_BIG),), dropped, (1 << 25) * 5, recorded=False)


_LINEAR = [(4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096), (896, 9728), (4864, 896), (4096, 128256)]


def product_shapes() -> list[tuple[int, int, int]]:
    """rows, inner, columns of the linears that tuning ships for, those first that gain most."""
    first = [(256, 4096, 4096), (16384, 4096, 14336), (32, 4096, 4096)]
    few = [(rows, k, n) for k, n in ((4096, 28672), (4096, 6144), (896, 9728)) for rows in (32, 16)]
    more = [(16, 4096, 4096), (64, 4096, 4096), (128, 4096, 4096), (256, 4096, 14336), (4096, 4096, 4096), (64, 4096, 14336)]
    return [*first, *few, *more, (8192, 8192, 8192), (1024, 4096, 4096)]


def _batch(items: int, m: int, k: int, n: int, turned: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(items, m, k), normal(items, n, k).transpose(1, 2) if turned else normal(items, k, n)


def product_cases() -> Iterator[Case]:
    for rows, k, n in [
        *[(r, 4096, 4096) for r in (1, 2, 4, 8, 16, 32, 64, 256, 1024)],
        *[(r, k, n) for r in (1, 16, 32) for k, n in _LINEAR[1:]],
        *[(r, 5120, 5120) for r in (1, 2, 16, 32, 128, 256, 1024)],
        *[(r, 8192, 8192) for r in (2, 32)],
        *[(512, 4096, 4096), (2048, 3584, 4608), (4096, 5120, 5120)],
    ]:
        make = functools.partial(lambda r, i, o: (normal(r, i), normal(o, i).t()), rows, k, n)
        if rows <= 64:
            yield _case("mm", f"{rows}x{k}x{n} linear", make, torch.mm, (rows * (k + n) + k * n) * 2, launch=(rows, n) == (1, 4096))
        else:
            yield _case("mm", f"{rows}x{k}x{n} linear", make, torch.mm, 2 * rows * k * n, unit="TFLOP/s")
    for rows, k, n in [(r, 4096, n) for n in (4096, 11008) for r in (1, 2, 16, 32)]:
        make = functools.partial(lambda r, i, o: (normal(r, i), normal(i, o)), rows, k, n)
        yield _case("mm", f"{rows}x{k}x{n}", make, torch.mm, (rows * (k + n) + k * n) * 2)
    for m, k, n in ((4096, 4096, 4096), (8192, 8192, 8192), (16384, 4096, 14336)):
        work = 2 * m * k * n
        plain = functools.partial(lambda a, b, c: (normal(a, b), normal(b, c)), m, k, n)
        turned = functools.partial(lambda a, b, c: (normal(a, b), normal(c, b).t()), m, k, n)
        biased = functools.partial(lambda a, b, c: (normal(c), normal(a, b), normal(c, b).t()), m, k, n)
        yield _case("mm", f"{m}x{k}x{n}", plain, torch.mm, work, unit="TFLOP/s")
        yield _case("mm", f"{m}x{k}x{n} linear", turned, torch.mm, work, unit="TFLOP/s")
        yield _case("addmm", f"{m}x{k}x{n} linear", biased, torch.addmm, work, unit="TFLOP/s")
    singles = lambda: tuple(normal(2, 4096, 4096, dtype=torch.float32))  # noqa: E731
    yield _case("mm", "4096x4096x4096 fp32", singles, torch.mm, 2 * 4096**3, unit="TFLOP/s")
    single_rows = lambda: (normal(16, 4096, dtype=torch.float32), normal(4096, 4096, dtype=torch.float32).t())  # noqa: E731
    yield _case("mm", "16x4096x4096 linear fp32", single_rows, torch.mm, 4096**2 * 4)
    for rows in (1, 32):
        biased = functools.partial(lambda r: (normal(4096), normal(r, 4096), normal(4096, 4096).t()), rows)
        yield _case("addmm", f"{rows}x4096x4096 linear", biased, torch.addmm, 4096**2 * 2)
    for batch, m, k, n in ((4, 4096, 4096, 4096), (32, 2048, 128, 2048), (256, 512, 64, 512), (8, 1000, 1000, 1000)):
        make = functools.partial(_batch, batch, m, k, n)
        yield _case("bmm", f"{batch}x{m}x{k}x{n}", make, torch.bmm, 2 * batch * m * k * n, unit="TFLOP/s")
    # One step's queries by keys and weights by values, in 32 heads and in 256, and what a layer of eight experts has.
    for batch, m, k, n in ((32, 1, 128, 4096), (32, 1, 4096, 128), (256, 8, 128, 4096), (256, 8, 4096, 128), (8, 16, 4096, 4096)):
        make = functools.partial(_batch, batch, m, k, n, turned=k <= n)
        label, moved = f"{batch}x{m}x{k}x{n}{' linear' if k <= n else ''}", batch * (m * (k + n) + k * n) * 2
        yield _case("bmm", label, make, torch.bmm, moved)
    yield _case("mv", "4096x4096", lambda: (normal(4096, 4096), normal(4096)), torch.mv, 4096**2 * 2)
    yield _case("mv", "28672x4096", lambda: (normal(28672, 4096), normal(4096)), torch.mv, 4096 * 28672 * 2)


def _rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The rotation as models write it in torch."""
    c, s = cos[at][:, None], sin[at][:, None]
    c, s = torch.cat([c, c], -1), torch.cat([s, s], -1)
    return tuple(x * c + torch.cat([-x[..., 64:], x[..., :64]], -1) * s for x in (q, k))


def fused_cases() -> Iterator[Case]:
    """The rows of the fused table: tokens 1, 32, 256, 8192."""
    add_rms = lambda x, r, w: F.rms_norm(r.add_(x), w.shape, w, 1e-6)  # noqa: E731
    add_layer = lambda x, r, w: F.layer_norm(r.add_(x), w.shape, w, w)  # noqa: E731
    for rows in (1, 32, 256, 8192):
        gates = functools.partial(lambda r: (normal(r, 28672),), rows)
        norms = functools.partial(lambda r: (normal(r, 4096), normal(r, 4096), normal(4096)), rows)
        turns = functools.partial(_rotary_inputs, rows)
        gated, normed, turned = rows * 14336 * 6, rows * 4096 * 8, rows * 40 * 128 * 4
        halves = lambda f: lambda x: f(x[:, :14336]) * x[:, 14336:]  # noqa: E731
        yield Case("silu_and_mul", f"{rows}x14336", gates, halves(F.silu), kernels.silu_and_mul, (), gated, launch=rows == 32)
        yield Case("gelu_and_mul", f"{rows}x14336", gates, halves(F.gelu), kernels.gelu_and_mul, (), gated)
        yield Case("skip_rms_norm", f"{rows}x4096", norms, add_rms, kernels.skip_rms_norm, (), normed, launch=rows == 32)
        ours = lambda x, r, w: kernels.skip_layer_norm(x, r, w, w)  # noqa: E731
        yield Case("skip_layer_norm", f"{rows}x4096", norms, add_layer, ours, (), normed)
        yield Case(
            "rotary_embedding", f"{rows}x(32+8)x128", turns, _rotated, kernels.rotary_embedding, (), turned, launch=rows == 32
        )


def _rotary_inputs(rows: int) -> tuple[torch.Tensor, ...]:
    cos, sin = normal(2, 8192, 64)
    return normal(rows, 32, 128), normal(rows, 8, 128), cos, sin, torch.arange(rows, device=_device())


def all_cases() -> Iterator[Case]:
    """Products and fused steps first, so that a short budget still measures what matters most. Every operator is also timed as it
    is launched, by its smallest case if none is said; but for allclose, which waits for the device."""
    cases = [*product_cases(), *fused_cases(), *row_cases(), *reduction_cases(), *pointwise_cases()]
    said = {case.op for case in cases if case.launch} | {"allclose"}
    smallest = {case.op: id(case) for case in sorted(cases, key=lambda case: -case.work) if case.op not in said}
    yield from (replace(case, launch=True) if smallest.get(case.op) == id(case) else case for case in cases)
