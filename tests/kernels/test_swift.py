"""What stands in for parts of Triton's interpreter gives their answers, and finds the faults that they find."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import swift
import torch
import triton
import triton.language as tl
from triton.language.core import block_type
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from trireme.kernels import chips, scalar
from trireme.kernels.aten import registry
from trireme.kernels.aten.folds import reduce

pytestmark = [
    pytest.mark.skipif(not chips.current().interpreted, reason="nothing is interpreted"),
    pytest.mark.skipif(not triton.__version__.startswith(swift.MADE_FOR), reason="nothing stands in"),
]
NUMPY = {
    "float16": tl.float16, "float32": tl.float32, "float64": tl.float64, "int8": tl.int8, "uint8": tl.uint8, "int16": tl.int16,
    "int32": tl.int32, "uint32": tl.uint32, "int64": tl.int64, "uint64": tl.uint64, "bool": tl.int1,
}  # fmt: skip
SHAPES = [((1,), 0), ((2,), 0), ((64,), 0), ((4, 8), 0), ((4, 8), 1), ((8, 1), 1), ((2, 4, 8), 1), ((2, 16, 4), 2)]


@triton.jit
def _first_of_largest(a, a_place, b, b_place):
    wins = (a > b) | ((a == b) & (a_place < b_place))
    return tl.where(wins, a, b), tl.where(wins, a_place, b_place)


@triton.jit
def _one_more(x):
    return x + 1


@triton.jit
def _step(x, KIND: tl.constexpr, N: tl.constexpr):
    at = x + tl.arange(0, N)
    value = tl.load(at)
    if KIND == 0:
        value = _one_more(value)
    elif KIND == 1:
        value = value - 2
    elif KIND == 2:
        value = value * 3
    tl.store(at, value)


def drawn(shape: tuple[int, ...], name: str) -> np.ndarray:
    random = np.random.default_rng(20)
    if name == "bool":
        return random.random(shape) > 0.4
    if not name.startswith("float"):
        bounds = np.iinfo(name)
        return random.integers(bounds.min, bounds.max, shape, dtype=name, endpoint=True)
    return random.choice([0.0, -0.0, 1.0, 2.0, -0.5, 4.0, -2.0, 0.25, np.inf, -np.inf, np.nan], shape).astype(name)


def tensor(data: np.ndarray) -> Any:
    kind = NUMPY[data.dtype.name]
    return tl.tensor(interpreter.TensorHandle(data, kind), block_type(kind, list(data.shape)))


def same(ours: Any, theirs: Any) -> None:
    a, b = ours.handle.data, theirs.handle.data
    assert a.dtype == b.dtype and a.shape == b.shape and ours.type == theirs.type
    np.testing.assert_array_equal(a, b)
    if a.dtype.kind == "f":
        assert (np.signbit(a) == np.signbit(b))[(a == a) & (a != 0)].all()


@pytest.fixture
def interpreting() -> Any:
    """The language is what it is within a kernel."""
    scope = interpreter._patch_lang(_step.fn)
    interpreter.interpreter_builder.set_grid_dim(1, 1, 1)
    interpreter.interpreter_builder.set_grid_idx(0, 0, 0)
    yield
    scope.restore()


@pytest.mark.usefixtures("interpreting")
@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("combine", [scalar.larger, scalar.smaller, reduce._multiply], ids=lambda f: f.__name__)
def test_reductions_by_halves(combine: Any, name: str) -> None:
    """All functions that ours reduce by, whose order changes nothing here: no product is rounded. Infinities, NaN, what wraps."""
    for (shape, axis), keep in itertools.product(SHAPES, (False, True)):
        x = drawn(shape, name)
        if combine is reduce._multiply:
            x = np.where(np.arange(x.size).reshape(shape) % 3 > 0, np.ones_like(x), x)
        operation = interpreter.ReduceOps(axis, combine, keep)
        with np.errstate(all="ignore"):
            (ours,), (theirs,) = operation.generic_reduce((tensor(x),)), swift.original_reduce(operation, (tensor(x),))
        same(ours, theirs)


@pytest.mark.usefixtures("interpreting")
def test_products_by_halves_are_as_near() -> None:
    x = np.random.default_rng(20).uniform(0.8, 1.25, (8, 256)).astype("float32")
    ours, theirs = (
        f(interpreter.ReduceOps(1, reduce._multiply, False), (tensor(x),)) for f in (swift.reduce_by_halves, swift.original_reduce)
    )
    exact = x.astype("float64").prod(1)
    for result in (ours, theirs):
        np.testing.assert_allclose(result[0].handle.data, exact, rtol=256 * 6e-8)


@pytest.mark.usefixtures("interpreting")
def test_reductions_of_pairs() -> None:
    for shape, axis in SHAPES:
        x, places = np.random.default_rng(20).integers(0, 4, shape, dtype="int32"), np.indices(shape, dtype="int32")[axis]
        operation = interpreter.ReduceOps(axis, _first_of_largest, False)
        ours = operation.generic_reduce((tensor(x), tensor(places)))
        for mine, theirs in zip(ours, swift.original_reduce(operation, (tensor(x), tensor(places))), strict=True):
            same(mine, theirs)
        np.testing.assert_array_equal(ours[1].handle.data.reshape(x.max(axis).shape), x.argmax(axis))


@pytest.mark.parametrize(("kind", "number"), [(0, 2**31 - 1), (1, -(2**31)), (2, 2**30)])
def test_overflow_is_found_where_triton_finds_it(kind: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it does when it debugs."""
    for search, debug in itertools.product((swift.overflow_when_told, swift.original_overflow), (False, True)):
        monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", search)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=debug))
        x = torch.tensor([0, 0, number, 0], dtype=torch.int32)
        if debug:
            with pytest.raises(interpreter.InterpreterError, match="int32 overflow"):
                _step[(1,)](x, KIND=kind, N=4)
            assert x.tolist() == [0, 0, number, 0]
        else:
            _step[(1,)](x, KIND=kind, N=4)
            assert x.tolist() == [
                v - 2**32 * (v >= 2**31) + 2**32 * (v < -(2**31))
                for v in ([1, 1, number + 1, 1], [-2, -2, number - 2, -2], [0, 0, number * 3, 0])[kind]
            ]


def test_the_language_is_as_it_was_after_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that fails, too; and within it all is exchanged that Triton would exchange."""
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
    exchange = interpreter._patch_lang
    assert isinstance(exchange, swift.Exchange)
    _step[(1,)](torch.zeros(4, dtype=torch.int32), KIND=0, N=4)
    if exchange.done:  # by a helper called alone
        exchange.restore()
    names = {(id(where), name) for where, name, _, _ in exchange.changes}
    before = {(where, name): getattr(where, name, None) for where, name, _, _ in exchange.changes}
    for number in (0, 2**31 - 1):
        x = torch.full((4,), number, dtype=torch.int32)
        if number:
            with pytest.raises(interpreter.InterpreterError):
                _step[(1,)](x, KIND=0, N=4)
        else:
            _step[(1,)](x, KIND=0, N=4)
        assert not exchange.done and all(getattr(where, name, None) is was for (where, name), was in before.items())
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.core.load)
    scope = swift.original_patch(_step.fn)
    theirs = {(id(where), name) for where, name, _ in scope._changes}
    scope.restore()
    assert len(theirs) > 100 and theirs <= names
    outer = exchange(_step.fn)
    assert not tl.core.is_builtin(tl.load) and exchange(_one_more.fn) is swift.NOTHING
    outer.restore()
    assert tl.core.is_builtin(tl.load)


def test_types_of_blocks_are_the_same() -> None:
    for kind, shape in itertools.product([*NUMPY.values(), tl.bfloat16, tl.pointer_type(tl.float32)], SHAPES):
        for _ in range(2):
            ours, theirs = block_type(kind, list(shape[0])), block_type.__new__(block_type)
            swift.original_block(theirs, kind, list(shape[0]))
            assert ours == theirs and vars(ours).keys() == vars(theirs).keys() and ours.element_ty is kind
            assert (ours.name, ours.numel, type(ours.shape)) == (theirs.name, theirs.numel, type(theirs.shape))
            handle = interpreter.TensorHandle(np.zeros(shape[0], swift.original_numpy_type(kind)), kind)
            for type_ in (ours, kind):
                value, other = tl.tensor(handle, type_), tl.tensor.__new__(tl.tensor)
                swift.original_tensor(other, handle, type_)
                assert vars(value).keys() == vars(other).keys() and value.dtype is other.dtype and value.type is type_
                assert value.handle is handle and value.numel == other.numel and value.shape == other.shape
    for shape in ([3], [2.0], [True, 2.0], [], [1 << 30], 4, (4,), [tl.constexpr(3)]):
        with pytest.raises((TypeError, ValueError, AssertionError)) as theirs_is:
            swift.original_block(block_type.__new__(block_type), tl.float32, shape)
        for _ in range(2):
            with pytest.raises(theirs_is.type):
                block_type(tl.float32, shape)


def test_numpy_types_are_the_same() -> None:
    kinds = [
        *NUMPY.values(),
        tl.bfloat16,
        tl.float8e5,
        tl.float8e4nv,
        tl.pointer_type(tl.int8),
        tl.pointer_type(tl.pointer_type(tl.int1)),
    ]
    for kind, wrapped, _ in itertools.product(kinds, (False, True), range(2)):
        asked = block_type(kind, [4]) if wrapped else kind
        assert interpreter._get_np_dtype(asked) == swift.original_numpy_type(asked)


CALLS: dict[str, Any] = {
    "sum.dim_IntList": lambda x: (x, [1]), "amax": lambda x: (x, [0]), "max.dim": lambda x: (x, 1), "cumsum": lambda x: (x, 0),
    "var_mean.correction": lambda x: (x, [1]), "softmax.int": lambda x: (x, 1), "gelu": lambda x: (x,), "mm": lambda x: (x, x.t()),
    "add.Tensor": lambda x: (x, x[0]), "native_layer_norm": lambda x: (x, [70], x[0], x[1], 1e-5),
}  # fmt: skip


@pytest.mark.usefixtures("ours_only")
@pytest.mark.parametrize("name", CALLS)
def test_operators_give_the_same_to_the_last_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        if dtype is torch.int32 and name in ("var_mean.correction", "softmax.int", "gelu", "mm", "native_layer_norm"):
            continue
        x = (torch.randn(5, 70) * 3).to(dtype)
        results = [registry.OPERATORS[name].function(*CALLS[name](x))]
        with monkeypatch.context() as without:
            for where, attribute, theirs, _ in swift.STAND_INS:
                without.setattr(where, attribute, theirs)
            results.append(registry.OPERATORS[name].function(*CALLS[name](x)))
        for mine, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
            assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)
