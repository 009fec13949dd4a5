"""Which operators are torch's and which are ours: enable, only_enable, disable, use. Knows every operator by its aten name;
arguments that a kernel does not cover go on to torch's own kernel."""

from __future__ import annotations

import atexit
import contextlib
import csv
import difflib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch.autograd import forward_ad

from trireme.kernels import chips
from trireme.kernels.aten.calls.originals import original, overload_of
from trireme.kernels.aten.calls.quick import standing_for
from trireme.kernels.aten.calls.repeat import or_else, repeating
from trireme.kernels.aten.elementwise import binary, bitwise, compare, random, select, shape, unary
from trireme.kernels.aten.folds import allclose, extremes, moments, reduce, scan
from trireme.kernels.aten.products import matmul
from trireme.kernels.aten.rowwise import loss, norms, softmax
from trireme.kernels.launch import Unsupported

MEASURED = Path(__file__).with_name("measured.csv")
Function = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """One aten registration. `differentiable` replaces torch's composite formula, which overriding would lose."""

    name: str
    function: Function
    gradient: str = "torch"  # "torch": its derivative formula; "own": ours; "none": not differentiable
    differentiable: Function | None = None

    @property
    def overload(self) -> Any:
        return overload_of(self.name)

    @property
    def composite(self) -> bool:
        """Whether torch defines it by other operators, so that an override must bring its own gradient."""
        return torch._C._dispatch_has_kernel_for_dispatch_key(self.overload.name(), "CompositeImplicitAutograd")


def _table() -> dict[str, Operator]:
    plain: dict[str, Function] = {
        "abs": unary.absolute, "cos": unary.cos, "exp": unary.exp, "gelu": unary.gelu, "neg": unary.neg,
        "reciprocal": unary.reciprocal, "relu": unary.relu, "rsqrt": unary.rsqrt, "sigmoid": unary.sigmoid,
        "silu": unary.silu, "sin": unary.sin, "tanh": unary.tanh,
        "add.Tensor": binary.add, "sub.Tensor": binary.sub, "mul.Tensor": binary.mul, "div.Tensor": binary.div,
        "pow.Scalar": binary.pow_scalar, "pow.Tensor_Scalar": binary.pow_tensor_scalar,
        "pow.Tensor_Tensor": binary.pow_tensor_tensor,
        "clamp": select.clamp, "clamp.Tensor": select.clamp,
        "where.self": select.where, "where.ScalarSelf": select.where, "where.ScalarOther": select.where,
        "mm": matmul.mm, "bmm": matmul.bmm, "addmm": matmul.addmm, "mv": matmul.mv,
        "cumsum": scan.cumsum, "embedding": shape.embedding, "triu": shape.triu, "flip": shape.flip,
        "native_dropout": random.native_dropout, "native_layer_norm": norms.native_layer_norm,
        "native_group_norm": norms.native_group_norm,
        "sum": reduce.sum_dim, "sum.dim_IntList": reduce.sum_dim, "mean": reduce.mean_dim, "mean.dim": reduce.mean_dim,
        "prod": reduce.prod_dim, "prod.dim_int": reduce.prod_dim, "max": reduce.amax, "min": reduce.min_all,
        "max.dim": extremes.max_dim, "min.dim": extremes.min_dim, "amax": reduce.amax,
        "var_mean.correction": moments.var_mean, "linalg_vector_norm": reduce.vector_norm,
    }  # fmt: skip
    constant: dict[str, Function] = {
        "isfinite": unary.isfinite, "isinf": unary.isinf, "isnan": unary.isnan, "isclose": compare.isclose,
        "allclose": allclose.allclose, "bitwise_not": unary.bitwise_not, "argmax": extremes.argmax,
        "all": reduce.all_dims, "all.dim": reduce.all_dims, "all.dims": reduce.all_dims,
        "any": reduce.any_dims, "any.dim": reduce.any_dims, "any.dims": reduce.any_dims,
        "rand": random.rand, "randn": random.randn, "rand_like": random.rand_like,
    }  # fmt: skip
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for overload in ("Tensor", "Scalar"):
            constant[f"{name}.{overload}"] = getattr(compare, name)
    for overload in ("Tensor", "Scalar", "Scalar_Tensor"):
        constant[f"bitwise_and.{overload}"] = bitwise.bitwise_and
        constant[f"bitwise_or.{overload}"] = bitwise.bitwise_or
    own: dict[str, tuple[Function, Function]] = {
        "softmax.int": (softmax.softmax_forward, softmax.softmax),
        "log_softmax.int": (softmax.log_softmax_forward, softmax.log_softmax),
        "rms_norm": (norms.rms_norm_forward, norms.rms_norm),
        "outer": (binary.outer_forward, binary.outer),
        "cross_entropy_loss": (loss.cross_entropy_loss_forward, loss.cross_entropy_loss),
    }
    table = {name: Operator(name, function) for name, function in plain.items()}
    table |= {name: Operator(name, function, "none") for name, function in constant.items()}
    table |= {name: Operator(name, forward, "own", both) for name, (forward, both) in own.items()}
    return dict(sorted(table.items()))


OPERATORS = _table()
_active: frozenset[str] = frozenset()


def register(name: str, function: Function, gradient: str = "torch", differentiable: Function | None = None) -> None:
    """Adds an operator of torch's, by its aten name such as `softplus` or `add.Tensor`; it is torch's until it is enabled."""
    operator = Operator(name, function, gradient, differentiable)
    if name in OPERATORS or not hasattr(torch.ops.aten, name.partition(".")[0]):
        raise ValueError(f"{name!r} is in the library or no operator of torch's; give the aten name of another")
    if operator.composite and gradient != "none" and differentiable is None:
        raise ValueError(f"torch defines {name!r} by other operators; give a differentiable version too, or gradient='none'")
    OPERATORS[name] = operator


_library: torch.library.Library | None = None


def _select(names: Iterable[Any]) -> set[str]:
    """Full names of the operators meant; a name without an overload means all of its overloads, `.default` the one without."""
    chosen: set[str] = set()
    if not isinstance(names, Iterable):
        raise TypeError(f"expected names of operators, such as ['mm', 'sum.dim_IntList'], but got {names!r}")
    for given in [names] if isinstance(names, str) else names:
        full = str(given).removeprefix("aten::").removeprefix("aten.")
        name = full.removesuffix(".default")
        found = {known for known in OPERATORS if known == name or (name == full and known.partition(".")[0] == name)}
        if not found:
            near = difflib.get_close_matches(name, {*OPERATORS, *(known.partition(".")[0] for known in OPERATORS)}, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`trireme kernels list` shows them"
            raise ValueError(f"no operator named {name!r} in the library; {hint}")
        chosen |= found
    return chosen


@functools.cache
def _guarded(operator: Operator) -> Function:
    """Ours, or torch's for what ours does not cover."""
    function = operator.function

    def call(*args: Any, **kwargs: Any) -> Any:
        if _elsewhere(args):
            raise Unsupported("memory of another device")
        return function(*args, **kwargs)

    return repeating(call, _Torchs(operator))


def _elsewhere(args: tuple[Any, ...]) -> bool:
    """Whether a tensor with dimensions lies where our kernels do not reach; numbers of the host do not matter."""
    kind = chips.current().device_type
    return any(isinstance(x, torch.Tensor) and x.dim() and x.device.type != kind for x in args)


class _Torchs:
    """torch's kernel, which takes tensors where its schema says so; the dispatcher hands us numbers there."""

    def __init__(self, operator: Operator) -> None:
        self.kernel = original(operator.name)
        self.places = [i for i, argument in enumerate(operator.overload._schema.arguments) if str(argument.type) == "Tensor"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        numbers = self._numbers(args)
        return self.kernel(*(_with_tensors(args, numbers) if numbers else args), **kwargs)

    def _numbers(self, args: tuple[Any, ...]) -> list[int]:
        return [i for i in self.places if i < len(args) and not isinstance(args[i], torch.Tensor)]

    def shorter(self, args: tuple[Any, ...]) -> Function:
        """The same for calls with tensors where these have them."""
        return self if self._numbers(args) else self.kernel


def _with_tensors(args: tuple[Any, ...], places: list[int]) -> list[Any]:
    """The arguments with tensors for the numbers at these places, which promote other types as the numbers do."""
    result = list(args)
    for example in [x for x in args if isinstance(x, torch.Tensor)][:1]:
        for i in places:
            result[i] = torch.scalar_tensor(args[i], dtype=torch.result_type(example, args[i]))
    return result


@functools.cache
def _with_gradient(operator: Operator) -> Function:
    """The autograd side of a composite operator: ours where gradients are ours, else torch's definition by other operators.

    Tracing (fake, functional and proxy tensors, transforms) always takes torch's definition, which compilers know how to lower.
    """
    forward, both, torchs = operator.function, operator.differentiable, operator.overload

    def below(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return forward(*args, **kwargs)

    def readable(ours: Function | None) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if ours is None or _elsewhere(args) or any(isinstance(x, torch.Tensor) and type(x) not in _PLAIN for x in args):
                raise Unsupported("no version of ours, or tensors that our kernels cannot read")
            return ours(*args, **kwargs)

        return call

    derived = or_else(readable(both), torchs.decompose)

    # of the remembered calls the recent ones are tried here, before anything else is asked
    differentiable = operator.gradient != "none"
    parts = repeating(readable(below), torchs.decompose, ungraded=differentiable).__dict__
    memory, keyed = parts["memory"], parts["keyed"]
    transformed = torch._C._functorch.peek_interpreter_stack

    def call(*args: Any, **kwargs: Any) -> Any:
        if _watched() or transformed() is not None:
            return torchs.decompose(*args, **kwargs)
        if any(isinstance(x, torch.Tensor) and x.is_neg() for x in args):  # for other operators torch has done it by now
            args = tuple(x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in args)
        if differentiable and torch.is_grad_enabled():
            for x in args:
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    return derived(*args, **kwargs)
        return keyed(*args, **kwargs)

    call.__dict__["memory"] = memory
    return standing_for(call, memory.recent, _watched, transformed)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _watched() -> int:
    """Not zero where a mode looks at calls or derivatives are carried forward with them."""
    return torch._C._len_torch_dispatch_stack() or forward_ad._current_level + 1


def _activate(names: frozenset[str]) -> None:
    """Makes exactly these operators ours."""
    global _active, _library
    if names == _active:
        return
    if _library is not None:
        _library._destroy()
        _library = None
    _active = frozenset()
    chip = chips.current()
    if names and chip.interpreted and not triton.knobs.runtime.interpret:
        raise RuntimeError("Triton finds no GPU here. Fix: start Python with TRITON_INTERPRET=1 to run kernels, slowly, on the CPU")
    if names:
        implementations = list(_implementations(names))  # all of them, while every kernel is torch's own
        _library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # replacing torch's kernels is the purpose
            for name, key, implementation in implementations:
                _library.impl(name, implementation, key, allow_override=True)
    _active = names


def _implementations(names: Iterable[str]) -> Iterator[tuple[str, str, Function]]:
    """The Python kernels of operators, by name and dispatch key."""
    chip = chips.current()
    for name in sorted(names):
        operator = OPERATORS[name]
        yield name, chip.dispatch_key, _guarded(operator)
        if operator.composite:
            yield name, chip.autograd_key, _with_gradient(operator)


def enable() -> None:
    """Every operator of the library replaces torch's on this chip, in all threads of the process. Switch, here and below, while no
    other thread computes: torch's table of kernels is not made to be read as it is written, and may crash whoever does."""
    _activate(frozenset(OPERATORS))


def only_enable(names: Iterable[str]) -> None:
    """These operators replace torch's; all others are torch's."""
    _activate(frozenset(_select(names)))


def disable() -> None:
    """Every operator is torch's again."""
    _activate(frozenset())


@contextlib.contextmanager
def use(include: Iterable[str] | None = None, exclude: Iterable[str] = ()) -> Iterator[None]:
    """Within the block, `include` (default all) without `exclude` are ours; afterwards whatever was before.

    For all threads of the process, so blocks of several threads must not overlap.
    """
    before = _active
    wanted = set(OPERATORS) if include is None else _select(include)
    _activate(frozenset(wanted - _select(exclude)))
    try:
        yield
    finally:
        _activate(before)


# Before torch takes its own libraries down, so that whoever computes until the end is not passed on to what is gone.
atexit.register(disable)


def enabled() -> list[str]:
    """Names of the operators that are ours now."""
    return sorted(_active)


def describe() -> list[dict[str, Any]]:
    """One row per registration: name, overload, gradient, whether enabled, and torch's time over ours as last measured."""
    with MEASURED.open(newline="") as file:
        measured = {row["operator"]: float(row["ratio"]) for row in csv.DictReader(file)}
    rows = []
    for name, operator in OPERATORS.items():
        base, _, overload = name.partition(".")
        row = {"name": base, "overload": overload or "default", "gradient": operator.gradient, "enabled": name in _active}
        rows.append(row | {"ratio": measured.get(name)})
    return rows
