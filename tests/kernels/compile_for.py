"""Compiles what operators and engine would start on a chip that is not here: `python compile_for.py CHIP [--all]`.

Nothing runs: each start of a kernel compiles it for the target instead, and asks whether it fits the chip's shared memory with as
many stages as it wants or fewer. A process of its own, because Triton decides once whether it interprets.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import OutOfResources

from trireme.kernels import chips, launch, scalar
from trireme.kernels.aten import registry
from trireme.kernels.aten.elementwise import pointwise
from trireme.kernels.aten.products import matmul
from trireme.ops import AttentionKind, CacheSpec, KVCache
from trireme.ops.cases import Draw

CPU = {"device_type": "cpu", "dispatch_key": "CPU"}  # tensors lie here; only compiling is asked for
HALF, SMALL = torch.bfloat16, 101376
CHIPS = {  # what Triton compiles for, and what kernels are told of the chip
    "sm_80": (GPUTarget("cuda", 80, 32), replace(chips.AMPERE, **CPU)),
    "sm_89": (GPUTarget("cuda", 89, 32), replace(chips.AMPERE, shared_memory=SMALL, **CPU)),
    "sm_100": (GPUTarget("cuda", 100, 32), replace(chips.GENERIC, shared_memory=232448, early=True, **CPU)),
    "sm_120": (GPUTarget("cuda", 120, 32), replace(chips.GENERIC, shared_memory=SMALL, early=True, **CPU)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), replace(chips.AMD, **CPU)),
    "gfx1100": (GPUTarget("hip", "gfx1100", 32), replace(chips.AMD, warp_size=32, **CPU)),
}
MODELS = {  # hidden, inner, heads, KV heads, head size, vocabulary
    "Llama-8B": (4096, 14336, 32, 8, 128, 128256),
    "Qwen-0.5B": (896, 4864, 14, 2, 64, 151936),
    "Gemma-1B": (1152, 6912, 4, 1, 256, 262144),
}
LONG = {  # rows that several programs share
    "sum": (torch.zeros(1 << 22),),
    "sum.dim_IntList": (torch.zeros(1 << 14, 64, dtype=torch.int64), [0]),
    "prod": (torch.ones(1 << 22, dtype=torch.float64),),
    "amax": (torch.zeros(1 << 14, 64), [0]),
    "any": (torch.zeros(1 << 22, dtype=torch.bool),),
    "var_mean.correction": (torch.zeros(1 << 14, 64), [0]),
    "argmax": (torch.zeros(1 << 22),),
    "cumsum": (torch.zeros(1 << 22), 0),
    # many short rows side by side
    "mean.dim": (torch.zeros(8, 1 << 18), [0]),
    "prod.dim_int": (torch.zeros(8, 1 << 18, dtype=torch.int64), 0),
    "any.dim": (torch.zeros(8, 1 << 18, dtype=torch.bool), 0),
    "max.dim": (torch.zeros(8, 1 << 18, dtype=torch.int32), 0),
    "log_softmax.int": (torch.zeros(8, 1 << 18), 0),
    # short rows that begin anywhere, tensors that lie the other way round, few long rows
    "softmax.int": (torch.zeros(4096, 100), 1),
    "linalg_vector_norm": (torch.zeros(16, 32, 64).transpose(0, 2), 2, [1]),
    "min.dim": (torch.zeros(16, 32, 64).transpose(0, 2), 1),
    "cross_entropy_loss": (torch.zeros(4, 1 << 15), torch.zeros(4, dtype=torch.int64)),
}
UNEVEN = {  # rows that begin anywhere, few columns, single elements
    "sum.dim_IntList": (torch.zeros(1 << 20, 3), [0]),
    "amax": (torch.zeros(100, 5001), [1]),
    "any.dim": (torch.zeros(4096, 1001, dtype=torch.bool), 1),
    "argmax": (torch.zeros(4096, 2085), 1),
    "max.dim": (torch.zeros(100, 70001), 0),
    "softmax.int": (torch.zeros(8, 50257), 1),
    "log_softmax.int": (torch.zeros(2048, 5001, dtype=torch.bfloat16), 1),
    "add.Tensor": (torch.zeros(1000, 33), torch.zeros(1000, 1)),
    "bitwise_not": (torch.zeros(1 << 21, dtype=torch.uint8),),
    "exp": (torch.zeros(1 << 21, dtype=torch.float64),),
    "cos": (torch.zeros(1 << 21, dtype=torch.float64),),
}
STEPS = [[(100, 1)] * 4, [(0, 600), (0, 40)], [(0, 5000)], [(300, 1), (0, 700)], [(4000, 2)]]  # (first new position, new tokens)
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int8: "i8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
forms: dict[str, str] = {}


class Compiling:
    """Stands in for a kernel's function: calling it compiles that."""

    def __init__(self, jit: Any, counts: frozenset[int], target: GPUTarget, limit: int):
        self.jit, self.counts, self.target, self.limit = jit, counts, target, limit

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.compile

    def source(self, args: tuple[Any, ...], constants: dict[str, Any]) -> ASTSource:
        """What is to be compiled for these values: their types, and what is known of them."""
        jit, signature, constexprs, attributes = self.jit, {}, {}, {}
        given = dict(zip(jit.arg_names, args, strict=False)) | constants
        for i, (name, value) in enumerate((name, given[name]) for name in jit.arg_names):
            known = type(value) is int and value == 1 and i not in self.counts
            if name in constants or value is None or known:
                signature[name], constexprs[(i,)] = "constexpr", value
                continue
            signature[name] = self.type_of(value)
            whole = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if type(whole) is int and whole % 16 == 0 and i not in self.counts:
                attributes[(i,)] = [["tt.divisibility", 16]]
        return ASTSource(jit, signature, constexprs, attributes)

    def compile(self, *args: Any, num_warps: int, num_stages: int, launch_pdl: bool = False, **constants: Any) -> None:
        source = self.source(args, constants)
        form = form_of(source, num_warps, num_stages)
        if form in forms:
            return
        built = self.build(source, num_warps, num_stages)
        if built.metadata.shared > self.limit:
            raise OutOfResources(built.metadata.shared, self.limit, "shared memory")
        if constants.get("EARLY"):
            require_wait(built.asm["ptx"], form)
        forms[form] = self.jit.fn.__name__

    def build(self, source: ASTSource, num_warps: int, num_stages: int) -> Any:
        return triton.compile(source, target=self.target, options={"num_warps": num_warps, "num_stages": num_stages})

    @staticmethod
    def type_of(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return "*" + TYPES[value.dtype]
        return "fp32" if type(value) is float else "i1" if type(value) is bool else "i32" if -(2**31) <= value < 2**31 else "i64"


def form_of(source: ASTSource, num_warps: int, num_stages: int) -> str:
    function = source.fn.fn
    name = f"{function.__module__}.{function.__name__}"
    return f"{name} {num_warps} {num_stages} {source.signature} {source.constants} {source.attrs}"


def require_wait(text: str, form: str) -> None:
    """Raises if a kernel that may come early touches memory before it has waited."""
    wait = text.find("griddepcontrol.wait")
    touched = re.search(r"\b(ld|st|atom|red)\.([\w:]+\.)*global\b|\bcp\.(async|reduce)\b", text)
    if touched is None or not 0 <= wait < touched.start():
        raise AssertionError(f"{form} does not wait first")


def stand_in(target: GPUTarget, chip: chips.Chip, instead: type[Compiling] = Compiling) -> None:
    """Makes this process believe in a chip: whatever starts a kernel there calls an `instead` of it."""
    chips.current = lambda: chip  # type: ignore[assignment]
    matmul.OURS_ONLY = True
    scalar.INTERPRETED, scalar.QUICK_LOG2 = tl.constexpr(False), tl.constexpr(chip.quick_log2)
    chips.current_device, chips.current_stream, chips.capturing = lambda: -1, lambda device: 0, lambda: False

    def compiled(
        self: launch.Kernel, grid: Any, *args: Any, warps: int = 4, stages: int = 3, dependent: bool | None = None, **constants: Any
    ):
        if grid[0]:
            constants |= {"EARLY": chip.early} if self.early else {}
            jit, self.jit = self.jit, instead(self.jit, self.counts, target, chip.shared_memory)  # type: ignore[assignment]
            try:
                self._fitted(grid, args, {"num_warps": warps, "num_stages": stages}, constants)
            finally:
                self.jit = jit

    launch.Kernel.__call__ = compiled  # type: ignore[method-assign]
    for thing in gc.get_objects():
        if isinstance(thing, pointwise.Pointwise) and not isinstance(thing.function, triton.JITFunction):
            thing.function = triton.jit(thing.function)
            thing.kernels.clear()


def operators(calls: dict[str, tuple[Any, ...]]) -> None:
    for name, arguments in calls.items():
        made = [x("cpu") if callable(x) else x for x in arguments]
        args = [x.to(HALF) if isinstance(x, torch.Tensor) and x.dtype is torch.float32 else x for x in made]  # float64 as it is
        with contextlib.suppress(launch.Unsupported):  # torch's own then
            registry.OPERATORS[name].function(*args)


def kv_kinds(chip: str) -> tuple[str, ...]:
    """What keys and values are kept as on a chip, the plain form apart."""
    return ("int8", "int4", "fp8") if chip in ("sm_89", "sm_90", "sm_100", "sm_120") else ("int8", "int4")


def attend(ops: Any, shape: tuple[int, int, int], step: list[tuple[int, int]], kind: str) -> None:
    """What a layer does between its products: keeps keys and values of a kind, and attends."""
    heads, kv_heads, dim = shape
    draw = Draw(1, HALF)
    layout, total = draw.layout(step, 16), sum(count for _, count in step)
    spec = CacheSpec((kv_heads, dim), (kv_heads, dim), kind)
    cache = KVCache.allocate(spec, draw.num_slots(layout), HALF, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    if kind == "fp8":
        cache.factors = torch.ones(kv_heads), torch.ones(kv_heads)
    index, k = torch.zeros(total, dtype=torch.int32), torch.empty(total, kv_heads, dim, dtype=HALF)
    q = torch.empty(total, heads, dim, dtype=HALF)
    q = ops.qkv_rope_store(q, k, k.clone(), torch.zeros(8192, dim), index, cache, index)
    ops.store_kv(k, k, cache, index)
    ops.attention(q, cache, ops.plan_attention(layout), AttentionKind(scale=0.1))
    if kind == "int8":  # with scales that are given
        cache.factors = torch.ones(kv_heads), torch.ones(kv_heads)
        ops.qkv_rope_store(q, k, k.clone(), torch.zeros(8192, dim), index, cache, index)
        ops.store_kv(k, k, cache, index)


def engine(model: str, counts: tuple[int, ...], steps: list[Any], kinds: tuple[str, ...]) -> None:
    from trireme.backends.cuda.ops import CudaOps

    ops, (hidden, inner, heads, kv_heads, dim, vocab) = CudaOps(), MODELS[model]

    def blank(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=HALF)

    weights = blank((heads + 2 * kv_heads) * dim, hidden), blank(2 * inner, hidden), blank(hidden, inner), blank(vocab, hidden)
    for count in counts:
        x, wide = blank(count, hidden), blank(count, inner)
        ops.linear(x, weights[0])
        ops.gated_linear(x, weights[1], None, "silu")
        ops.linear(wide, weights[2])
        ops.logits(x, weights[3])
        ops.add_rms_norm(x, blank(count, hidden), blank(hidden), 1e-5)
    for step in steps:
        for kind in ("plain", *kinds):
            attend(ops, (heads, kv_heads, dim), step, kind)
    ops.choose_greedy(torch.empty(4, vocab))


def main() -> None:
    name, everything = sys.argv[1], "--all" in sys.argv
    stand_in(*CHIPS[name])
    from test_repeat import CALLS

    for calls in (CALLS, LONG, UNEVEN):
        operators(calls)
    registry.OPERATORS["pow.Tensor_Tensor"].function(torch.ones(4096), torch.ones(4096))
    for model in MODELS if everything else ("Llama-8B",):
        engine(model, *(((1, 2, 8, 16, 24, 32, 48, 64), STEPS) if everything else ((8,), STEPS[:2])), kv_kinds(name))
    print(f"{name}: {len(forms)} forms of {len(set(forms.values()))} kernels")


if __name__ == "__main__":
    main()
