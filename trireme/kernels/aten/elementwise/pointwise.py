"""Kernels from scalar functions: decorate `f(x, y, alpha)` and call it on tensors of any rank, strides and types.
Knows promotion, broadcasting and layout, never which function it applies."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton

from trireme.kernels import chips
from trireme.kernels.aten.calls import tune
from trireme.kernels.aten.calls.repeat import repeating
from trireme.kernels.aten.elementwise.layout import Plan, overlap_in_part, plan_layout
from trireme.kernels.launch import Kernel, Unsupported, blocks, doubled, empty, next_power, setting

_COMPUTE = {
    torch.float32: "tl.float32",
    torch.float16: "tl.float32",
    torch.bfloat16: "tl.float32",
    torch.float64: "tl.float64",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.bool: "tl.int8",  # sums of booleans are disjunctions once stored
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROUNDED = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16"}
# Programs that come early begin less often in a microsecond than others, which shows where they are many and move little.
_FEW, _MUCH = 1024, 6144  # programs; bytes that one moves
_SOON = 3 << 19  # elements up to which a thread takes half as many, so that the last is done sooner
_KINDS = ("same", "float", "bool", "condition")
Number = int | float | bool


class Pointwise:
    """A scalar function lifted to tensors. Calls take its operands in order; the result has the broadcast shape.

    `kind` says how types promote: "same" (torch's result type), "float" (integers become the default float),
    "bool" (operands rounded to the result type, stored as bool), "condition" (the first operand is a condition and takes no part).
    The last `scalars` parameters are plain numbers that do not promote. `subnormal`: the device library, if it is called, does not
    take subnormal numbers for zeros. It has no gradient; that is the registry's.
    """

    def __init__(
        self, function: Callable[..., Any], kind: str = "same", scalars: int = 0, outputs: int = 1, subnormal: bool = False
    ) -> None:
        if kind not in _KINDS:
            raise ValueError(f"no kind of promotion {kind!r}; there are {', '.join(_KINDS)}")
        # The interpreter patches the language around the outermost kernel; inside it a plain function is enough.
        self.function = function if chips.current().interpreted else triton.jit(function)
        self.kind = kind
        self.num_scalars = scalars
        self.num_inputs = function.__code__.co_argcount - scalars
        self.num_outputs = outputs
        self.subnormal = subnormal
        self.name = function.__name__
        self.kernels: dict[tuple[Any, ...], Kernel] = {}
        self.repeated = repeating(self._apply)

    def __call__(self, *operands: Any, out: torch.Tensor | Sequence[torch.Tensor] | None = None) -> Any:
        """Applies the function; `out` must already have the broadcast shape."""
        return self.repeated(*operands) if out is None else self._apply(*operands, out=out)

    def _apply(self, *operands: Any, out: torch.Tensor | Sequence[torch.Tensor] | None = None) -> Any:
        """Plans and runs one call."""
        if len(operands) != self.num_inputs + self.num_scalars:
            raise TypeError(f"{self.name} takes {self.num_inputs + self.num_scalars} operands, not {len(operands)}")
        inputs, scalars = list(operands[: self.num_inputs]), list(operands[self.num_inputs :])
        compute, result = self._types(inputs)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        device = next((x.device for x in tensors if x.dim() or x.device.type == chips.current().device_type), None)
        if device is None or device.type != chips.current().device_type:
            raise Unsupported(f"{self.name} needs a tensor on {chips.current().device_type}")
        inputs = [_operand(x, compute, device) for x in inputs]
        if compute is torch.float64:
            inputs, scalars = [doubled(x) for x in inputs], [doubled(float(x)) for x in scalars]
        outs = self._outputs(out, result)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if outs is not None and any(overlap_in_part(x, y) for x in outs for y in (*tensors, *outs) if x is not y):
            raise RuntimeError(f"{self.name}: out= shares part of its memory with another tensor; give it memory of its own")
        plan = plan_layout(tensors, outs, self.num_outputs)
        if outs is None:
            outs = [empty(plan.shape, result, device, plan.out_stride) for _ in range(self.num_outputs)]
        if plan.count:
            self.launch(plan, inputs, scalars, outs, compute)
        return outs[0] if self.num_outputs == 1 else tuple(outs)

    def _outputs(self, out: torch.Tensor | Sequence[torch.Tensor] | None, result: torch.dtype) -> list[torch.Tensor] | None:
        if out is None:
            return None
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        for x in outs:
            if not torch.can_cast(result, x.dtype):
                raise RuntimeError(f"{self.name}: a result of {result} cannot be cast to out= of {x.dtype}")
            if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
                raise RuntimeError(f"{self.name}: elements of out= share memory; give it memory of its own, such as out.clone()")
        return outs

    def _types(self, inputs: Sequence[Any]) -> tuple[torch.dtype, torch.dtype]:
        """The type to compute in and the type of the result."""
        promoting = inputs[1:] if self.kind == "condition" else inputs
        dtype = promoted(promoting)
        if dtype not in _COMPUTE:
            raise Unsupported(f"{self.name} has no kernel for {dtype}")
        if self.kind == "float" and dtype not in _FLOATS:
            dtype = setting(torch.get_default_dtype)
        return dtype, torch.bool if self.kind == "bool" else dtype

    def launch(self, plan: Plan, inputs: list[Any], scalars: list[Any], outs: list[torch.Tensor], compute: torch.dtype) -> None:
        """Runs a plan that is already made."""
        rank = 0 if plan.dense else len(plan.sizes)
        forms = _forms(inputs, plan, rank)
        key = (rank, forms, compute, len(scalars))
        kernel = self.kernels.get(key)
        if kernel is None:
            kernel = self.kernels[key] = self._build(rank, forms, compute)
        full = [x for x, form in zip(inputs, forms, strict=True) if form == "t"]  # of others elements come again and again
        widths = [x.element_size() for x in (*outs, *(full or inputs)) if isinstance(x, torch.Tensor)]
        if plan.dense:
            block, warps = _block(plan.count, max(widths))
            grid = (blocks(plan.count, block),)
            kernel(grid, *inputs, *scalars, *outs, plan.count, BLOCK=block, TAIL=plan.count % 16 != 0, WIDE=plan.wide,
                   warps=warps, dependent=grid[0] <= _FEW or block * sum(widths) >= _MUCH)  # fmt: skip
            return
        inner = plan.sizes[-1]
        rows, columns, warps = _tile(plan, "t" in forms, max(widths))
        column_blocks = blocks(inner, columns)
        grid = (column_blocks * blocks(plan.count // inner, rows),)
        walk = (plan.count // inner, column_blocks, *plan.sizes, *plan.strides)
        kernel(grid, *inputs, *scalars, *outs, *walk, ROWS=rows, COLUMNS=columns, WIDE=plan.wide, warps=warps,
               dependent=grid[0] <= _FEW)  # fmt: skip

    def _build(self, rank: int, forms: tuple[str, ...], compute: torch.dtype) -> Kernel:
        # What is stored in the type it promotes to needs no rounding before; a comparison does.
        rounded = _ROUNDED.get(compute) if self.kind == "bool" else None
        source = generate(rank, forms, self.num_scalars, self.num_outputs, _COMPUTE[compute], self.kind == "condition", rounded)
        module = load_source(f"{self.name}_{rank}d", source)
        module.__dict__["function"] = self.function
        return Kernel(module.__dict__["pointwise"], subnormal=self.subnormal)


def pointwise(
    kind: str = "same", scalars: int = 0, outputs: int = 1, subnormal: bool = False
) -> Callable[[Callable[..., Any]], Pointwise]:
    """Decorator that makes a `Pointwise` of a scalar function written in Triton's language."""
    return lambda function: Pointwise(function, kind, scalars, outputs, subnormal)


def promoted(operands: Sequence[Any]) -> torch.dtype:
    """torch's result type of tensors and numbers, in which tensors with dimensions outrank 0-d ones and numbers."""
    if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in operands):
        setting(torch.get_default_dtype)  # what integers and floats make together
    if len(operands) == 1:
        only = operands[0]
        return only.dtype if isinstance(only, torch.Tensor) else torch.result_type(only, only)
    if len(operands) == 2:
        return torch.result_type(operands[0], operands[1])
    dimensioned = [x for x in operands if isinstance(x, torch.Tensor) and x.dim()]
    result = dimensioned[0] if dimensioned else operands[0]
    for operand in dimensioned + [x for x in operands if not (isinstance(x, torch.Tensor) and x.dim())]:
        dtype = torch.result_type(result, operand)
        if isinstance(result, torch.Tensor) and result.dtype is dtype:
            continue
        result = torch.empty((1,) if dimensioned else (), dtype=dtype, device="meta")
    return result.dtype if isinstance(result, torch.Tensor) else torch.result_type(result, result)


def require_held(dtype: torch.dtype, *values: Any) -> None:
    """Leaves whole numbers that a type does not hold to torch, which refuses them where it does not calculate with them. What has
    no sign holds negative numbers too, by what they are modulo its range."""
    if dtype.is_complex or dtype is torch.bool:
        return
    bounds = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    least = bounds.min or -bounds.max
    for value in values:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if whole and not least <= value <= bounds.max:
            raise Unsupported(f"a number beyond {dtype}")


def _operand(value: Any, compute: torch.dtype, device: torch.device) -> Any:
    """Tensors on the device stay; a 0-d tensor of the host and a number become a number of the compute type."""
    if isinstance(value, torch.Tensor):
        if value.device == device:
            return value.resolve_neg()
        if value.dim():
            raise Unsupported(f"an operand is on {value.device}, not {device}")
        value = value.item()
    if isinstance(value, complex):
        raise Unsupported("complex numbers")
    if compute is torch.uint8:
        return int(value) & 255
    return float(value) if compute in _FLOATS else int(value)


def _block(count: int, widest: int) -> tuple[int, int]:
    """Elements and warps of a program of a dense operator: 4 KiB of the largest elements, or a quarter of that where programs would
    not fill the chip."""
    chip = chips.current()
    block = max(chip.pointwise_block // 4, 2 * chip.pointwise_block // widest)
    if count <= block * chip.multiprocessors // 2:
        block = max(256, block // 4)
    return block, max(4, block // (128 if count <= _SOON else 256))


def _tile(plan: Plan, reads: bool, widest: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program of any layout: long rows where the last dimension is contiguous for all, a square where
    layouts cross. `reads`: not only what repeats itself; neighbours that lie apart come one by one, few to a thread."""
    chip, inner = chips.current(), plan.sizes[-1]
    few = widest == 8 or len(plan.sizes) == 1
    if plan.crossed:
        columns = 64 if plan.count >= 4 * 64 * 64 * chip.multiprocessors else 32
        elements = columns * columns
    else:
        elements = chip.pointwise_block // (4 if few else 2 if reads else 1)
        columns = min(elements, chip.pointwise_block // 2)
    columns = min(next_power(inner), columns)
    rows = max(1, min(elements // columns, next_power(plan.count // inner)))
    return rows, columns, 8 if few and not plan.crossed else 4


def _forms(inputs: Sequence[Any], plan: Plan, rank: int) -> tuple[str, ...]:
    """How a kernel reads each input: s a number, t a tile, and where a tensor repeats itself c one column of it or r one row."""
    forms = []
    walk = iter(plan.strides)
    for x in inputs:
        if not isinstance(x, torch.Tensor):
            forms.append("s")
            continue
        strides = [next(walk) for _ in plan.sizes]
        whole = rank in (0, 1) or (strides[-1] and any(strides[:-1]))
        forms.append("t" if whole else "r" if strides[-1] else "c")
    return tuple(forms)


def _number(name: str, kind: str) -> str:
    """The argument of that name as a number of the compute type."""
    return f"tl.full((), {name}, tl.int64).to(tl.float64, bitcast=True)" if kind == "tl.float64" else f"tl.full((), {name}, {kind})"


class _Names(NamedTuple):
    """What generated source calls things: inputs, numbers and results, how each tensor is read, what inputs are cast to, and the
    arguments of the scalar function."""

    inputs: list[str]
    numbers: list[str]
    outs: list[str]
    tensors: dict[str, str]
    casts: dict[str, tuple[str, ...]]
    values: str


def generate(
    rank: int, forms: Sequence[str], scalars: int, outputs: int, compute: str, condition: bool, rounded: str | None = None
) -> str:
    """Source of the kernel for `rank` collapsed dimensions (0: all operands dense); calls a global named `function`.
    `rounded`: the narrower type that operands are rounded to before they are computed with."""
    inputs, extra, outs = ([f"{letter}{i}" for i in range(n)] for letter, n in (("x", len(forms)), ("s", scalars), ("y", outputs)))
    chain: tuple[str, ...] = (rounded, compute) if rounded else (compute,)
    casts: dict[str, tuple[str, ...]] = {name: ("tl.int1",) if condition and name == "x0" else chain for name in inputs}
    numbers = [_number(name, compute) if compute == "tl.float64" else name for name in extra]
    values = ", ".join([*(f"v_{name}" for name in inputs), *numbers])
    tensors = {name: form for name, form in zip(inputs, forms, strict=True) if form != "s"}
    names = _Names(inputs, extra, outs, tensors, casts, values)
    return _HEADER + "\n".join(_strided(rank, names) if rank else _dense(names)) + "\n"


_HEADER = '''"""Generated by trireme.kernels.aten.elementwise.pointwise; safe to delete."""

import triton
import triton.language as tl

from trireme.kernels import chips


'''
_PROGRAM = [
    "    chips.begin(EARLY, OPEN=True)",
    "    program = tl.program_id(0)",
    "    if WIDE:",
    "        program = program.to(tl.int64)",
]


def _access(names: _Names, indent: str, masks: dict[str, str], at: str, blank: str) -> list[str]:
    """Load, apply, store, with `at` naming each operand's offsets, `masks` what each form of access is limited to, and `blank` the
    shape of a number."""
    lines = []
    for name in names.inputs:
        cast = "".join(f".to({kind})" for kind in names.casts[name])
        if name in names.tensors:
            value = f"tl.load({name} + {at.format(name=name)}{masks[names.tensors[name]]}){cast}"
        elif names.casts[name] == ("tl.int1",):
            value = f"{name} != 0"
        else:
            value = f"tl.broadcast_to({_number(name, names.casts[name][-1])}{cast}, {blank})"
        lines.append(f"{indent}v_{name} = {value}")
    lines.append(f"{indent}{', '.join(f'r_{name}' for name in names.outs)} = function({names.values})")
    for name in names.outs:
        lines.append(f"{indent}tl.store({name} + {at.format(name=name)}, r_{name}.to({name}.dtype.element_ty){masks['t']})")
    return lines


def _dense(names: _Names) -> list[str]:
    arguments = ", ".join([*names.inputs, *names.numbers, *names.outs, "count"])
    masked = _access(names, "        ", {"t": ", mask=at < count"}, "at", "(1,)")
    # A ragged count would turn every access into single elements, so full blocks go without a mask.
    plain = _access(names, "        ", {"t": ""}, "at", "(1,)")
    return [
        f"def pointwise({arguments}, BLOCK: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):",
        *_PROGRAM,
        "    at = program * BLOCK + tl.arange(0, BLOCK)",
        "    if TAIL and (program + 1) * BLOCK <= count:",
        *plain,
        "    else:",
        *masked,
    ]


def _strided(rank: int, names: _Names) -> list[str]:
    last = rank - 1
    walk = [f"n{d}" for d in range(rank)] + [f"{name}_{d}" for name in (*names.tensors, *names.outs) for d in range(rank)]
    arguments = ", ".join([*names.inputs, *names.numbers, *names.outs, "rows", "column_blocks", *walk])
    lines = [f"def pointwise({arguments}, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):"]
    lines += _PROGRAM
    lines += ["    row = (program // column_blocks) * ROWS + tl.arange(0, ROWS)"]
    lines += ["    column = (program % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)"]
    lines += [f"    mask = (row < rows)[:, None] & (column < n{last})[None, :]", "    rest = row"]
    for d in range(rank - 2, -1, -1):
        lines += [f"    index{d} = rest % n{d}" if d else f"    index{d} = rest", *([f"    rest = rest // n{d}"] if d else [])]
    for name in (*names.tensors, *names.outs):
        outer = "(" + (" + ".join(f"index{d} * {name}_{d}" for d in range(last)) or "row * 0") + ")[:, None]"
        inner = f"(column * {name}_{last})[None, :]"
        lines.append(f"    at_{name} = " + {"c": outer, "r": inner}.get(names.tensors.get(name, "t"), f"{outer} + {inner}"))
    masks = {"t": ", mask=mask", "c": ", mask=(row < rows)[:, None]", "r": f", mask=(column < n{last})[None, :]"}
    return lines + _access(names, "    ", masks, "at_{name}", "(1, 1)")


def load_source(stem: str, source: str) -> ModuleType:
    """Imports generated source from the cache folder, written there the first time; a temporary folder replaces a read-only one."""
    name = f"{stem}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    try:
        folder = tune.cache_folder() / "generated"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.py"
        if not path.exists() or path.read_bytes() != source.encode():  # or cut short by a full disk
            scratch = folder / f".{name}.{os.getpid()}"
            scratch.write_text(source)
            scratch.replace(path)
    except OSError:
        path = tune.Path(tempfile.mkdtemp(prefix="trireme-kernels-")) / f"{name}.py"
        path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"trireme_generated_{name}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
