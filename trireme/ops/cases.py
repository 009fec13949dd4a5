"""Inputs and tolerances for every op, used to compare a backend with the plain bodies.

A case builds its arguments from a `Draw` and calls one op. Knows no backend: the same case runs on the plain bodies, in double
precision, and on whatever claims to do the same. Values are drawn in the type under test, so both sides see the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.ops.attention import AttentionKind, CacheSpec, KVCache, StepLayout
from trireme.ops.choosing import Choosing
from trireme.ops.table import Ops

HALVES = (torch.bfloat16, torch.float16)
ALL = (torch.float32, *HALVES)
Result = Any  # a tensor or a tuple of them
MakeCache = Callable[[CacheSpec, int, torch.dtype], KVCache]


class Draw:
    """Random arguments, the same for the same seed: rounded to `dtype`, held as `held` on `device`."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        held: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        make_cache: MakeCache | None = None,
    ):
        self.dtype, self.held, self.device, self._make_cache = dtype, held or dtype, torch.device(device), make_cache
        self.numbers = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        values = torch.from_numpy(self.numbers.standard_normal(shape) * scale + shift)
        return values.to(self.dtype).to(self.device, self.held)

    def float32(self, values: Any) -> Tensor:
        """Numbers that are float32 whatever the type under test: angles, scales, sampling parameters."""
        return torch.as_tensor(np.asarray(values), dtype=torch.float32).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.from_numpy(self.numbers.integers(low, high, shape).astype(np.int32)).to(self.device)

    def int32(self, values: Sequence) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def angles(self, positions: int, r: int) -> Tensor:
        """A rope table: cosines, then sines."""
        turn = np.outer(np.arange(positions), 100.0 ** (-np.arange(r) / r))
        return self.float32(np.concatenate([np.cos(turn), np.sin(turn)], -1))

    def cache(self, num_slots: int, kv_heads: int, head_dim: int, ops: Ops | None = None, kind: str = "plain") -> KVCache:
        """An empty cache; one full of random keys and values where ops are given to store them. Of a kind that is called scaled,
        each head has a scale as checkpoints bring them."""
        kind, _, scaled = kind.partition(", ")
        make = self._make_cache or (lambda spec, slots, dtype: KVCache.allocate(spec, slots, dtype, self._zeros))
        cache = make(CacheSpec((kv_heads, head_dim), (kv_heads, head_dim), kind), num_slots, self.held)
        if scaled:
            cache.factors = self.float32(np.linspace(0.03, 0.05, kv_heads)), self.float32(np.linspace(0.04, 0.02, kv_heads))
        if ops is not None:
            k, v = (self.normal(num_slots, kv_heads, head_dim) for _ in range(2))
            ops.store_kv(k, v, cache, self.int32(range(num_slots)))
        return cache

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def layout(self, sequences: Sequence[tuple[int, int]], page_size: int, padded: bool = False) -> StepLayout:
        """Sequences of (first new position, new tokens) whose pages and rows lie scattered."""
        starts, counts = (np.array(column, dtype=np.int32) for column in zip(*sequences, strict=True))
        needed = [max(1, -(-(start + count) // page_size)) for start, count in sequences]
        pages = self.numbers.permutation(sum(needed) + 2)
        num_rows = len(sequences) + 3
        rows = self.numbers.permutation(num_rows)[: len(sequences)].astype(np.int32)
        table = np.zeros((num_rows, max(needed) + 1), dtype=np.int32)
        for row, taken, count in zip(rows, np.cumsum(needed), needed, strict=True):
            table[row, :count] = pages[taken - count : taken]
        return StepLayout(
            page_size, rows, starts, counts, self.int32(table.tolist()), self.int32(rows.tolist()),
            self.int32([0, *np.cumsum(counts).tolist()]), self.int32((starts + counts).tolist()), padded=padded,
        )  # fmt: skip

    def num_slots(self, layout: StepLayout) -> int:
        return (int(layout.page_table.max()) + 1) * layout.page_size


@dataclass(frozen=True)
class Case:
    """One call of one op. `run` builds the arguments and makes the call; `tolerances` are relative to the largest value."""

    op: str
    name: str
    run: Callable[..., Result]  # (ops, draw)
    tolerances: dict[torch.dtype, float]
    kv: str = "plain"  # the kind of cache it needs, which not every backend has
    chunked: bool = False  # whether it needs windows that begin anew, which not every backend has

    @property
    def seed(self) -> int:
        return sum(ord(c) * (i + 1) for i, c in enumerate(f"{self.op} {self.name}"))


EXACT = dict.fromkeys(ALL, 0.0)
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # one rounding of the result
SUMMED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # sums, in any order, of products
# Keys and values in fewer bits, by kind: a number half way between two codes may be rounded
# either way, which is an error of 1/127 (int8), 1/8 (fp8) or 2/15 (int4) of the largest.
KEPT = {
    "int8": {torch.float32: 1e-2, torch.bfloat16: 3e-2, torch.float16: 1e-2},
    "fp8": dict.fromkeys(ALL, 0.13),
    "int4": dict.fromkeys(ALL, 0.15),
}
# With given scales a code of int8 is up to 0.05, of numbers whose largest is about 3.
KEPT |= {"int8, scaled": {torch.float32: 2e-2, torch.bfloat16: 4e-2, torch.float16: 2e-2}, "fp8, scaled": KEPT["fp8"]}
CHAINED = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}  # several ops, rounded between


def cases() -> Iterator[Case]:
    """Every case of every op."""
    for source in (_moving, _products, _quantized, _norms, _activations, _ropes, _stores, _attention, _blocks, _tables, _choosing):
        yield from source()


# --- moving and shaping ---------------------------------------------------------------------------------------------------------


def _moving() -> Iterator[Case]:
    def blank(d: Draw, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=d.held, device=d.device)

    shapes = {"one": (1, 1), "odd": (7, 33), "empty": (0, 16), "three axes": (3, 5, 8)}
    for name, shape in shapes.items():
        column = (shape[0], *[1] * (len(shape) - 1))
        yield Case("copy", name, lambda ops, d, s=shape: ops.copy(blank(d, *s), d.normal(*s)), EXACT)
        yield Case("transpose", name, lambda ops, d, s=shape: ops.transpose(d.normal(*s), 0, 1), EXACT)
        yield Case("concat", name, lambda ops, d, s=shape: ops.concat([d.normal(*s), d.normal(*s)], -1), EXACT)
        yield Case("add_bias", name, lambda ops, d, s=shape: ops.add_bias(d.normal(*s), d.normal(s[-1])), ROUNDED)
        yield Case("multiply", name, lambda ops, d, s=shape, c=column: ops.multiply(d.normal(*s), d.normal(*c)), ROUNDED)
    yield Case("copy", "from float32", lambda ops, d: ops.copy(blank(d, 5, 9), d.normal(5, 9).float()), EXACT)
    for dtype in ALL:
        name = f"to {str(dtype).removeprefix('torch.')}"
        yield Case("convert", name, lambda ops, d, t=dtype: ops.convert(d.normal(3, 17), t), EXACT)
    yield Case("concat", "uneven", lambda ops, d: ops.concat([d.normal(2, 5), d.normal(0, 5), d.normal(9, 5)]), EXACT)
    yield Case("select", "rows, some twice", lambda ops, d: ops.select(d.normal(9, 5), d.int32([8, 0, 3, 3])), EXACT)
    yield Case("select", "no rows", lambda ops, d: ops.select(d.normal(9, 5), d.int32([])), EXACT)
    yield Case("select", "columns", lambda ops, d: ops.select(d.normal(4, 9), d.int32([1, 0, 8]), 1), EXACT)
    yield Case("split", "uneven", lambda ops, d: ops.split(d.normal(3, 17), [8, 8, 1]), EXACT)
    yield Case("split", "rows", lambda ops, d: ops.split(d.normal(6, 4), [0, 1, 5], 0), EXACT)
    yield Case("slice", "middle columns", lambda ops, d: ops.slice(d.normal(3, 17), -1, 4, 9), EXACT)
    yield Case("slice", "nothing", lambda ops, d: ops.slice(d.normal(3, 17), 0, 2, 2), EXACT)


# --- products -------------------------------------------------------------------------------------------------------------------


def _linear(ops: Ops, d: Draw, shape: tuple[int, int, int], bias: bool) -> Result:
    rows, n_in, n_out = shape
    return ops.linear(d.normal(rows, n_in), d.normal(n_out, n_in, scale=n_in**-0.5), d.normal(n_out) if bias else None)


def _logits(ops: Ops, d: Draw, shape: tuple[int, int, int]) -> Result:
    rows, inner, outputs = shape
    found = ops.logits(d.normal(rows, inner), d.normal(outputs, inner, scale=inner**-0.5))
    assert found.dtype == torch.float32, found.dtype
    return found


def _grouped(ops: Ops, d: Draw, sizes: list[int]) -> Result:
    return ops.grouped_linear(d.normal(sum(sizes), 24), d.normal(len(sizes), 10, 24, scale=0.2), d.int32(sizes))


def _lora(ops: Ops, d: Draw) -> Result:
    x, weight, down, up = d.normal(5, 32), d.normal(16, 32, scale=0.2), d.normal(4, 32, scale=0.2), d.normal(16, 4)
    return ops.lora_linear(x, lambda y: ops.linear(y, weight), down, up, 0.5)


def _products() -> Iterator[Case]:
    for ids in ([0], [130, 0, 7, 7], []):
        name = f"{len(ids)} ids"
        yield Case("embedding", name, lambda ops, d, i=ids: ops.embedding(d.int32(i), d.normal(131, 24)), EXACT)
    shapes = [(0, 16, 8), (1, 1, 1), (1, 64, 96), (1, 33, 17), (5, 48, 31), (17, 128, 64), (70, 576, 131)]
    for shape in shapes:
        for bias in (False, True):
            name = f"{shape[0]} rows, {shape[1]} to {shape[2]}{', bias' if bias else ''}"
            yield Case("linear", name, lambda ops, d, s=shape, b=bias: _linear(ops, d, s, b), SUMMED)
        yield Case("logits", f"{shape[0]} rows, {shape[1]} to {shape[2]}", lambda ops, d, s=shape: _logits(ops, d, s), SUMMED)
    for sizes in ([3, 0, 5], [1], [0, 0, 2, 9]):
        yield Case("grouped_linear", f"groups of {sizes}", lambda ops, d, s=sizes: _grouped(ops, d, s), SUMMED)
    yield Case("lora_linear", "rank 4", _lora, CHAINED)


def _quantize(ops: Ops, d: Draw, x: Tensor) -> Result:
    q, scale = ops.quantize_int8(x)
    assert q.dtype == torch.int8 and scale.shape == (*x.shape[:-1], 1), f"got {q.dtype} and scales {tuple(scale.shape)}"
    return q.double() * scale.double(), scale


def _linear_int8(ops: Ops, d: Draw, shape: tuple[int, int, int], bias: bool) -> Result:
    rows, n_in, n_out = shape
    weight = d.integers(-127, 128, n_out, n_in).to(torch.int8)
    scale = d.float32(d.numbers.uniform(0.5, 1.5, n_out) / (127 * n_in**0.5))
    return ops.linear_int8(d.normal(rows, n_in), weight, scale, d.normal(n_out) if bias else None)


def _quantized() -> Iterator[Case]:
    step = dict.fromkeys(ALL, 1.01 / 127)  # a value half way between two codes may go either way
    yield Case("quantize_int8", "7 rows", lambda ops, d: _quantize(ops, d, d.normal(7, 65)), step)
    yield Case(
        "quantize_int8", "a row of zeros", lambda ops, d: _quantize(ops, d, d.normal(3, 16) * d.int32([1, 0, 1]).unsqueeze(1)), step
    )
    # a backend may quantize the activations too: one part in 127 of each, averaging out
    loose = {torch.float32: 1e-2, torch.bfloat16: 2e-2, torch.float16: 1e-2}
    for shape in [(0, 16, 8), (1, 64, 48), (1, 33, 17), (9, 128, 31)]:
        for bias in (False, True):
            name = f"{shape[0]} rows, {shape[1]} to {shape[2]}{', bias' if bias else ''}"
            yield Case("linear_int8", name, lambda ops, d, s=shape, b=bias: _linear_int8(ops, d, s, b), loose)


# --- norms and activations ------------------------------------------------------------------------------------------------------


def _norms() -> Iterator[Case]:
    for rows, width in [(0, 8), (1, 1), (1, 64), (7, 33), (40, 576)]:
        name, s = f"{rows} rows of {width}", (rows, width)
        for op in ("rms_norm", "add_rms_norm"):
            yield Case(op, name, lambda ops, d, s=s, add=op != "rms_norm": _rms_norm(ops, d, s, add), SUMMED)
        for bias in (False, True):
            tail = "" if bias else ", no bias"
            yield Case("layer_norm", name + tail, lambda ops, d, s=s, b=bias: _layer_norm(ops, d, s, b, False), SUMMED)
            yield Case("add_layer_norm", name + tail, lambda ops, d, s=s, b=bias: _layer_norm(ops, d, s, b, True), SUMMED)
    for heads, dim in [(1, 64), (9, 20)]:
        yield Case("qk_norm", f"{heads} heads of {dim}", lambda ops, d, h=heads, n=dim: _qk_norm(ops, d, h, n), SUMMED)
    yield Case("qk_norm", "heads cut out of a wider row", _strided_norm, SUMMED)
    yield Case("rms_norm", "small values", lambda ops, d: ops.rms_norm(d.normal(3, 64, scale=1e-3), d.normal(64), 1e-6), SUMMED)


def _rms_norm(ops: Ops, d: Draw, shape: tuple[int, int], add: bool) -> Result:
    x, residual, weight = d.normal(*shape), d.normal(*shape), d.normal(shape[1], shift=1.0)
    return ops.add_rms_norm(x, residual, weight, 1e-5) if add else ops.rms_norm(x, weight, 1e-5)


def _qk_norm(ops: Ops, d: Draw, heads: int, dim: int) -> Result:
    return ops.qk_norm(d.normal(5, heads, dim), d.normal(dim, shift=1.0), 1e-6)


def _layer_norm(ops: Ops, d: Draw, shape: tuple[int, int], bias: bool, add: bool) -> Result:
    x, residual, weight = d.normal(*shape, shift=0.5), d.normal(*shape), d.normal(shape[1], shift=1.0)
    shift = d.normal(shape[1]) if bias else None
    return ops.add_layer_norm(x, residual, weight, shift, 1e-5) if add else ops.layer_norm(x, weight, shift, 1e-5)


def _strided_norm(ops: Ops, d: Draw) -> Result:
    wide = d.normal(4, 6 * 16)
    return ops.qk_norm(wide[:, 16:64].unflatten(-1, (3, 16)), d.normal(16, shift=1.0), 1e-6)


def _activations() -> Iterator[Case]:
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        for rows, width in [(0, 8), (1, 1), (5, 33)]:
            s, name = (rows, width), f"{kind}, {rows} rows of {width}"
            yield Case("activation", name, lambda ops, d, s=s, k=kind: ops.activation(d.normal(*s, scale=3.0), k), SUMMED)
            yield Case("gated", name, lambda ops, d, s=s, k=kind: ops.gated(d.normal(s[0], 2 * s[1], scale=2.0), k), SUMMED)
    yield Case("softmax", "plain", lambda ops, d: ops.softmax(d.normal(5, 33, scale=4.0)), SUMMED)
    yield Case("softmax", "scaled", lambda ops, d: ops.softmax(d.normal(2, 3, 17), None, 0.25), SUMMED)
    yield Case("softmax", "masked", lambda ops, d: ops.softmax(d.normal(9, 9), _causal(d, 9), 0.5), SUMMED)


def _causal(d: Draw, n: int) -> Tensor:
    return torch.full((n, n), float("-inf"), device=d.device).triu(1)


# --- rope and cache -------------------------------------------------------------------------------------------------------------


def _ropes() -> Iterator[Case]:
    # (tokens, heads, head_dim, r): 2r < head_dim leaves the rest of a head as it is
    for tokens, heads, dim, r in [(0, 2, 8, 4), (1, 1, 2, 1), (5, 9, 64, 32), (7, 3, 20, 6), (3, 2, 256, 128)]:
        s, name = (tokens, heads, dim), f"{tokens} tokens, {heads} heads of {dim}, {2 * r} turned"
        yield Case("rope", name, lambda ops, d, s=s, r=r: ops.rope(*_turn(d, s, r)), SUMMED)
        yield Case("rope_interleaved", name, lambda ops, d, s=s, r=r: ops.rope_interleaved(*_turn(d, s, r)), SUMMED)
    yield Case("rope", "heads cut out of a wider row", _strided_rope, SUMMED)


def _turn(d: Draw, shape: tuple[int, int, int], r: int) -> tuple[Tensor, Tensor, Tensor]:
    return d.normal(*shape), d.angles(50, r), d.integers(0, 50, shape[0])


def _strided_rope(ops: Ops, d: Draw) -> Result:
    return ops.rope(d.normal(4, 6 * 16)[:, 16:64].unflatten(-1, (3, 16)), d.angles(9, 8), d.integers(0, 9, 4))


_SLOTS = {"one token": [3], "scattered": [9, 0, 4, 31], "with padding": [5, -1, 7, -1], "padding alone": [-1, -1], "none": []}


def _stores() -> Iterator[Case]:
    for name, slots in _SLOTS.items():
        for heads, dim in [(1, 16), (3, 20)]:
            full, s = f"{name}, {heads} heads of {dim}", (len(slots), heads, dim)
            yield Case("store_kv", full, lambda ops, d, s=s, i=slots: _store(ops, d, s, i), EXACT)
            yield Case("qkv_rope_store", full, lambda ops, d, s=s, i=slots: _rope_store(ops, d, s, i), SUMMED)
        for kind, tolerances in KEPT.items():
            run = partial(_rope_store, shape=(len(slots), 3, 20), slots=slots, kind=kind)
            yield Case("qkv_rope_store", f"{name}, {kind}", run, tolerances, kv=kind.partition(", ")[0])


def _store(ops: Ops, d: Draw, shape: tuple[int, int, int], slots: list[int]) -> Result:
    cache = d.cache(32, *shape[1:])
    ops.store_kv(d.normal(*shape), d.normal(*shape), cache, d.int32(slots))
    return cache.k, cache.v


def _rope_store(ops: Ops, d: Draw, shape: tuple[int, int, int], slots: list[int], kind: str = "plain") -> Result:
    tokens, heads, dim = shape
    row = d.normal(tokens, 4 * heads * dim)  # q, k, v side by side, as a fused projection leaves them
    parts = row.split([2 * heads * dim, heads * dim, heads * dim], -1)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in parts)
    cache = d.cache(32, heads, dim, kind=kind)
    q = ops.qkv_rope_store(q, k, v, d.angles(40, dim // 2), d.integers(0, 40, tokens), cache, d.int32(slots))
    return q, *cache.at(d.int32(range(32)).long())


# --- attention ------------------------------------------------------------------------------------------------------------------

# what lies in a step: (first new position, new tokens) per sequence
_STEPS: dict[str, list[tuple[int, int]]] = {
    "first token": [(0, 1)],
    "one decode": [(37, 1)],
    "decodes": [(0, 1), (15, 1), (16, 1), (63, 1), (130, 1)],
    "one prompt": [(0, 33)],
    "prompts": [(0, 5), (0, 40), (0, 1)],
    "chunk after a cached prefix": [(48, 17)],
    "prompts, chunks and decodes": [(20, 1), (0, 19), (31, 1), (7, 26), (64, 3)],
}


@dataclass(frozen=True)
class _Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    window: int = 0
    chunked: bool = False
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    kv: str = "plain"


_KINDS = {
    "GQA": _Shape(),
    "MHA": _Shape(heads=3, kv_heads=3, dim=20),
    "MQA, wide heads": _Shape(heads=5, kv_heads=1, dim=128),
    "9 heads on 3": _Shape(heads=9, kv_heads=3, dim=64),
    "window of 8": _Shape(window=8),
    "window of 1": _Shape(window=1),
    "chunks of 8": _Shape(window=8, chunked=True),
    "chunks of 1": _Shape(window=1, chunked=True),
    "chunks of 48, wide heads": _Shape(dim=64, window=48, chunked=True),
    "chunks of 20 and softcap, ALiBi": _Shape(heads=6, kv_heads=6, window=20, chunked=True, softcap=5.0, alibi=True),
    "softcap": _Shape(softcap=3.0),
    "ALiBi": _Shape(heads=6, kv_heads=6, alibi=True),
    "window and softcap": _Shape(window=20, softcap=5.0),
    "window of 8, wide heads": _Shape(dim=64, window=8),
    "softcap, wide heads": _Shape(dim=128, softcap=3.0),
    "ALiBi, wide heads": _Shape(heads=6, kv_heads=6, dim=64, alibi=True),
    "sinks": _Shape(heads=6, kv_heads=2, sinks=True),
    "sinks, window of 8, wide heads": _Shape(dim=64, window=8, sinks=True),
}


def _attention() -> Iterator[Case]:
    for step, sequences in _STEPS.items():
        for page_size in (1, 4, 16):
            name = f"{step}, pages of {page_size}"
            yield Case("attention", name, lambda ops, d, q=sequences, p=page_size: _attend(ops, d, q, p, _Shape()), SUMMED)
    mixed = _STEPS["prompts, chunks and decodes"]
    for kind, shape in _KINDS.items():
        for name, steps, page in (("mixed step", mixed, 4), ("decodes", _STEPS["decodes"], 16)):
            run = partial(_attend, sequences=steps, page_size=page, shape=shape)
            yield Case("attention", f"{kind}, {name}", run, SUMMED, chunked=shape.chunked)
    for kind, tolerances in KEPT.items():
        for wide, shape in (("", _Shape(kv=kind)), (", wide heads", _Shape(heads=5, kv_heads=1, dim=128, kv=kind))):
            for name, steps in (("mixed step", mixed), ("decodes", _STEPS["decodes"])):
                run = partial(_attend, sequences=steps, page_size=4, shape=shape)
                yield Case("attention", f"{kind}{wide}, {name}", run, tolerances, kv=kind.partition(", ")[0])
        run = partial(_attend, sequences=_STEPS["one decode"], page_size=16, shape=_Shape(heads=18, kv_heads=1, dim=256, kv=kind))
        yield Case("attention", f"{kind}, widest heads, one decode", run, tolerances, kv=kind.partition(", ")[0])
    yield Case("attention", "static pages of 160", lambda ops, d: _attend(ops, d, [(0, 9), (150, 1)], 160, _Shape()), SUMMED)
    yield Case("attention", "padded sequences", lambda ops, d: _attend(ops, d, [(12, 1), (5, 1), (0, 0)], 4, _Shape(), 2), SUMMED)
    yield Case("plan_attention", "one plan, two layers", _two_layers, SUMMED)


def _kind(d: Draw, shape: _Shape) -> AttentionKind:
    slopes = d.float32([2.0 ** (-i - 1) for i in range(shape.heads)]) if shape.alibi else None
    sinks = d.float32([1.5 * i - 2.0 for i in range(shape.heads)]) if shape.sinks else None
    return AttentionKind(shape.dim**-0.5, shape.window, shape.chunked, shape.softcap, slopes, sinks)


def _attend(ops: Ops, d: Draw, sequences: list[tuple[int, int]], page_size: int, shape: _Shape, padding: int = 0) -> Result:
    layout = d.layout(sequences, page_size, padded=padding > 0)
    cache = d.cache(d.num_slots(layout), shape.kv_heads, shape.dim, ops, shape.kv)
    q = d.normal(int(layout.counts.sum()) + padding, shape.heads, shape.dim, scale=2.0)
    return ops.attention(q, cache, ops.plan_attention(layout), _kind(d, shape))


def _two_layers(ops: Ops, d: Draw) -> Result:
    """Checks that one plan works for every layer of a step, whatever its kind of attention and number of heads."""
    layout = d.layout(_STEPS["prompts, chunks and decodes"], 4)
    plan = ops.plan_attention(layout)
    results = []
    for shape in (_Shape(), _Shape(window=8), _Shape(heads=3, kv_heads=1, dim=32)):
        cache = d.cache(d.num_slots(layout), shape.kv_heads, shape.dim, ops)
        q = d.normal(int(layout.counts.sum()), shape.heads, shape.dim)
        results.append(ops.attention(q, cache, plan, _kind(d, shape)))
    return tuple(results)


def _blocks() -> Iterator[Case]:
    for rows in (0, 1, 6):
        for kind in ("silu", "gelu_tanh"):
            for bias in (False, True):
                what = f"{kind}, {rows} rows{', bias' if bias else ''}"
                yield Case("gated_linear", what, lambda ops, d, n=rows, k=kind, b=bias: _gated_linear(ops, d, n, k, b), CHAINED)


def _gated_linear(ops: Ops, d: Draw, rows: int, kind: str, bias: bool) -> Result:
    weight = d.normal(2 * 80, 48, scale=0.15)
    return ops.gated_linear(d.normal(rows, 48), weight, d.normal(2 * 80) if bias else None, kind)


# --- the tables of running requests ---------------------------------------------------------------------------------------------


def _tables() -> Iterator[Case]:
    for page in (1, 4, 7):
        yield Case("step_inputs", f"pages of {page}", lambda ops, d, p=page: _inputs(ops, d, p), EXACT)
    yield Case("uniforms", "any seed", _uniforms, EXACT)
    yield Case("append_tokens", "some broken", _append, EXACT)
    for name, said in (("known lengths", [9, 30, 4]), ("lengths of its own", [-1, -1, 4]), ("both", [9, -1, 4])):
        yield Case("settle", name, lambda ops, d, s=said: _settle(ops, d, s), EXACT)


def _settle(ops: Ops, d: Draw, said: list[int]) -> Result:
    """Sequences with one token, with three, and with a chunk planned at its real place. Two tokens and one choice are padding."""
    columns = {
        "ends": d.int32([12, 31, 4]), "said": d.int32(said), "states_from": d.int32([3, 0, -1]),
        "query_starts": d.int32([0, 1, 4, 8]), "lengths": d.int32([12, 31, 4]), "positions": d.int32([0] * 10),
        "reach": d.int32([12, 29, 30, 31, 20, 20, 20, 20, 1, 1]), "pick_sequences": d.int32([0, 1, -1]),
        "pick_positions": d.int32([12, 31, 0]),
    }  # fmt: skip
    ops.settle(d.int32([28, 0, 0, 10]), columns)
    return tuple(columns[name] for name in ("lengths", "positions", "reach", "pick_positions"))


def _uniforms(ops: Ops, d: Draw) -> Result:
    seeds = torch.from_numpy(d.numbers.integers(-(2**63), 2**63, 50, dtype=np.int64)).to(d.device)
    return ops.uniforms(seeds, d.integers(0, 2**20, 50))


def _inputs(ops: Ops, d: Draw, page: int) -> Result:
    tokens, pages = d.integers(0, 900, 5, 40), d.integers(0, 99, 5, -(-40 // page))
    return ops.step_inputs(tokens, pages, d.integers(0, 5, 21), d.integers(0, 40, 21), page)


def _append(ops: Ops, d: Draw) -> Result:
    tokens = d.integers(0, 900, 5, 40)
    ops.append_tokens(tokens, d.int32([4, 0, 2]), d.int32([39, 0, 7]), d.int32([800, -1, 0]).long())
    return tokens


# --- choosing tokens --------------------------------------------------------------------------------------------------------------

FLOAT32_EXACT = {torch.float32: 0.0}  # equal logits are common in 16 bits, and top-k may keep any of them


def _choosing() -> Iterator[Case]:
    for rows, vocab in [(1, 7), (5, 131), (3, 5000)]:
        name, s = f"{rows} rows of {vocab}", (rows, vocab)
        yield Case("sample_greedy", name, lambda ops, d, s=s: ops.sample_greedy(d.normal(*s)), EXACT)
        yield Case("mask_logits", name, lambda ops, d, s=s: ops.mask_logits(d.normal(*s), d.integers(0, 2, *s).bool()), EXACT)
        yield Case("logprobs", name, lambda ops, d, s=s: ops.logprobs(d.normal(*s, scale=3.0), d.integers(0, s[1], s[0])), SUMMED)
    yield Case("sample_greedy", "the first of equals", lambda ops, d: ops.sample_greedy(d.integers(0, 3, 20, 50).to(d.held)), EXACT)
    for name, choice in _CHOICES.items():
        yield Case("sample", name, lambda ops, d, c=choice: _sample(ops, d, c), FLOAT32_EXACT)
    yield Case("choose", "some rows broken", lambda ops, d: _broken(ops, d, False), FLOAT32_EXACT)
    yield Case("choose_greedy", "some rows broken", lambda ops, d: _broken(ops, d, True), EXACT)


_CHOICES: dict[str, dict[str, list]] = {
    "temperature": {"temperature": [0.0, 0.3, 1.0, 4.0]},
    "top-k": {"top_k": [1, 2, 40, 100000]},
    "top-p": {"top_p": [0.0, 0.1, 0.7, 1.0]},
    "min-p": {"min_p": [0.0, 0.05, 0.5, 1.0]},
    "all at once": {"temperature": [0.7, 1.5], "top_k": [0, 20], "top_p": [0.9, 0.8], "min_p": [0.02, 0.0]},
}


def _broken(ops: Ops, d: Draw, greedy: bool) -> Result:
    """Rows with a NaN, with nothing above -inf, with +inf, and whole ones."""
    logits = d.normal(6, 257, scale=2.0)
    logits[1, 200], logits[2], logits[4, 3] = float("nan"), float("-inf"), float("inf")
    if greedy:
        return ops.choose_greedy(logits)
    ones = d.float32([1.0] * 6)
    by = Choosing(temperature=ones, top_k=d.int32([0, 0, 0, 5, 5, 5]), top_p=ones, min_p=0 * ones)
    return ops.choose(logits, by, d.float32(d.numbers.random(6)))


def _sample(ops: Ops, d: Draw, choice: dict[str, list], rows: int = 24) -> Result:
    def column(name: str, otherwise: float) -> list:
        values = choice.get(name, [otherwise])
        return [values[i % len(values)] for i in range(rows)]

    logits, uniform = d.normal(rows, 257, scale=2.0), d.float32(d.numbers.random(rows))
    temperature, top_p, min_p = (d.float32(column(*pair)) for pair in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0)))
    return ops.sample(logits, Choosing(temperature, d.int32(column("top_k", 0)), top_p, min_p), uniform)
