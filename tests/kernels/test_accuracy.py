"""Every operator against torch in float64, over types, shapes and layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import check

from trireme.kernels import chips
from trireme.kernels.aten import registry
from trireme.kernels.aten.folds import fold, moments, reduce
from trireme.kernels.aten.rowwise import loss, softmax

pytestmark = pytest.mark.wide

INTERPRETED = chips.current().interpreted
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES, torch.float64]
COMMON = (torch.float32, torch.bfloat16)
INTEGERS = [torch.int64, torch.int32, torch.uint8, torch.bool]
Case = tuple[tuple[Any, ...], dict[str, Any]]


def aten(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str, positive: bool = False) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape, device=device) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(1 if positive else (0 if dtype is torch.uint8 else -5), 6, shape, device=device).to(dtype)
    x = torch.randn(shape, device=device, dtype=torch.float32)
    return (x.abs() + 0.1 if positive else x).to(dtype)


def layouts(dtype: torch.dtype, device: str, positive: bool = False) -> Iterator[torch.Tensor]:
    """The same kinds of tensors that models hand around: dense, odd, tiny, empty, turned, sliced, expanded; large on a GPU."""
    yield draw((5, 9), dtype, device, positive)
    yield draw((3, 4, 5), dtype, device, positive).permute(2, 0, 1)
    if dtype not in COMMON:
        return  # every build costs seconds, and layout does not depend on the type
    for shape in [(), (7,), (0, 3)]:
        yield draw(shape, dtype, device, positive)
    yield draw((6, 20), dtype, device, positive)[1::2, 1:17]
    yield draw((1, 6), dtype, device, positive).expand(4, 6)
    if not INTERPRETED:
        yield draw((1 << 20,), dtype, device, positive)
        yield draw((1000003,), dtype, device, positive)[1:]
        yield draw((129, 4100), dtype, device, positive)
        yield draw((512, 768), dtype, device, positive).t()


UNARY = ["abs", "cos", "exp", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "sin", "tanh", "isfinite", "isinf", "isnan"]
FLOAT_ONLY = ["gelu", "silu"]


@pytest.mark.parametrize("name", UNARY + FLOAT_ONLY + ["bitwise_not"])
def test_unary(name: str, device: str) -> None:
    types = {"bitwise_not": INTEGERS}.get(name, FLOATS if name in FLOAT_ONLY else [*FLOATS, torch.int64, torch.uint8])
    for dtype in types:
        for x in layouts(dtype, device, positive=name in ("rsqrt", "reciprocal")):
            check(f"{name} {dtype} {tuple(x.shape)}", registry.OPERATORS[name].function, aten(name), (x,), {}, layout=True)


@pytest.mark.parametrize("name", UNARY + FLOAT_ONLY)
def test_unary_special_values(name: str, device: str) -> None:
    x = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-30, -1e30, 88.0, -104.0, 0.3, -0.24], device=device)
    check(name, registry.OPERATORS[name].function, aten(name), (x,), {})
    check(name, registry.OPERATORS[name].function, aten(name), (x.bfloat16(),), {})


def test_gelu_by_tanh(device: str) -> None:
    for dtype in FLOATS:
        x = draw((33,), dtype, device) * 4
        check("gelu", registry.OPERATORS["gelu"].function, aten("gelu"), (x,), {"approximate": "tanh"})


PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float32),
    (torch.int64, torch.int64),
    (torch.int32, torch.float16),
    (torch.uint8, torch.int32),
]


def operand_pairs(a: torch.dtype, b: torch.dtype, device: str, positive: bool = False) -> Iterator[tuple[Any, Any]]:
    yield draw((5, 9), a, device, positive), draw((5, 9), b, device, positive)
    yield draw((5, 1, 9), a, device, positive), draw((4, 1), b, device, positive)
    if a not in COMMON or a is not b:
        return
    yield draw((9, 5), a, device, positive).t(), draw((9,), b, device, positive)
    yield draw((3, 4), a, device, positive), draw((), b, device, positive)
    yield draw((0, 4), a, device, positive), draw((4,), b, device, positive)
    if not INTERPRETED:
        yield draw((300, 1001), a, device, positive), draw((1001,), b, device, positive)
        yield draw((1 << 18,), a, device, positive), draw((1 << 18,), b, device, positive)
        yield draw((64, 512), a, device, positive), draw((512, 64), b, device, positive).t()


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"])
def test_binary(name: str, device: str) -> None:
    full = f"{name}.Tensor"
    for a, b in PAIRS:
        for x, y in operand_pairs(a, b, device, positive=name == "div"):
            check(f"{full} {a} {b}", registry.OPERATORS[full].function, aten(full), (x, y), {}, layout=True)
    x = draw((6, 7), torch.float32, device)
    for number in (2, 2.5, True):
        expected = getattr(torch, name)(x, number) if not (name == "sub" and number is True) else None
        if expected is not None:
            torch.testing.assert_close(registry.OPERATORS[full].function(x, number), expected)
    if name in ("add", "sub"):
        check(full, registry.OPERATORS[full].function, aten(full), (x, x + 1), {"alpha": 2.5})
        i = draw((6,), torch.int32, device)
        check(full, registry.OPERATORS[full].function, aten(full), (i, i), {"alpha": 3})


@pytest.mark.parametrize("name", ["add.Tensor", "mul.Tensor"])
def test_boolean_arithmetic(name: str, device: str) -> None:
    x, y = draw((40,), torch.bool, device), draw((40,), torch.bool, device)
    check(name, registry.OPERATORS[name].function, aten(name), (x, y), {})


def test_comparisons_with_numbers(device: str) -> None:
    for name, dtype, number in itertools.product(["eq", "ne", "lt", "le", "gt", "ge"], [torch.float32, torch.int64], [1, 0.5]):
        x = draw((5, 9), dtype, device)
        check(name, registry.OPERATORS[f"{name}.Scalar"].function, aten(f"{name}.Scalar"), (x, number), {})


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or"])
def test_bitwise(name: str, device: str) -> None:
    for dtype in INTEGERS:
        x, y = draw((5, 9), dtype, device), draw((9,), dtype, device)
        check(name, registry.OPERATORS[f"{name}.Tensor"].function, aten(f"{name}.Tensor"), (x, y), {})
        number = True if dtype is torch.bool else 3
        check(name, registry.OPERATORS[f"{name}.Scalar"].function, aten(f"{name}.Scalar"), (x, number), {})
        check(name, registry.OPERATORS[f"{name}.Scalar_Tensor"].function, aten(f"{name}.Scalar_Tensor"), (number, x), {})


def test_pow(device: str) -> None:
    tensors, scalar, number = (registry.OPERATORS[f"pow.{o}"].function for o in ("Tensor_Tensor", "Tensor_Scalar", "Scalar"))
    for dtype in FLOATS:
        x, y = draw((5, 9), dtype, device, positive=True), draw((9,), dtype, device)
        check("pow", tensors, aten("pow.Tensor_Tensor"), (x, y), {}, length=64)
        for exponent in (2, 3, 0.5, -0.5, -1.5, 0, 1, -1, -2, -3):
            check(f"pow {exponent}", scalar, aten("pow.Tensor_Scalar"), (x, exponent), {}, length=64)
        check("pow", number, aten("pow.Scalar"), (2.5, y), {}, length=64)
    signs = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, float("inf"), float("-inf"), float("nan")], device=device)
    check("pow", tensors, aten("pow.Tensor_Tensor"), (signs[:, None], signs[None, :]), {})
    for exponent in (0, 1, 0.5, -0.5, 3):
        check(f"pow {exponent}", scalar, aten("pow.Tensor_Scalar"), (signs, exponent), {})
    x, y = draw((5, 9), torch.int64, device), draw((9,), torch.int64, device).abs()
    check("pow", tensors, aten("pow.Tensor_Tensor"), (x, y), {})
    check("pow", scalar, aten("pow.Tensor_Scalar"), (x, 3), {})


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_powers_follow_the_rules_for_signs(dtype: torch.dtype, device: str) -> None:
    sizes = [0.0, 0.5, 1.0, 1.0078125, 2.0, 2.5, 2.75, 3.0, 255.0, 4097.0, float("inf"), float("nan")]
    if dtype is torch.float32:
        sizes += [1e-38, 2.0**22 + 0.5, 2.0**23 + 1, 2.0**24 - 1, 2.0**24, 1e30, 3e38]
    x = torch.tensor([*sizes, *(-v for v in sizes)], device=device).to(dtype)
    plain = x[(x == 0) & ~torch.signbit(x) | ((x.abs() > 2e-38) & (x.abs() < 1e38))]  # which ask for less than all the rules
    for numbers in (x, plain, plain[plain != 0], plain[plain >= 0], plain[plain > 0]):
        left, right = torch.broadcast_tensors(numbers[:, None], plain[None, :] if numbers is not x else x[None, :])
        got = registry.OPERATORS["pow.Tensor_Tensor"].function(left, right)
        exact = torch.pow(left.double(), right.double()).to(dtype)
        torch.testing.assert_close(got, exact, rtol=8 * torch.finfo(dtype).eps, atol=0, equal_nan=True)
        assert bool(((torch.signbit(got) == torch.signbit(exact)) | exact.isnan()).all())


@pytest.mark.parametrize("base, exponent", [((0.1, 1.1), 1.1), ((0.5, 2.0), 120.0), ((0.999, 1.001), 6e4), ((1e-30, 1e30), 1.2)])
def test_powers_of_floats_are_as_near_as_the_device_librarys(base: tuple[float, float], exponent: float, device: str) -> None:
    """Beside numbers that have rules of their own, too."""
    x = torch.empty(1 << 13, device=device).uniform_(*map(math.log, base)).exp()
    y = torch.empty(1 << 13, device=device).uniform_(-exponent, exponent)
    for first in (float(x[0]), 0.0, -1.0, float("inf")):
        x[0] = first
        exact = torch.pow(x.double(), y.double())
        inside = (exact > 1.2e-38) & (exact < 3.4e38)
        got = registry.OPERATORS["pow.Tensor_Tensor"].function(x, y)
        off = (got.double() - exact).abs() / exact
        assert float(off[inside].max()) < 8 * torch.finfo(torch.float32).eps
    small = torch.arange(1, 20, device=device, dtype=torch.float32)
    cubes = registry.OPERATORS["pow.Tensor_Tensor"].function(small, torch.full_like(small, 3.0))
    torch.testing.assert_close(cubes, small**3, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_has_its_tanh_its_inverse_and_its_opposite(dtype: torch.dtype, device: str) -> None:
    """All 65536 of them, to the last place, zeros with their sign."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    for name in ("tanh", "reciprocal", "neg"):
        got, exact = registry.OPERATORS[name].function(x), getattr(torch, name)(x.double()).to(dtype)
        torch.testing.assert_close(got, exact, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)
        assert bool(((torch.signbit(got) == torch.signbit(exact)) | exact.isnan()).all())


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_angles_of_all_sizes(name: str, device: str) -> None:
    for dtype, limit in ((torch.float16, 65504.0), (torch.bfloat16, 65000.0), (torch.bfloat16, float("inf"))):
        x = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
        x = x[x.abs() <= limit]
        got = registry.OPERATORS[name].function(x)
        exact = getattr(torch, name)(x.double())
        torch.testing.assert_close(got.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_angles_of_float64(name: str, device: str) -> None:
    """To a few units in the last place, beside multiples of π/2 too; those beyond 2¹⁹ go another way, with all of their program."""
    beside = torch.arange(-2000, 2000, dtype=torch.float64) * (math.pi / 2)
    any_size = torch.randn(2000, dtype=torch.float64) * torch.logspace(-9, 5, 2000, dtype=torch.float64)
    few = torch.tensor([0.0, -0.0, 1e-300, 524287.9, -524287.9, math.nan], dtype=torch.float64)
    for x in (beside, beside * 83 + 1e-9, any_size, few, torch.tensor([1e6, 1e22, 1e300, math.inf, 1.0], dtype=torch.float64)):
        got, exact = registry.OPERATORS[name].function(x.to(device)).cpu(), getattr(torch, name)(x)
        torch.testing.assert_close(got, exact, rtol=2e-15, atol=0, equal_nan=True)
        assert not bool((got.abs() > 1).any())
        assert bool(((torch.signbit(got) == torch.signbit(exact)) | exact.isnan()).all())


def test_where(device: str) -> None:
    function = registry.OPERATORS["where.self"].function
    for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.bool]:
        condition = draw((5, 1), torch.bool, device)
        x, y = draw((5, 9), dtype, device), draw((9,), dtype, device)
        check("where", function, aten("where.self"), (condition, x, y), {})
    check("where", function, aten("where.ScalarSelf"), (condition, 2.5, draw((9,), torch.float16, device)), {})
    check("where", function, aten("where.ScalarOther"), (condition, draw((9,), torch.int32, device), 2.5), {})


def test_clamp(device: str) -> None:
    function = registry.OPERATORS["clamp"].function
    for dtype in [torch.float32, torch.bfloat16, torch.int64]:
        x = draw((5, 9), dtype, device)
        for bounds in ((-1, 1), (None, 0), (0, None), (1, -1), (0.5, None)):
            check("clamp", function, aten("clamp"), (x, *bounds), {})
        check("clamp.Tensor", function, aten("clamp.Tensor"), (x, draw((9,), dtype, device), None), {})
        check("clamp.Tensor", function, aten("clamp.Tensor"), (x, draw((5, 1), dtype, device), draw((9,), dtype, device)), {})
    x = torch.tensor([float("nan"), 1.0, 5.0], device=device)
    check("clamp", function, aten("clamp"), (x, 0.0, 2.0), {})


def reducible(dtype: torch.dtype, device: str) -> Iterator[tuple[torch.Tensor, list[list[int]]]]:
    yield draw((3, 4, 5), dtype, device), [[0], [1], [-1], [0, 2], [0, 1, 2]]
    yield draw((4, 6), dtype, device).t(), [[0], [1]]
    yield draw((6, 40), dtype, device)[:, ::2], [[0], [1]]
    if not INTERPRETED:
        yield draw((7, 70001), dtype, device), [[0], [1], [0, 1]]
        yield draw((33, 64, 129), dtype, device), [[1], [0, 2]]
        yield draw((5000, 256), dtype, device), [[0]]


@pytest.mark.parametrize(
    "name", ["sum.dim_IntList", "mean.dim", "amax", "any.dims", "all.dims", "linalg_vector_norm", "var_mean.correction"]
)
def test_reductions_over_dims(name: str, device: str) -> None:
    function = registry.OPERATORS[name].function
    floats = [torch.float32, torch.bfloat16] if INTERPRETED else FLOATS
    only_floats = name in ("mean.dim", "linalg_vector_norm", "var_mean.correction")
    for dtype in floats if only_floats else [*floats, torch.int64, torch.bool, torch.uint8]:
        for x, choices in reducible(dtype, device):
            for dims, keepdim in itertools.product(choices, [False, True]):
                if INTERPRETED and keepdim and dims != [1]:
                    continue
                args: tuple[Any, ...] = (x, 2, dims) if name == "linalg_vector_norm" else (x, dims)
                kwargs = {"keepdim": keepdim}
                check(f"{name} {dtype} {tuple(x.shape)} {dims}", function, aten(name), args, kwargs, length=x.numel())


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "any", "all"])
def test_whole_reductions(name: str, device: str) -> None:
    function = registry.OPERATORS[name].function
    for dtype in [torch.float32, torch.bfloat16] if name == "mean" else [torch.float32, torch.bfloat16, torch.int64, torch.bool]:
        shapes = [(), (1,), (7, 9)] if INTERPRETED or name == "prod" else [(), (1,), (7, 9), (1 << 20,), (1001, 1003)]
        for shape in shapes:
            x = draw(shape, dtype, device)
            check(f"{name} {dtype} {shape}", function, aten(name), (x,), {}, length=x.numel())
    if name not in ("max", "min"):
        check(name, function, aten(name), (torch.empty(0, device=device),), {})
        check(name, function, aten(name), (torch.empty((3, 0), device=device),), {})
    else:
        special = torch.tensor([1.0, float("nan"), float("inf")], device=device)
        check(name, function, aten(name), (special,), {})
    if name in ("sum", "mean", "prod"):
        check(name, function, aten(name), (draw((5,), torch.bfloat16, device),), {"dtype": torch.float32})


@pytest.mark.parametrize("order", [0, 1, 2, 3.5, -1, float("inf"), float("-inf")])
def test_vector_norms(order: float, device: str) -> None:
    function = registry.OPERATORS["linalg_vector_norm"].function
    for dtype in [torch.float32, torch.bfloat16]:
        x = draw((6, 33), dtype, device, positive=True)
        for dims in (None, [0], [-1]):
            check(f"norm {order}", function, aten("linalg_vector_norm"), (x, order, dims), {}, length=200)
    check("norm", function, aten("linalg_vector_norm"), (x, order, [1]), {"dtype": torch.float32}, length=200)


@pytest.mark.parametrize("name", ["max.dim", "min.dim", "prod.dim_int", "argmax"])
def test_reductions_over_one_dim(name: str, device: str) -> None:
    function = registry.OPERATORS[name].function
    for dtype in [torch.float32, torch.bfloat16, torch.int64]:
        for shape in [(3, 4, 5), (1, 7)] + ([] if INTERPRETED or name == "prod.dim_int" else [(5, 100003), (1 << 12, 65)]):
            # Distinct values: torch leaves the choice among equals open.
            count = max(1, torch.Size(shape).numel())
            x = (torch.randperm(count, device=device).view(shape) - count // 2).to(
                dtype if dtype is not torch.bfloat16 or count < 256 else torch.float32
            )
            if name == "prod.dim_int":
                x = x.clamp(-3, 3)
            for dim, keepdim in itertools.product(range(-len(shape), len(shape)), [False, True]):
                check(f"{name} {shape} {dim}", function, aten(name), (x, dim, keepdim), {}, length=16)
    if name != "prod.dim_int":
        x = torch.tensor([[1.0, float("nan"), 3.0], [2.0, 2.0, 2.0], [float("-inf")] * 3], device=device)
        check(name, function, aten(name), (x, 1), {})
    if name == "argmax":
        check(name, function, aten(name), (draw((9, 5), torch.float32, device),), {})


def test_cumsum(device: str) -> None:
    function = registry.OPERATORS["cumsum"].function
    for dtype in [torch.float32, torch.bfloat16, torch.int32, torch.bool]:
        for shape in [(), (9,), (3, 4, 5), (0, 2)] + ([] if INTERPRETED else [(4, 50001), (300000,), (700, 33)]):
            x = draw(shape, dtype, device)
            for dim in range(-max(1, len(shape)), max(1, len(shape))):
                check(f"cumsum {shape} {dim}", function, aten("cumsum"), (x, dim), {}, length=max(1, x.numel()))
    check("cumsum", function, aten("cumsum"), (draw((5, 6), torch.int32, device), 0), {"dtype": torch.float32})


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int"])
def test_softmax(name: str, device: str) -> None:
    function = registry.OPERATORS[name].function
    for dtype in [torch.float32, torch.bfloat16] if INTERPRETED else FLOATS:
        for shape in [(), (9,), (3, 4, 5), (0, 2), (2, 17000)] + ([] if INTERPRETED else [(300, 4096), (3, 50257), (64, 3, 129)]):
            x = draw(shape, dtype, device) * 3
            for dim in [-1] if INTERPRETED and x.numel() > 1000 else range(-max(1, len(shape)), max(1, len(shape))):
                check(f"{name} {shape} {dim}", function, aten(name), (x, dim), {}, length=16)
    check(name, function, aten(name), (draw((4, 6), torch.bfloat16, device), 1), {"dtype": torch.float32}, length=16)
    special = torch.tensor(
        [[float("-inf")] * 3, [0.0, float("-inf"), 1.0], [float("nan"), 0.0, 0.0], [float("inf"), 0.0, 1.0]], device=device
    )
    check(name, function, aten(name), (special, 1), {})
    check(name, function, aten(name), (draw((5, 6), torch.float32, device).t(), 0), {}, length=16)


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int"])
def test_softmax_of_long_rows_side_by_side(name: str, device: str) -> None:
    function = registry.OPERATORS[name].function
    for shape in [(2, 1100, 40)] if INTERPRETED else [(2, 1100, 40), (32, 4096, 256), (3, 20000, 33)]:
        x = draw(shape, torch.float32 if INTERPRETED else torch.bfloat16, device) * 3
        x[0, 700:, 3], x[0, :, 4], x[1, 5, 6], x[1, 8, 7] = float("-inf"), float("-inf"), float("inf"), float("nan")
        for _ in range(3):  # counters are left as they were found
            check(f"{name} {shape}", function, aten(name), (x, 1), {}, length=16)


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int"])
def test_softmax_of_few_long_rows_side_by_side(name: str, device: str) -> None:
    """Several programs share each, and the result lies as torch's."""
    function = registry.OPERATORS[name].function
    for shape in [(301, 3), (2, 130, 5)] if INTERPRETED else [(301, 3), (2, 130, 5), (70001, 14), (3, 9000, 33)]:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = draw(shape, dtype, device) * 3
            x[..., 7, 0], x[..., 5, 1] = float("-inf"), float("nan")
            dim = len(shape) - 2
            check(f"{name} {shape}", function, aten(name), (x, dim), {}, length=16)
            check(f"{name} {shape}", function, aten(name), (x.transpose(0, 1), 1 - dim), {}, length=16)
            assert function(x, dim).stride() == torch.softmax(x, dim).stride()


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int"])
def test_softmax_of_long_columns_that_are_not_finite(name: str, device: str) -> None:
    """Of a few columns in lines of the matrix, and of many that are read twice: what is infinite or not a number may come at any
    place, before and after what is."""
    function, inf, nan = registry.OPERATORS[name].function, math.inf, math.nan
    for shape, dtype in (((3, 700, 6), torch.float32), ((3, 300, 6), torch.float64), ((2, 600, 40), torch.float64)):
        x = draw(shape, dtype, device) * 3
        for column, (place, value) in enumerate(((0, -inf), (5, nan), (slice(None), -inf), (-1, -inf), (7, inf))):
            x[0, place, column] = value
        x[1, :299, 0], x[1, 2, 1], x[1, 4, 1], x[1, 2, 2], x[1, 4, 2] = -inf, inf, inf, nan, inf
        check(f"{name} {shape}", function, aten(name), (x, 1), {}, length=16)


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int"])
def test_softmax_of_rows_in_another_order_than_their_results(name: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Copied first if short, and the result lies as torch's."""
    function, copies = registry.OPERATORS[name].function, []
    monkeypatch.setattr(softmax, "_COPIED", 1)
    monkeypatch.setattr(softmax, "same", lambda x, out, same=softmax.same: copies.append(out.shape) or same(x, out=out))
    shapes = [(3, 300, 4), (5, 7, 9), (40, 30, 3)] if INTERPRETED else [(9, 862, 108), (1000, 16, 32), (64, 77, 99)]
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16, torch.float64)):
        x = draw(shape, dtype, device).transpose(0, 2) * 3
        x[1, 2, 0], x[1, 3, 1] = float("-inf"), float("nan")
        check(f"{name} {shape}", function, aten(name), (x, 1), {}, length=16)
        assert function(x, 1).stride() == torch.softmax(x, 1).stride()
    assert {tuple(shape)[::-1] for shape in copies} == {shape for shape in shapes if shape[1] <= 16}


def test_group_norm_of_long_groups(device: str) -> None:
    function = registry.OPERATORS["native_group_norm"].function
    for items, channels, groups in [(2, 6, 2)] if INTERPRETED else [(2, 6, 2), (32, 64, 8)]:
        x, w = draw((items, channels, 64, 128), torch.float32, device) * 2 + 5, draw((channels,), torch.float32, device)
        for _ in range(2):
            check(
                "group_norm", function, aten("native_group_norm"), (x, w, None, items, channels, 8192, groups, 1e-5), {}, length=64
            )


def test_norms(device: str) -> None:
    layer, rms, group = (registry.OPERATORS[n].function for n in ("native_layer_norm", "rms_norm", "native_group_norm"))
    for dtype in [torch.float32, torch.float64] if INTERPRETED else FLOATS:
        for shape in [(5, 9), (2, 3, 16), (2, 17000)] + ([] if INTERPRETED else [(300, 4096), (4096, 100)]):
            x, w, b = draw(shape, dtype, device) + 1, draw(shape[-1:], dtype, device), draw(shape[-1:], dtype, device)
            for weight, bias in ((w, b), (None, None), (w, None)):
                args = (x, list(shape[-1:]), weight, bias, 1e-5)
                # Only the first result: torch keeps the statistics of half types in another type on every device.
                check("layer_norm", lambda *a: layer(*a)[0], lambda *a: F.layer_norm(*a), args, {}, length=64)
            check("rms_norm", rms, aten("rms_norm"), (x, list(shape[-1:]), w, 1e-5), {}, length=64)
    x, w = draw((2, 6, 4, 5), torch.float32, device), draw((6,), torch.float32, device)
    check("group_norm", group, aten("native_group_norm"), (x, w, w, 2, 6, 20, 3, 1e-5), {}, length=64)
    check("group_norm", group, aten("native_group_norm"), (x, None, None, 2, 6, 20, 2, 1e-5), {}, length=64)
    check("layer_norm", layer, aten("native_layer_norm"), (x, [4, 5], None, None, 1e-5), {}, length=64)
    check("layer_norm", layer, aten("native_layer_norm"), (x.transpose(2, 3), [5, 4], None, None, 1e-5), {}, length=64)


SIZES = [(1, 300, 70), (3, 70, 40), (20, 100, 130), (100, 50, 90), (130, 70, 1), (90, 40, 20), (3, 0, 4), (0, 4, 5)]
GPU_SIZES = [
    (1, 4096, 6144),
    (2, 896, 9728),
    (4, 4096, 4096),
    (8, 14336, 4096),
    (16, 4096, 1000),
    (33, 513, 4096),
    (64, 4096, 4096),
]
GPU_SIZES += [(256, 512, 384), (1000, 1024, 2056), (4096, 4096, 4096), (777, 333, 555), (4096, 4096, 1), (2048, 64, 2048)]


@pytest.mark.usefixtures("ours_only")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_products(dtype: torch.dtype, device: str) -> None:
    ops = registry.OPERATORS
    for m, k, n in SIZES + ([] if INTERPRETED else GPU_SIZES):
        for turned_a, turned_b in itertools.product([False, True], repeat=2):
            if INTERPRETED and turned_a and (dtype is not torch.float32 or not turned_b):
                continue
            a = draw((k, m), dtype, device).t() if turned_a else draw((m, k), dtype, device)
            b = draw((n, k), dtype, device).t() if turned_b else draw((k, n), dtype, device)
            bias = draw((n,), dtype, device)
            check(f"mm {m} {k} {n}", ops["mm"].function, torch.mm, (a, b), {}, length=max(1, k))
            check(
                f"addmm {m} {k} {n}", ops["addmm"].function, torch.addmm, (bias, a, b), {"beta": 0.5, "alpha": 2}, length=max(1, k)
            )
        if n > 0:
            check(f"mv {m} {k}", ops["mv"].function, torch.mv, (a, b[:, 0]), {}, length=max(1, k))
    full = draw((40, 50), dtype, device)
    a, b = draw((40, 30), dtype, device), draw((30, 50), dtype, device)
    check("addmm", ops["addmm"].function, torch.addmm, (full, a, b), {}, length=30)
    check("addmm", ops["addmm"].function, torch.addmm, (full * float("nan"), a, b), {"beta": 0}, length=30)
    for m, k, n in [] if INTERPRETED else [(2048, 512, 2048), (256, 1024, 4096), (1000, 1024, 2056)]:
        full, a, b = draw((m, n), dtype, device), draw((m, k), dtype, device), draw((n, k), dtype, device).t()
        check("addmm", ops["addmm"].function, torch.addmm, (full, a, b), {"beta": 0.5, "alpha": 2}, length=k)


@pytest.mark.usefixtures("ours_only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batched_products(dtype: torch.dtype, device: str) -> None:
    bmm = registry.OPERATORS["bmm"].function
    large = [(8, 256, 128, 512), (5, 100, 64, 96), (32, 1, 2048, 128), (24, 7, 100, 1000), (40, 4, 64, 1024), (3, 30, 1777, 128)]
    large += [(9, 16, 128, 2051), (200, 16, 1024, 64), (2, 8, 8192, 130), (600, 9, 77, 77), (70, 300, 256, 5), (64, 32, 384, 300)]
    for batch, m, k, n in [(2, 17, 33, 20), (3, 1, 16, 40), (0, 2, 3, 4)] + ([] if INTERPRETED else large):
        a, b = draw((batch, m, k), dtype, device), draw((batch, k, n), dtype, device)
        check("bmm", bmm, torch.bmm, (a, b), {}, length=k)
        check("bmm", bmm, torch.bmm, (a, draw((batch, n, k), dtype, device).transpose(1, 2)), {}, length=k)
        check("bmm", bmm, torch.bmm, (draw((m, batch, k), dtype, device).transpose(0, 1), b), {}, length=k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool, torch.int16])
def test_flip_by_words(dtype: torch.dtype, device: str) -> None:
    """Eight bytes at once where rows and what lies between them are whole words, else by elements."""
    flip = registry.OPERATORS["flip"].function
    shapes = [((8,), [0]), ((3, 16), [1]), ((3, 16), [0, 1]), ((2, 5, 24), [2, 0]), ((3, 7), [1]), ((2, 12), [-1]), ((0, 8), [1])]
    for shape, dims in shapes + ([] if INTERPRETED else [((300, 4104), [1]), ((7, 513, 1000), [0, 2])]):
        check("flip", flip, torch.flip, (draw(shape, dtype, device), dims), {})
    x = draw((4, 32), dtype, device)
    for view in (x[:, 8:24], x[:, 1:9], x[::2], x.t(), x[:, ::2], x[:1].expand(3, 32)):
        check("flip", flip, torch.flip, (view, [1]), {})


def test_moves(device: str) -> None:
    ops = registry.OPERATORS
    for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.bool]:
        x = draw((3, 4, 5), dtype, device)
        for diagonal in (-2, 0, 3):
            check("triu", ops["triu"].function, torch.triu, (x, diagonal), {})
        check("flip", ops["flip"].function, torch.flip, (x[:, :1], [1]), {})
        for dims in ([0], [-1], [0, 2], [0, 1, 2], []):
            check("flip", ops["flip"].function, torch.flip, (x, dims), {})
        check("flip", ops["flip"].function, torch.flip, (x.transpose(0, 2), [1]), {})
        table = draw((11, 6), dtype, device)
        check("embedding", ops["embedding"].function, aten("embedding"), (table, torch.randint(0, 11, (2, 7), device=device)), {})
    x, y = draw((7,), torch.float32, device), draw((9,), torch.float32, device)
    check("outer", ops["outer"].function, torch.outer, (x, y), {})


def test_closeness(device: str) -> None:
    ops = registry.OPERATORS
    x = torch.tensor([1.0, 1.0, float("nan"), float("inf"), float("-inf"), 0.0], device=device)
    y = torch.tensor([1.0 + 1e-6, 1.1, float("nan"), float("inf"), float("inf"), 1e-9], device=device)
    for dtype, equal_nan in itertools.product((torch.float32, torch.float64), (False, True)):
        check("isclose", ops["isclose"].function, torch.isclose, (x.to(dtype), y.to(dtype)), {"equal_nan": equal_nan})
    near = x[:2].double() + 1e-12
    assert (
        ops["isclose"].function(near, x[:2].double(), 0, 2e-12).all()
        and not ops["isclose"].function(near, x[:2].double(), 0, 5e-13).any()
    )
    assert ops["allclose"].function(x[:1], y[:1]) and not ops["allclose"].function(x, y)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy(smoothing: float, device: str) -> None:
    function = registry.OPERATORS["cross_entropy_loss"].function
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((6, 9), (6,)),
        ((9,), ()),
        ((2, 5, 3), (2, 3)),
        ((300, 9), (300,)),
        ((3, 2100), (3,)),
    ]
    for shape, target_shape in shapes + ([] if INTERPRETED else [((65, 50257), (65,)), ((100000, 33), (100000,))]):
        classes = shape[0] if len(shape) == 1 else shape[1]
        x, target = draw(shape, torch.float32, device), torch.randint(0, classes, target_shape, device=device)
        if target.dim():
            target.view(-1)[0] = -100
        for weight, reduction in itertools.product([None, torch.rand(classes, device=device)], [0, 1, 2]):
            check(
                "cross_entropy",
                function,
                aten("cross_entropy_loss"),
                (x, target, weight, reduction, -100, smoothing),
                {},
                length=64,
            )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_of_many_short_rows(reduction: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows a program, losses added up by several programs, and the gradient, with weights, smoothing and rows left out."""
    monkeypatch.setattr(loss, "_MANY", 64)
    target = torch.randint(0, 33, (301,), device=device)
    target[::7] = -100
    weight = torch.rand(33, device=device) + 0.5
    x = draw((301, 33), torch.float32, device)
    got, expected = x.clone().requires_grad_(), x.double().requires_grad_()
    numbers = {"none": 0, "mean": 1, "sum": 2}
    mine = loss.cross_entropy_loss(got, target, weight, numbers[reduction], -100, 0.1)
    theirs = F.cross_entropy(expected, target, weight.double(), reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
    mine.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip with many processors splits long rows; here it is made of a small one, so that this path runs everywhere."""
    small = dataclasses.replace(chips.current(), multiprocessors=8, fold_tile=64, row_elements=128)
    monkeypatch.setattr(chips, "current", lambda: small)
    monkeypatch.setattr(fold, "_folds", {})


@pytest.mark.usefixtures("splitting")
def test_rows_shared_by_several_programs(device: str) -> None:
    ops = registry.OPERATORS
    for shape in [(2, 301), (300, 2)]:
        for dim in (0, 1):
            x = draw(shape, torch.float32, device)
            length = shape[dim]
            for name in ("sum.dim_IntList", "mean.dim", "amax", "any.dims", "var_mean.correction"):
                check(f"{name} {shape} {dim}", ops[name].function, aten(name), (x, [dim]), {}, length=length)
            for name in ("max.dim", "min.dim", "argmax"):
                for values in (x, torch.randperm(x.numel(), device=device).view(shape)):
                    check(f"{name} {shape} {dim}", ops[name].function, aten(name), (values, dim), {})
            for name in ("softmax.int", "log_softmax.int"):
                check(f"{name} {shape} {dim}", ops[name].function, aten(name), (x, dim), {}, length=64)
            check(f"cumsum {shape} {dim}", ops["cumsum"].function, aten("cumsum"), (x, dim), {}, length=length)


@pytest.mark.usefixtures("splitting")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_parts_are_joined_a_few_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Five parts of three rows, four to a tile, and several parts of one."""
    monkeypatch.setattr(reduce, "_JOINED", 64)
    monkeypatch.setattr(moments, "_JOINED", 64)
    x = draw((300, 3), dtype, device)
    factors = 1 + x / 100 if dtype.is_floating_point else x | 1  # of products that neither vanish nor overflow to nought
    calls: list[tuple[str, Any]] = [
        ("sum.dim_IntList", (x, [0])),
        ("prod.dim_int", (factors, 0)),
        ("amax", (x, [0])),
        ("min", (x,)),
    ]
    if dtype.is_floating_point:
        calls += [("mean", (x,)), ("var_mean.correction", (x, [0])), ("var_mean.correction", (x + 1000,))]
    if dtype is torch.float32:
        calls += [("linalg_vector_norm", (x, order, [0])) for order in (2, 3.5, float("-inf"))]
        calls += [("any.dims", (x > 3, [0])), ("all.dims", (x > -3, [0]))]
    for name, args in calls:
        function = registry.OPERATORS[name].function
        first = function(*args)

        def again(*args: Any, function: Any = function, first: Any = first) -> Any:
            second = function(*args)  # counters are left as they were found
            torch.testing.assert_close(second, first, rtol=0, atol=0)
            return second

        check(f"{name} {dtype}", again, aten(name), args, {}, length=x.numel())


@pytest.mark.usefixtures("splitting")
def test_parts_of_huge_numbers_vary_little(device: str) -> None:
    """No float32 holds the square of their mean, which must not come into the sum of squares about it."""
    variances, means = registry.OPERATORS["var_mean.correction"].function(torch.full((300, 3), 2e19, device=device), [0])
    assert (variances < 1e-9 * 2e19 * 2e19).all()  # what rounding the mean leaves, on a chip
    torch.testing.assert_close(means, torch.full_like(means, 2e19))


@pytest.mark.usefixtures("splitting")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_cumsum_of_rows_in_parts(dtype: torch.dtype, device: str) -> None:
    function = registry.OPERATORS["cumsum"].function
    for shape, dim in [
        ((9001,), 0),
        ((3, 4501), 1),
        ((2, 1000, 3), 1),
        ((8500, 50), 0),
    ]:  # the last adds up its totals in two turns
        x = draw(shape, dtype, device)
        check(f"cumsum {shape} {dim}", function, aten("cumsum"), (x, dim), {}, length=shape[dim])


@pytest.mark.gpu
def test_one_long_row_adds_up_exactly(device: str) -> None:
    """Parts of one tile, and of several where there are more than programs."""
    for count in (600001, 1 << 20, (1 << 20) + 1, (1 << 22) + 4097):
        x = torch.randint(-(2**40), 2**40, (1, count), device=device)
        assert torch.equal(registry.OPERATORS["cumsum"].function(x, 1), torch.cumsum(x, 1)), count


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_moments_of_rows_that_fill_one_tile(dtype: torch.dtype, device: str) -> None:
    few_columns, odd_lines = ((40000, 23, 2), (9000, 7, 10), (20000, 40, 5)), ((50, 16, 1033), (400, 30, 129))
    for shape in ((400, 41, 516), (300, 64, 512), (120000, 3, 48), (50, 70000), *few_columns, *odd_lines):
        x = torch.randn(shape, device=device).add(3).to(dtype)
        dim = 0 if len(shape) == 2 else 1 if shape[1] > 3 else 2
        x = x if dim < 2 else x.transpose(0, 2).contiguous().transpose(0, 2)  # side by side
        variance, mean = registry.OPERATORS["var_mean.correction"].function(x, [dim])
        wanted = torch.var_mean(x.double(), dim)
        torch.testing.assert_close(variance.double(), wanted[0], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(mean.double(), wanted[1], rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_moments_of_long_rows_that_begin_anywhere(dtype: torch.dtype, device: str) -> None:
    for rows, length in ((3, 100001), (22, 40003), (300, 17001), (1000, 16389)):
        x = torch.randn(rows, length, device=device).add(3).to(dtype)
        for found, wanted in zip(moments.var_mean(x, [1]), torch.var_mean(x.double(), 1), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_of_rows_that_leave_a_tile_half_empty(dtype: torch.dtype, device: str) -> None:
    for rows, length in ((540, 8200), (1000, 8688), (600, 10240), (600, 14336), (540, 8193)):
        x, weight, bias = (draw(shape, dtype, device) for shape in ((rows, length), (length,), (length,)))
        for name, arguments in (("native_layer_norm", (weight, bias, 1e-5)), ("rms_norm", (weight, 1e-5))):
            function = registry.OPERATORS[name].function
            check(f"{name} {rows}x{length}", function, aten(name), (x, [length], *arguments), {}, length=64)


@pytest.mark.gpu
def test_softmax_of_many_long_rows_of_float64(device: str) -> None:
    for rows, length in ((300, 20001), (300, 9000), (265, 8193), (9, 40000), (2, 70000)):
        x = torch.randn(rows, length, device=device, dtype=torch.float64)
        x[0, : length // 2], x[1, 7] = -math.inf, math.nan
        for name, wanted in (("softmax.int", x.softmax(1)), ("log_softmax.int", x.log_softmax(1))):
            torch.testing.assert_close(registry.OPERATORS[name].function(x, 1), wanted, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("ours_only")
@pytest.mark.parametrize("seed", range(12))
def test_few_rows_of_drawn_items_add_up_exactly(seed: int, device: str) -> None:
    """Batches and single matrices of any size, in whichever cut the rules give them: whole numbers, in any order of adding."""
    rng = random.Random(seed)
    for turned in (True, False) * 6:
        rows = rng.choice((1, 2, 8, 16, 32, rng.randint(1, 32)))
        even = rng.choices((1, 2, 8, 64), k=2)
        k, n = (max(of, round(2 ** rng.uniform(1, 13)) // of * of) for of in even)
        items = 1 if rng.random() < 0.2 else max(2, min(60000, round(2 ** rng.uniform(17, 22) / (k * n))))
        a = torch.randint(-2, 3, (items, rows, k), device=device).bfloat16()
        b = torch.randint(-2, 3, (items, n, k) if turned else (items, k, n), device=device).bfloat16()
        b = b.transpose(1, 2) if turned else b
        wanted = torch.bmm(a.double(), b.double()).bfloat16()
        assert torch.equal(registry.OPERATORS["bmm"].function(a, b), wanted), (items, rows, k, n, turned)


@pytest.mark.gpu
@pytest.mark.usefixtures("ours_only")
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 9, 16, 23, 32])
def test_few_rows_past_one_matrix_add_up_exactly(rows: int, turned: bool, device: str) -> None:
    """Lines that begin at multiples of 1 to 64 elements, longer than what is read of them, or one element after a multiple; with a
    bias and without. Whole numbers, in any order of adding."""
    rng = random.Random(rows)
    for of, (beyond, first) in itertools.product((1, 2, 8, 64), ((0, 0), (8, 0), (3, 1))):
        k, n = (max(of, round(2 ** rng.uniform(7, 13)) // of * of) for _ in range(2))
        x = torch.randint(-2, 3, (rows, k), device=device).bfloat16()
        line, height = (k, n) if turned else (n, k)
        w = torch.randint(-2, 3, (height, line + beyond + first), device=device).bfloat16()[:, first : first + line]
        w = w.t() if turned else w
        bias = torch.randint(-9, 10, (n,), device=device).bfloat16()
        wanted = x.double() @ w.double()
        case = (k, n, w.stride(), first)
        if beyond == 8:
            assert torch.equal(registry.OPERATORS["addmm"].function(bias, x, w), (wanted + bias.double()).bfloat16()), case
        else:
            assert torch.equal(registry.OPERATORS["mm"].function(x, w), wanted.bfloat16()), case


@pytest.mark.gpu
def test_short_lines_of_halves_fold_exactly(device: str) -> None:
    for shape in ((30000, 16, 26), (30000, 8, 26), (30000, 11, 27), (30000, 24, 26), (9000, 30, 50), (26261, 60, 16)):
        x = torch.randint(-2, 3, shape, device=device).half()
        assert torch.equal(registry.OPERATORS["sum.dim_IntList"].function(x, [1]), x.float().sum(1).half()), shape
        assert torch.equal(registry.OPERATORS["amax"].function(x, [1]), x.amax(1)), shape
        norm = registry.OPERATORS["linalg_vector_norm"].function(x, 2, [1])
        torch.testing.assert_close(norm, torch.linalg.vector_norm(x.double(), 2, 1).half(), rtol=2e-3, atol=0)


@pytest.mark.gpu
def test_places_in_a_few_long_rows_of_eight_bytes(device: str) -> None:
    for rows, length in ((342, 56400), (150, 40000), (700, 9000), (3, 100001)):
        x = torch.randint(0, 9, (rows, length), device=device)
        first = torch.argmax((x == x.amax(1, True)).int(), 1)  # the first of many
        assert torch.equal(registry.OPERATORS["argmax"].function(x, 1), first), (rows, length)
