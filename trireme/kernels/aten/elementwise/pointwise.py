"""Kernels from scalar functions: decorate `f(x, y, alpha)` and call it on tensors of any rank, strides and types.
Knows promotion, broadcasting and layout, never which function it applies."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

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
# Of programs that come early an H200 starts 810 a microsecond, of others 1000 and more, which shows where they are many and move
# little: adding a row to 64 MiB took 40.3 µs, and 33.6 when it did not come early. Of many programs only dense ones are looked at.
_FEW, _MUCH = 1024, 6144  # programs; bytes that one moves
# Of so many elements a thread takes four, of more eight: the fewer, the sooner the last is done, but the more warps must begin.
# With sixteen 2²⁰ gelu of bfloat16 took 2.1 µs on an H200, with four 1.9; and where types differ in size, Triton gives a thread 16
# bytes of the smallest, so that neighbours read 64 bytes apart (2²⁰ comparisons of misaligned floats 5.5 µs, with four 2.3).
_SOON = 3 << 19
_MANY = 1 << 24  # elements from which on the memory is the limit
_LITTLE = 1 << 19  # elements up to which more threads help than there would be
_FLAT = -1  # in the place of a rank: a dense result is counted through
_DIVISOR = ("length", "factor", "shift")
_KINDS = ("same", "float", "bool", "condition")
Number = int | float | bool


class Pointwise:
    """A scalar function lifted to tensors. Calls take its operands in order; the result has the broadcast shape.

    `kind` says how types promote: "same" (torch's result type), "float" (integers become the default float),
    "bool" (operands rounded to the result type, stored as bool), "condition" (the first operand is a condition and takes no part).
    The last `scalars` parameters are plain numbers that do not promote. It has no gradient; that is the registry's.
    `costly`: it takes so many instructions that computing lasts as long as reading.
    """

    def __init__(
        self, function: Callable[..., Any], kind: str = "same", scalars: int = 0, outputs: int = 1, costly: bool = False
    ) -> None:
        if kind not in _KINDS:
            raise ValueError(f"no kind of promotion {kind!r}; there are {', '.join(_KINDS)}")
        # The interpreter patches the language around the outermost kernel; inside it a plain function is enough.
        self.function = function if chips.current().interpreted else triton.jit(function)
        self.kind = kind
        self.num_scalars = scalars
        self.num_inputs = function.__code__.co_argcount - scalars
        self.num_outputs = outputs
        self.costly = costly
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
        widths = [x.element_size() for x in outs]
        flat = _flattens(plan, len(outs), max(widths))
        rank = 0 if plan.dense else _FLAT if flat else len(plan.sizes)
        forms = _forms(inputs, plan, rank)
        full = [x for x, form in zip(inputs, forms, strict=True) if form in "dt"]  # of others elements come again and again
        widths += [x.element_size() for x in full or inputs if isinstance(x, torch.Tensor)]
        key = (rank, forms, compute, len(scalars))
        kernel = self.kernels.get(key)
        if kernel is None:
            kernel = self.kernels[key] = self._build(rank, forms, compute)
        if plan.dense or flat:
            even = not flat and all(x.data_ptr() % 16 == 0 for x in (*inputs, *outs) if isinstance(x, torch.Tensor))
            block, warps = self._cut(plan.count, widths, even, flat, bool(full))
            grid = (blocks(plan.count, block),)
            walk = (*_divisor(plan.sizes[1]), *_uneven(plan, forms)) if flat else ()
            kernel(grid, *inputs, *scalars, *outs, *walk, plan.count, BLOCK=block, TAIL=plan.count % 16 != 0, WIDE=plan.wide,
                   warps=warps, dependent=grid[0] <= _FEW or block * sum(widths) >= _MUCH)  # fmt: skip
            return
        inner = plan.sizes[-1]
        rows, columns, warps = _tile(plan, "t" in forms, max(widths), self.costly)
        column_blocks = blocks(inner, columns)
        grid = (column_blocks * blocks(plan.count // inner, rows),)
        walk = (plan.count // inner, column_blocks, *plan.sizes, *plan.strides)
        kernel(grid, *inputs, *scalars, *outs, *walk, ROWS=rows, COLUMNS=columns, WIDE=plan.wide, warps=warps,
               dependent=grid[0] <= _FEW)  # fmt: skip

    def _cut(self, count: int, widths: Sequence[int], even: bool, flat: bool, reads: bool) -> tuple[int, int]:
        """Elements and warps of one program, where it counts through elements of so many bytes; even: a thread takes 16 bytes of
        them at once; flat: not all lie as they are counted; reads: not only what repeats itself."""
        chip, widest = chips.current(), max(widths)
        block = chip.pointwise_block
        if count <= block * chip.multiprocessors // 2:
            block = max(block // 4, 256)
        elif widest == 1 and even and count > _SOON:  # fewer programs, since starting them would take longer than reading
            return 2 * block, max(4, block // 128)  # eight bytes: 2²¹ products took 2.4 µs with sixteen, so 1.7
        elif widest == 8:
            if self.costly:  # 12192752 cosines of float64 took 50.5 µs with eight warps, so 47.7; 500000 powers 7.2 with four
                return (block // 4, 4) if count > _LITTLE else (block // 8, 8)
            size = sum(widths)
            if size == 16 and count <= _LITTLE:  # one: 300000 gelu of float64 took 2.7 µs with four, so 2.4
                return block // 4, max(4, block // 128)
            # Four for each thread: comparing a column of 337 float64 with a row of 44678 took 37.0 µs with two, so 22.6; but of 700
            # with 1003 2.4 and 2.0.
            if size < 16 or (size == 16 and count < _MANY and not flat) or (not reads and count > 2 * _LITTLE):
                return block // 2, max(4, block // 256)
            if size < 24 and even:  # comparisons: 2²¹ took 5.5 µs with half as many, so 4.9
                return block // 2, max(4, block // 128)
            # Two: 4553 x 127 comparisons of float64 that begin anywhere took 3.4 µs with four, so 2.1; every other of 4096 x 257
            # of int64 3.0 and 2.1.
            return block // 4, max(4, block // 256)
        elif self.costly and widest == 4 and sum(widths) > 8:
            # A warp alone, which waits for no other, so that of few programs none comes late: 2²⁰ powers took 4.4 µs with four, so
            # 3.9. Of more two: 2²² took 13.5 µs with one, so 12.9.
            return (block // 8, 1) if count <= _SOON else (block // 4, 2)
        elif self.costly and (widest == 4 or count >= _MANY):
            # 32 bytes for each thread: 600000 powers of float32 took 4.3 µs, so 3.4; 2²⁵ of bfloat16 61.6, so 53.9.
            return block // max(1, widest // 2), 4
        elif widest == 4 and count >= _MANY:
            # Four for each thread: 2²⁵ inverse roots of float32 took 66.3 µs with eight, so 64.4.
            return block // 2, max(4, block // 256)
        # 1700000 sums of float32 took 3.9 µs with eight for each thread, so 3.1; but 3037536 gelu of float32 4.7 and 5.3.
        soon = _SOON * (2 if widest == 4 and sum(widths) > 8 else 1)
        return block, max(4, block // (128 if count <= soon else 256))

    def _build(self, rank: int, forms: tuple[str, ...], compute: torch.dtype) -> Kernel:
        # What is stored in the type it promotes to needs no rounding before; a comparison does.
        rounded = _ROUNDED.get(compute) if self.kind == "bool" else None
        source = generate(rank, forms, self.num_scalars, self.num_outputs, _COMPUTE[compute], self.kind == "condition", rounded)
        module = load_source(f"{self.name}_{'flat' if rank == _FLAT else f'{rank}d'}", source)
        module.__dict__["function"] = self.function
        return Kernel(module.__dict__["pointwise"], _DIVISOR if rank == _FLAT else ())


def pointwise(
    kind: str = "same", scalars: int = 0, outputs: int = 1, costly: bool = False
) -> Callable[[Callable[..., Any]], Pointwise]:
    """Decorator that makes a `Pointwise` of a scalar function written in Triton's language."""
    return lambda function: Pointwise(function, kind, scalars, outputs, costly)


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


def _tile(plan: Plan, reads: bool, widest: int, costly: bool = False) -> tuple[int, int, int]:
    """Rows, columns and warps of one program: long rows where the last dimension is contiguous for all, a square where layouts
    cross. `reads`: not only what repeats itself; `widest`: bytes of the largest elements."""
    chip, inner, warps = chips.current(), plan.sizes[-1], 4
    if plan.crossed:
        # 25.8 against 27.5 µs for adding a turned matrix of 4096 squared (H200), as soon as there are programs enough.
        columns = 64 if plan.count >= 4 * 64 * 64 * chip.multiprocessors else 32
        elements = columns * columns
    elif len(plan.sizes) == 1:
        # Neighbours that lie apart, or backwards, do not come together: 14.8 µs for 3000003 halves with as many for each thread, so
        # 6.2; and of eight bytes, stored one by one, best one for each (9.8 µs for 1658718 with four, so 7.1).
        # If each takes long, then four for each, unless there are few (1357489 cosines 8.0 µs, so 6.1; 500000 powers 7.7 and 5.9).
        few = costly and plan.count <= _LITTLE
        single = widest == 8 and (inner % 16 != 0 or few)
        columns = elements = chip.pointwise_block // (8 if single else 4)
        warps = 4 if not single else 2 if costly and not few else 8
    elif widest == 8 and reads:
        # Two for each thread: 2²⁰ sums of int64 in halves of rows of 64 took 5.4 µs with eight, so 3.6; and fewer warps where rows
        # are read backwards (a matrix of 32768 x 64 turned so took 12.1 µs, so 6.8).
        back = any(stride < 0 for stride in plan.strides[len(plan.sizes) - 1 :: len(plan.sizes)])
        columns = elements = chip.pointwise_block // (8 if back else 4)
        warps = 4 if back else 8
    else:
        # What hardly reads writes at three quarters of the bandwidth in half a block (21.6 against 16.6 µs for 64 MiB, H200).
        # But of what takes long fewer for each thread: 40 x 13184 powers of a column and a row of float64 took 8.8 µs, so 6.0.
        long = costly and widest == 8
        elements = chip.pointwise_block // 2 if reads or long else chip.pointwise_block
        columns = chip.pointwise_block // 2
        warps = 8 if long or (plan.count <= _SOON and not _aligned(plan)) else 4
    columns = min(next_power(inner), columns)
    rows = max(1, min(elements // columns, next_power(plan.count // inner)))
    return rows, columns, warps if widest == 8 or rows * columns >= 1024 else 4


def _aligned(plan: Plan) -> bool:
    """Whether all tensors have rows that a thread can take 16 bytes of at once."""
    rank = len(plan.sizes)
    return all(stride in (0, 1) if at % rank == rank - 1 else stride % 16 == 0 for at, stride in enumerate(plan.strides))


def _flattens(plan: Plan, outputs: int, widest: int) -> bool:
    """Whether rows of a dense result are better counted through than cut into tiles, which rows of such a length leave partly empty
    or begin at odd places: dividing by a row's length then costs less (100000 x 33 powers took 31.6 µs in tiles)."""
    if len(plan.sizes) != 2 or plan.count >= 1 << 30 or plan.wide or plan.crossed:
        return False
    inner = plan.sizes[1]
    if any(stride != (inner, 1)[i % 2] for i, stride in enumerate(plan.strides[-2 * outputs :])):
        return False
    rows, columns, _ = _tile(plan, True, widest)
    back = any(stride < 0 for stride in plan.strides[1::2])  # in several rows at once, for which lanes would run down the rows
    # Of eight bytes too, if all that is read repeats itself: a column of 6411 float64 by a row of 1408 took 30.4 µs in tiles, so
    # 19.5, and their powers 117 and 83.
    repeating = widest == 8 and all(0 in plan.strides[at : at + 2] for at in range(0, len(plan.strides) - 2 * outputs, 2))
    return inner % 16 != 0 or blocks(inner, columns) * columns > 1.1 * inner or (back and rows > 1) or repeating


def _divisor(length: int) -> tuple[int, int, int]:
    """A row's length, and by what its number is found without division: (n + the upper half of n · factor) >> shift."""
    shift = (length - 1).bit_length()
    factor = ((((1 << shift) - length) << 32) // length + 1) & 0xFFFFFFFF
    return length, factor - (1 << 32 if factor >= 1 << 31 else 0), shift


def _uneven(plan: Plan, forms: Sequence[str]) -> list[int]:
    """The strides of all inputs that are not as dense as the result."""
    read = [form for form in forms if form != "s"]
    return [stride for i, form in enumerate(read) if form != "d" for stride in plan.strides[2 * i : 2 * i + 2]]


def _forms(inputs: Sequence[Any], plan: Plan, rank: int) -> tuple[str, ...]:
    """How a kernel reads each input: s a number, t a tile, d as the result lies, and where a tensor repeats itself c one column of
    it or r one row."""
    forms = []
    walk = iter(plan.strides)
    for x in inputs:
        if not isinstance(x, torch.Tensor):
            forms.append("s")
            continue
        strides = [next(walk) for _ in plan.sizes]
        if rank == _FLAT and strides == [plan.sizes[1], 1]:
            forms.append("d")
        elif rank in (0, 1) or (strides[-1] and any(strides[:-1])):
            forms.append("t")
        else:
            forms.append("r" if strides[-1] else "c")
    return tuple(forms)


def _number(name: str, kind: str) -> str:
    """The argument of that name as a number of the compute type."""
    return f"tl.full((), {name}, tl.int64).to(tl.float64, bitcast=True)" if kind == "tl.float64" else f"tl.full((), {name}, {kind})"


def generate(
    rank: int, forms: Sequence[str], scalars: int, outputs: int, compute: str, condition: bool, rounded: str | None = None
) -> str:
    """Source of the kernel for `rank` collapsed dimensions (0: all operands dense); calls a global named `function`.
    `rounded`: the narrower type that operands are rounded to before they are computed with."""
    inputs = [f"x{i}" for i in range(len(forms))]
    extra = [f"s{i}" for i in range(scalars)]
    outs = [f"y{i}" for i in range(outputs)]
    tensors = {name: form for name, form in zip(inputs, forms, strict=True) if form != "s"}
    chain = (rounded, compute) if rounded else (compute,)
    casts = {name: ("tl.int1",) if condition and name == "x0" else chain for name in inputs}
    numbers = [_number(name, compute) if compute == "tl.float64" else name for name in extra]
    values = ", ".join([*(f"v_{name}" for name in inputs), *numbers])
    body = {0: _dense, _FLAT: _flat}.get(rank, _strided)
    return _HEADER + body(rank, inputs, extra, outs, tensors, casts, values)


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


def _access(
    indent: str,
    masks: dict[str, str],
    inputs: list[str],
    tensors: dict[str, str],
    outs: list[str],
    casts: dict[str, tuple[str, ...]],
    values: str,
    at: str,
    flat: bool = True,
) -> list[str]:
    """Load, apply, store, with `at` naming each operand's offsets and `masks` what each form of access is limited to."""
    lines = []
    for name in inputs:
        cast = "".join(f".to({kind})" for kind in casts[name])
        if name in tensors:
            place = f"{name} + {at.format(name=name)}{masks[tensors[name]]}"
            lines.append(f"{indent}v_{name} = tl.load({place}){cast}")
        elif casts[name] == ("tl.int1",):
            lines.append(f"{indent}v_{name} = {name} != 0")
        else:
            number = _number(name, casts[name][-1])
            lines.append(f"{indent}v_{name} = tl.broadcast_to({number}{cast}, {'(1,)' if flat else '(1, 1)'})")
    results = [f"r_{name}" for name in outs]
    lines.append(f"{indent}{', '.join(results)} = function({values})")
    for name in outs:
        place = f"{name} + {at.format(name=name)}"
        lines.append(f"{indent}tl.store({place}, r_{name}.to({name}.dtype.element_ty){masks['t']})")
    return lines


def _dense(
    rank: int, inputs: list[str], extra: list[str], outs: list[str], tensors: dict[str, str], casts: dict, values: str
) -> str:
    arguments = ", ".join([*inputs, *extra, *outs, "count"])
    lines = [f"def pointwise({arguments}, BLOCK: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):"]
    lines += _PROGRAM
    lines += ["    at = program * BLOCK + tl.arange(0, BLOCK)"]
    masked = _access("    ", {"t": ", mask=at < count"}, inputs, tensors, outs, casts, values, "at")
    # A ragged count would turn every access into single elements, so full blocks go without a mask.
    plain = _access("        ", {"t": ""}, inputs, tensors, outs, casts, values, "at")
    lines += ["    if TAIL and (program + 1) * BLOCK <= count:", *plain, "    else:", *["    " + line for line in masked]]
    return "\n".join(lines) + "\n"


def _flat(
    rank: int, inputs: list[str], extra: list[str], outs: list[str], tensors: dict[str, str], casts: dict, values: str
) -> str:
    operands = [name for name, form in tensors.items() if form != "d"]
    strides = [f"{name}_{d}" for name in operands for d in range(2)]
    arguments = ", ".join([*inputs, *extra, *outs, *_DIVISOR, *strides, "count"])
    lines = [f"def pointwise({arguments}, BLOCK: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):"]
    lines += _PROGRAM
    lines += ["    at = program * BLOCK + tl.arange(0, BLOCK)"]
    lines += ["    upper = tl.umulhi(at.to(tl.uint32), factor.to(tl.uint32)).to(tl.int32)"]
    lines += ["    row = (upper + at) >> shift", "    column = at - row * length"]
    for name in [*tensors, *outs]:
        row, column = f"row * {name}_0", f"column * {name}_1"
        places = {"d": "at", "c": row, "r": column, "t": f"{row} + {column}"}
        lines.append(f"    at_{name} = {places[tensors.get(name, 'd')]}")
    masks = dict.fromkeys("dcrt", ", mask=at < count")
    masked = _access("    ", masks, inputs, tensors, outs, casts, values, "at_{name}")
    plain = _access("        ", dict.fromkeys("dcrt", ""), inputs, tensors, outs, casts, values, "at_{name}")
    lines += ["    if TAIL and (program + 1) * BLOCK <= count:", *plain, "    else:", *["    " + line for line in masked]]
    return "\n".join(lines) + "\n"


def _strided(
    rank: int, inputs: list[str], extra: list[str], outs: list[str], tensors: dict[str, str], casts: dict, values: str
) -> str:
    sizes = [f"n{d}" for d in range(rank)]
    operands = [*tensors, *outs]
    strides = [f"{name}_{d}" for name in operands for d in range(rank)]
    arguments = ", ".join([*inputs, *extra, *outs, "rows", "column_blocks", *sizes, *strides])
    lines = [f"def pointwise({arguments}, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr):"]
    lines += _PROGRAM
    lines += ["    row = (program // column_blocks) * ROWS + tl.arange(0, ROWS)"]
    lines += ["    column = (program % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)"]
    lines += [f"    mask = (row < rows)[:, None] & (column < n{rank - 1})[None, :]", "    rest = row"]
    for d in range(rank - 2, -1, -1):
        lines += [f"    index{d} = rest % n{d}" if d else f"    index{d} = rest", *([f"    rest = rest // n{d}"] if d else [])]
    for name in operands:
        outer = "(" + (" + ".join(f"index{d} * {name}_{d}" for d in range(rank - 1)) or "row * 0") + ")[:, None]"
        inner = f"(column * {name}_{rank - 1})[None, :]"
        lines.append(f"    at_{name} = " + {"c": outer, "r": inner}.get(tensors.get(name, "t"), f"{outer} + {inner}"))
    masks = {"t": ", mask=mask", "c": ", mask=(row < rows)[:, None]", "r": f", mask=(column < n{rank - 1})[None, :]"}
    lines += _access("    ", masks, inputs, tensors, outs, casts, values, "at_{name}", flat=False)
    return "\n".join(lines) + "\n"


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
