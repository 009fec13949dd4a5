"""The thin launch path: a kernel is compiled once per kind of arguments and then started through its raw handle; what a call
starts and allocates can be noted. Knows Triton's launcher, never what a kernel computes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import OutOfResources, interpreter

from trireme.kernels import chips


def _mend_interpreter() -> None:
    """Mends four gaps of the interpreter: loops with run-time bounds (numpy 2.4 makes no int of a one-element array);
    products of bfloat16, which it holds as bit patterns; conversions to it, which cut off; floats of eight bits that round up."""
    original = interpreter._patch_lang_tensor
    builder = interpreter.InterpreterBuilder
    original_dot, original_cast, original_plain = builder.create_dot, builder.create_fp_to_fp, builder.cast_impl

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original_dot(self, widened(a), widened(b), *rest)

    def cast(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.scalar != tl.float8e4nv or source.dtype.scalar != tl.float32:
            return original_cast(self, source, target, rounding)
        rounded = torch.from_numpy(source.data.copy()).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(rounded.numpy(), target.scalar)

    def plain_cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar != tl.bfloat16 or source.dtype.scalar == tl.bfloat16:
            return original_plain(self, source if source.dtype.scalar == target.scalar else widened(source), target)
        rounded = torch.from_numpy(source.data.astype("float32")).to(torch.bfloat16).view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view("uint16"), tl.bfloat16)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.create_fp_to_fp, builder.cast_impl = dot, cast, plain_cast


if chips.current().interpreted:
    _mend_interpreter()


class Unsupported(Exception):
    """These arguments are outside what a kernel covers; the registry then calls torch's own kernel."""


# Releases of Triton with which its private launcher was tried; with any other the public one serves.
TRIED = ("3.6.",)
# What NVIDIA's private launcher has, whose raw start is called directly.
_LAUNCHER = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")


class Handle(NamedTuple):
    """A compiled kernel: its raw start, what that takes besides grid, stream and values, and what a driver must know."""

    start: Any
    function: Any
    cooperative: bool
    dependent: bool
    metadata: Any
    kinds: str | None = None  # of the values, by the letters of `quick.Raw`; None where only the raw start knows them


class Recording:
    """What one call of an operator allocates and launches, noted while it runs."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.lasting: list[torch.Tensor] = []  # memory that outlives the call and belongs to the stream it ran on
        self.launches: list[tuple[Handle, tuple[int, ...], tuple[Any, ...]]] = []
        self.settings: list[tuple[Callable[[], Any], Any]] = []
        self.repeatable = True


class _Thread(threading.local):
    recording: Recording | None = None


current = _Thread()  # each thread's recording, if it makes one now
recordings: list[Recording] = []  # of all threads; asking whether there are any is quicker than asking for one's own


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, stride: Sequence[int] | None = None) -> torch.Tensor:
    """New memory for a result or a workspace; all that a repeatable operator allocates comes from here."""
    kind: Any = {"dtype": dtype, "device": device}
    return _noted(torch.empty(shape, **kind) if stride is None else torch.empty_strided(shape, stride, **kind))


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """New memory laid out as torch lays out a result like `x`."""
    return _noted(torch.empty_like(x))


def _noted(made: torch.Tensor) -> torch.Tensor:
    if current.recording is not None:
        current.recording.made.append(made)
        if made.get_device() != chips.current_device():  # repetitions allocate on the current one
            current.recording.repeatable = False
    return made


def lasting(*memory: torch.Tensor) -> None:
    """Says that the running operator uses memory that stays, one per stream."""
    if current.recording is not None:
        current.recording.lasting += memory


def setting(ask: Callable[[], Any]) -> Any:
    """Asks for a setting of the process on which the launches depend; a repetition asks again."""
    answer = ask()
    if current.recording is not None:
        current.recording.settings.append((ask, answer))
    return answer


def unrepeatable() -> None:
    """Says that the running call depends on more than its arguments, or that torch's own kernels write in it."""
    if current.recording is not None:
        current.recording.repeatable = False


# Triton's interpreter changes the names of its language while it runs, for all threads.
_one_at_a_time: Any = threading.RLock() if chips.current().interpreted else contextlib.nullcontext()


class Kernel:
    """A Triton function with its compiled forms. Call it with the grid, then run-time arguments, then constants by name."""

    def __init__(self, function: Callable[..., None], counts: tuple[str, ...] = (), subnormal: bool = False) -> None:
        """`counts` are numbers on which nothing is specialised; `subnormal`: the device library keeps such numbers."""
        self.function = function
        self.options = {"enable_reflect_ftz": False} if subnormal and chips.current().flushes else {}
        self.jit = triton.jit(function, do_not_specialize=counts)
        self.counts = frozenset(function.__code__.co_varnames.index(name) for name in counts)
        self.early = self.jit.arg_names[-1:] == ["EARLY"]
        self.compiled: dict[tuple[Any, ...], Handle] = {}
        self.direct = not chips.current().interpreted and triton.__version__.startswith(TRIED)

    def __call__(
        self, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, dependent: bool | None = None, **constants: Any
    ) -> None:
        """Starts the kernel on the current stream; positional arguments first, constants in the order of the signature.

        A `dependent` kernel may start while the one before it still runs, and must itself wait before it writes, or reads what
        that writes. One that ends its signature with EARLY and begins with `chips.begin` does so, unless it is told otherwise or
        the chip lets none.
        """
        if grid[0] == 0:
            return
        if self.early:
            constants["EARLY"] = dependent = dependent is not False and chips.current().early
        if not self.direct:
            self._through_triton(grid, args, {"num_warps": warps, "num_stages": stages}, constants)
            return
        key: list[Any] = [warps, stages, bool(dependent), *constants.values()]
        values: list[Any] = []
        device = -1
        for index, value in enumerate(args):
            if type(value) is int:
                values.append(value)
                if index in self.counts:
                    continue
                small = -(2**31) <= value < 2**31
                key.append(-1 if value == 1 else (value & 15 == 0) if small else _specialisation(value))
            elif isinstance(value, torch.Tensor):
                pointer = value.data_ptr()
                values.append(pointer)
                key.append((value.dtype, pointer & 15 == 0))
                device = value.get_device()
            else:
                values.append(value)
                key.append(_specialisation(value))
                if is_descriptor(value):
                    device = value.base.get_device()
        if device >= 0 and device != chips.current_device():
            with chips.device_module().device(device):
                self(grid, *args, warps=warps, stages=stages, dependent=dependent, **constants)
            return
        key.append(device)
        handle = self.compiled.get(tuple(key))
        if handle is None:
            handle = self._first(tuple(key), grid, args, {"num_warps": warps, "num_stages": stages}, bool(dependent), constants)
        else:
            start, function, cooperative, dependent, metadata, _ = handle
            grid_y = grid[1] if len(grid) > 1 else 1
            grid_z = grid[2] if len(grid) > 2 else 1
            stream = chips.current_stream(device)
            # fmt: off
            start(grid[0], grid_y, grid_z, stream, function, cooperative, dependent, None, None, metadata, None, None, None,
                  *values, *constants.values())
            # fmt: on
        if current.recording is not None:
            _note(current.recording, handle, grid, args, constants)

    def _first(
        self, key: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...], sizes: dict[str, int], dependent: bool,
        constants: dict[str, Any],
    ) -> Handle | None:  # fmt: skip
        """Compiles through Triton, which also runs it, and keeps the raw handle when Triton's internals look as expected."""
        options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
        built = self._fitted(grid, args, sizes | options, constants)
        launcher: Any = getattr(built, "run", None)
        if not all(hasattr(launcher, name) for name in _LAUNCHER):  # another vendor's, whose raw start takes other arguments
            self.direct = False
            return None
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        self.compiled[key] = Handle(
            launcher.launch,
            built.function,
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            built.packed_metadata,
            _kinds(built),
        )
        return self.compiled[key]

    def _fitted(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], constants: dict[str, Any]) -> Any:
        """Compiles and runs it; on a chip with less shared memory than the cut was made for, with fewer stages in flight."""
        while True:
            try:
                return self.jit[grid](*args, **self.options, **options, **constants)
            except OutOfResources:
                if options["num_stages"] == 1:
                    raise
                options = options | {"num_stages": options["num_stages"] - 1}

    def _through_triton(
        self, grid: tuple[int, ...], args: tuple[Any, ...], sizes: dict[str, int], constants: dict[str, Any]
    ) -> None:
        """Starts it as Triton does, interpreted or not; only an interpreted start can be noted, by what repeats it."""
        with _one_at_a_time:
            self._fitted(grid, args, sizes, constants)
        if current.recording is None:
            return
        types = [value.dtype if isinstance(value, torch.Tensor) else None for value in args]
        names = list(constants)

        def start(x: int, y: int, z: int, *rest: Any) -> None:
            values = rest[10:]
            given = [value if kind is None else _memory(value, kind) for value, kind in zip(values, types, strict=False)]
            named = dict(zip(names, values[len(given) :], strict=True))
            with _one_at_a_time:
                self.jit[(x, y, z)](*given, **sizes, **named)

        described = any(is_descriptor(value) for value in args)
        handle = Handle(start, None, False, False, None) if chips.current().interpreted and not described else None
        _note(current.recording, handle, grid, args, constants)


_LETTERS = {"constexpr": "-", "fp32": "f", "fp64": "d"} | {f"{sign}{bits}": "i" for sign in "iu" for bits in (1, 8, 16, 32, 64)}


def _kinds(built: Any) -> str | None:
    """What each argument of a compiled kernel is to a driver; None if one is something else, such as a descriptor."""
    try:
        return "".join("p" if kind[0] == "*" else _LETTERS[kind] for kind in built.src.signature.values())
    except (AttributeError, KeyError, TypeError, IndexError):
        return None


def _note(recording: Recording, handle: Handle | None, grid: tuple[int, ...], args: tuple[Any, ...], constants: Any) -> None:
    if handle is None:
        recording.repeatable = False
    else:
        recording.launches.append((handle, (*grid, 1, 1)[:3], (*args, *constants.values())))


def _memory(pointer: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory at an address as the interpreter wants it: it takes only type and address of the tensor."""
    return torch.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(pointer), dtype=dtype)


def _specialisation(value: Any) -> Any:
    """At least as fine as what Triton itself specialises an argument on."""
    if type(value) is int:
        return (value & 15 == 0, value < 2**63)
    if is_descriptor(value):
        return (value.base.dtype, tuple(value.block_shape), len(value.shape))
    return value if value is None else type(value)


def is_descriptor(value: Any) -> bool:
    """Whether an argument describes a tensor to the chip's copy engine, be it Triton's description or Gluon's."""
    return hasattr(value, "block_shape")


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorator: makes a Triton function startable through the thin path."""
    return Kernel(function)


def kernel_of_any(*counts: str) -> Callable[[Callable[..., None]], Kernel]:
    """The same for a function whose arguments of these names are any small numbers from call to call: one compiled form serves all,
    where Triton would make others for 1 and for multiples of 16."""
    return lambda function: Kernel(function, counts)


def doubled(value: Any) -> Any:
    """A number as its 64 bits: a run-time float argument reaches a kernel as float32."""
    return struct.unpack("<q", struct.pack("<d", value))[0] if isinstance(value, float) else value


def next_power(value: int) -> int:
    """The least power of two that is at least `value` (and at least 1)."""
    return 1 << max(value - 1, 0).bit_length()


def shared_by(*sizes: int) -> int:
    """The power of two up to eight that divides all, for `scalar.multiple`; 1 where sixteen does, of which Triton knows."""
    common = math.gcd(*sizes)
    return 1 if common % 16 == 0 else common & -common


def blocks(count: int, block: int) -> int:
    """How many blocks cover `count`."""
    return -(-count // block)
