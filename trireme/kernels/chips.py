"""The one table of what depends on the chip: dispatch key, sizes, tricks. Knows no operator."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver


@dataclass(frozen=True)
class Chip:
    """What a kernel author may ask about the chip."""

    name: str
    device_type: str  # torch's device type, whose tensors these kernels take
    dispatch_key: str  # where `registry` puts the operators
    warp_size: int
    multiprocessors: int
    shared_memory: int  # bytes one block may use
    descriptors: bool  # bulk tensor copies through tensor descriptors
    interpreted: bool  # Triton's interpreter instead of compiled kernels
    pointwise_block: int  # elements of one pointwise program
    row_elements: int  # longest row that normalisations and softmax keep in registers
    fold_tile: int  # elements that a program of a reduction holds at once
    early: bool = False  # kernels that come onto the chip while the one before them still runs
    quick_log2: bool = False  # the device library has an approximation of the logarithm
    flushes: bool = False  # the device library takes subnormal numbers for zeros, unless a kernel is compiled otherwise
    resident_warps: int = 64  # that lie on a multiprocessor at once
    ptx: bool = False  # kernels may have NVIDIA's instructions in them
    balance: int = 128  # operations of the 16-bit tensor cores in the time in which memory gives a byte
    packed_rows: int = 0  # measured: rows up to which a product of packed weights is faster than decoding them first; 0: not known

    @property
    def autograd_key(self) -> str:
        return "Autograd" + self.dispatch_key


# Hopper's block sizes: 16 bytes a thread and access, four to eight accesses in flight. Its packed rows: on an H200 a step of 256
# rows of an 8B model takes 14.4 ms with matrices that are decoded first, 12.0 without.
HOPPER = Chip(
    "hopper", "cuda", "CUDA", 32, 132, 232448, True, False, 2048, 16384, 4096, True, True, True,
    ptx=True, balance=217, packed_rows=256,
)  # fmt: skip
AMPERE = replace(
    HOPPER, name="ampere", multiprocessors=108, shared_memory=166912, descriptors=False, early=False, balance=153, packed_rows=0
)
GENERIC = replace(AMPERE, name="gpu", multiprocessors=64, shared_memory=65536, row_elements=8192)
AMD = replace(GENERIC, name="amd", warp_size=64, quick_log2=False, flushes=False, ptx=False)
XPU = replace(GENERIC, name="xpu", device_type="xpu", dispatch_key="XPU", quick_log2=False, flushes=False, ptx=False)
# Few programs and large blocks: the interpreter's cost is per operation, not per element.
INTERPRETER = Chip("interpreter", "cpu", "CPU", 1, 1, 1 << 30, False, True, 4096, 16384, 1 << 16)


@triton.jit
def begin(EARLY: tl.constexpr, OPEN: tl.constexpr):
    """Waits until the kernel before is done: what a kernel that may come early does first. OPEN lets the next one come from now on,
    which does not pay where all programs lie on the chip at once, since those of the next kernel then find uneven room."""
    if EARLY:
        wait()
        if OPEN:
            let_next()


@triton.jit
def wait():
    """Waits until the kernel before is done, on a chip on which kernels come early."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def let_next():
    """Lets the next kernel come from now on, on a chip on which kernels come early."""
    tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def current() -> Chip:
    """The chip whose tensors kernels take in this process."""
    if triton.knobs.runtime.interpret:
        return INTERPRETER
    if torch.cuda.is_available():
        return _nvidia() if torch.version.hip is None else AMD
    return XPU if torch.xpu.is_available() else INTERPRETER


def _nvidia() -> Chip:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    base = {8: AMPERE, 9: HOPPER}.get(properties.major, GENERIC)
    shared = getattr(properties, "shared_memory_per_block_optin", base.shared_memory)
    early, balance = properties.major >= 9, balance_of(properties) or base.balance
    return replace(base, multiprocessors=properties.multi_processor_count, shared_memory=shared, early=early, balance=balance)


# Multiplications and additions of a multiprocessor's 16-bit tensor cores in a clock, by major and minor version; 1024 of others
_TENSOR_OPERATIONS = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}


def balance_of(properties: Any) -> int:
    """`Chip.balance` from what torch knows of a device; 0 where it does not know the clocks."""
    clock, memory = getattr(properties, "clock_rate", 0), getattr(properties, "memory_clock_rate", 0)
    bits = 2 * memory * getattr(properties, "memory_bus_width", 0)  # twice a clock
    operations = _TENSOR_OPERATIONS.get((properties.major, properties.minor), 1024) * properties.multi_processor_count * clock
    return 8 * operations // bits if bits else 0


def crowded(programs: int, warps: int) -> bool:
    """Whether there are more programs than lie on the chip at once, however little each needs."""
    return programs * warps > current().resident_warps * current().multiprocessors


@functools.cache
def getters() -> tuple[Callable[[], int], Callable[[int], int]]:
    """The shortest ways to ask for the device and its stream, as `current_device` and `current_stream` do; Triton's own go through
    several Python layers."""
    if current().interpreted:
        return lambda: -1, lambda device: 0
    if current().device_type == "cuda" and hasattr(torch._C, "_cuda_getDevice"):
        torch.cuda.init()
        return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    return driver.active.get_current_device, driver.active.get_current_stream


@functools.cache
def allocator() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """The shortest way to new memory of a shape, strides and type on the current device."""
    kind = current().device_type
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
    return quick or (lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=kind))


@functools.cache
def driver_launch(extended: bool) -> int | None:
    """The address of the driver's own start of a kernel, or of one that may come early; None where Triton's
    launcher is the only one that was ever tried."""
    return _driver_function("cuLaunchKernelEx" if extended else "cuLaunchKernel")


def _driver_function(name: str) -> int | None:
    if current().interpreted or current().device_type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return ctypes.cast(getattr(ctypes.CDLL("libcuda.so.1"), name), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def layout_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """One call that tells whether as many tensors, all of them others, have the types, shapes, strides and devices of these; None
    without one."""
    try:
        guards: Any = torch._C._dynamo.guards
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (AttributeError, TypeError, RuntimeError):
        return None


@functools.cache
def several_devices() -> bool:
    return not current().interpreted and device_module().device_count() > 1


def current_device() -> int:
    return getters()[0]()


def current_stream(device: int) -> int:
    """The raw stream that torch launches on now."""
    return getters()[1](device)


def device_module() -> Any:
    """torch's module for the chip's device (streams, events, graphs)."""
    return torch.get_device_module(current().device_type)


@functools.cache
def _capture_check() -> Callable[[], bool]:
    if current().interpreted:
        return lambda: False
    if current().device_type == "cuda" and hasattr(torch._C, "_cuda_isCurrentStreamCapturing"):
        return torch._C._cuda_isCurrentStreamCapturing
    return getattr(device_module(), "is_current_stream_capturing", lambda: False)


def capturing() -> bool:
    """Whether the current stream records a graph, in which host-side random state would be frozen."""
    return _capture_check()()


def record(call: Callable[[], object], count: int) -> Callable[[], None]:
    """A graph of `count` calls, to be replayed: device time without the cost of launching. The call must have run before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def elapsed(step: Callable[[], object]) -> float:
    """Microseconds that the device spends from the beginning of a step to its end."""
    module = device_module()
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def allows_tf32() -> bool:
    """Whether the user lets float32 products round their inputs to 10 mantissa bits."""
    return not current().interpreted and torch.backends.cuda.matmul.allow_tf32


def autocasts() -> bool:
    """Whether torch chooses the types in which the chip computes."""
    return torch.is_autocast_enabled(current().device_type)


def random_state(count: int, device: torch.device) -> tuple[int, ...] | None:
    """Seed and first Philox counter of `count` fresh random words, each as a lower and a higher half; moves the device's generator
    past them. None while a graph is recorded, which would freeze them."""
    if current().interpreted:
        return *_halves(int(torch.empty((), dtype=torch.int64).random_())), 0, 0
    if capturing():
        return None
    generator = device_module().default_generators[device.index or 0]
    offset = generator.get_offset()
    generator.set_offset(offset + (count + 3) // 4 * 4)
    return *_halves(generator.initial_seed()), *_halves(offset // 4)


def _halves(number: int) -> tuple[int, int]:
    """64 bits as two numbers with a sign, which to Triton are always of 32."""
    low, high = number & 0xFFFFFFFF, number >> 32 & 0x7FFFFFFF
    return low - (low >> 31 << 32), high
