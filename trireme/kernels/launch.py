"""The thin launch path: a kernel is compiled once per kind of arguments and then started through its raw handle.
Knows Triton's launcher, never what a kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from trireme.kernels import chips


def _mend_interpreter() -> None:
    """Mends two gaps of the interpreter: loops with run-time bounds (numpy 2.4 no longer makes an int of a one-element
    array), and products of bfloat16, which it holds as bit patterns and multiplied as integers."""
    original = interpreter._patch_lang_tensor
    builder = interpreter.InterpreterBuilder
    original_dot = builder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original_dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patched
    builder.create_dot = dot


if chips.current().interpreted:
    _mend_interpreter()


class Unsupported(Exception):
    """These arguments are outside what a kernel covers; the registry then calls torch's own kernel."""


class Kernel:
    """A Triton function with its compiled forms. Call it with the grid, then run-time arguments, then constants by name."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.jit = triton.jit(function)
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.direct = not chips.current().interpreted
        self.latest: tuple[Any, ...] | None = None  # the handle of the last start, for callers that remember whole calls

    def __call__(
        self, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 3, dependent: bool = False, **constants: Any
    ) -> None:
        """Starts the kernel on the current stream; positional arguments first, constants in the order of the signature.

        A `dependent` kernel may start while the one before it still runs, and must itself wait before it reads what that writes.
        """
        if grid[0] == 0:
            return
        if not self.direct:
            self.jit[grid](*args, num_warps=warps, num_stages=stages, **constants)
            return
        key: list[Any] = [warps, stages, dependent, *constants.values()]
        values: list[Any] = []
        device = -1
        for value in args:
            if type(value) is int:
                values.append(value)
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
                if isinstance(value, TensorDescriptor):
                    device = value.base.get_device()
        if device >= 0 and device != chips.current_device():
            with chips.device_module().device(device):
                self(grid, *args, warps=warps, stages=stages, dependent=dependent, **constants)
            return
        key.append(device)
        entry = self.latest = self.compiled.get(tuple(key))
        if entry is None:
            self._first(tuple(key), grid, args, {"num_warps": warps, "num_stages": stages}, dependent, constants)
            return
        start, function, cooperative, dependent, metadata = entry
        grid_y = grid[1] if len(grid) > 1 else 1
        grid_z = grid[2] if len(grid) > 2 else 1
        stream = chips.current_stream(device)
        # fmt: off
        start(grid[0], grid_y, grid_z, stream, function, cooperative, dependent, None, None, metadata, None, None, None,
              *values, *constants.values())
        # fmt: on

    def _first(
        self, key: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...], sizes: dict[str, int], dependent: bool,
        constants: dict[str, Any],
    ) -> None:  # fmt: skip
        """Compiles through Triton, which also runs it, and keeps the raw handle when Triton's internals look as expected."""
        options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
        built = self.jit[grid](*args, **sizes, **options, **constants)
        launcher: Any = getattr(built, "run", None)
        if not hasattr(launcher, "launch"):
            self.direct = False
            return
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return
        self.latest = self.compiled[key] = (
            launcher.launch,
            built.function,
            launcher.launch_cooperative_grid,
            launcher.launch_pdl,
            built.packed_metadata,
        )


class Shortcut:
    """A launch seen before, with the same types, shapes and strides: only pointers are new. `tail` are all later arguments."""

    __slots__ = ("device", "grid", "handle", "tail")

    def __init__(self, handle: tuple[Any, ...], grid: tuple[int, ...], tail: tuple[Any, ...], device: int) -> None:
        self.handle, self.tail, self.device = handle, tail, device
        self.grid = (*grid, 1, 1)[:3]

    def start(self, *pointers: Any) -> bool:
        """Runs it again, unless a pointer is unaligned or another device is current."""
        together = 0
        for pointer in pointers:
            together |= pointer or 0
        if together & 15 or chips.current_device() != self.device:
            return False
        start, function, cooperative, dependent, metadata = self.handle
        # fmt: off
        start(*self.grid, chips.current_stream(self.device), function, cooperative, dependent, None, None, metadata,
              None, None, None, *pointers, *self.tail)
        # fmt: on
        return True


class Shortcuts:
    """The launches that one operator remembers."""

    def __init__(self, most: int = 4096) -> None:
        self.known: dict[tuple[Any, ...], Shortcut] = {}
        self.most = most

    def keep(self, key: tuple[Any, ...], used: Kernel, grid: tuple[int, ...], tail: tuple[Any, ...], tensors: list[Any]) -> None:
        """Remembers the launch that `used` just did, if its pointers were aligned, as a repetition will check."""
        if used.latest is None or any(x is not None and x.data_ptr() & 15 for x in tensors):
            return
        if len(self.known) >= self.most:
            self.known.clear()
        device = next(x.get_device() for x in tensors if x is not None)
        self.known[key] = Shortcut(used.latest, grid, tail, device)


def _specialisation(value: Any) -> Any:
    """At least as fine as what Triton itself specialises an argument on."""
    if type(value) is int:
        return (value & 15 == 0, value < 2**63)
    if isinstance(value, TensorDescriptor):
        return (value.base.dtype, tuple(value.block_shape), len(value.shape))
    return value if value is None else type(value)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorator: makes a Triton function startable through the thin path."""
    return Kernel(function)


def next_power(value: int) -> int:
    """The least power of two that is at least `value` (and at least 1)."""
    return 1 << max(value - 1, 0).bit_length()


def blocks(count: int, block: int) -> int:
    """How many blocks cover `count`."""
    return -(-count // block)
