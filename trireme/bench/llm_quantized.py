"""Cuts of the kernels for quantized weights and for KV in fewer bits: packed products, products in eight bits, decode steps.

Part of `trireme.bench.llm_kernels`, which checks and times them. Knows shapes and kernels; nothing of engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trireme.bench.llm_cases import L2_BYTES, PLAIN, Case, Group, layout_of
from trireme.kernels import chips
from trireme.kernels.launch import blocks, next_power
from trireme.kernels.steps import decode, kv, packed, scaled
from trireme.ops import AttentionKind, CacheSpec, KVCache

GROUP = 128
LINEARS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
FP8 = torch.float8_e4m3fn


def packed_cases() -> Iterator[Case]:
    for (name, (inner, outputs)), width in itertools.product(LINEARS.items(), packed.WIDTHS[4][:1]):
        for count in (1, 8, 16, 32, 64, 128, 256):
            yield _packed_case(f"int4 {name} {count}x{inner}x{outputs}", count, inner, outputs, width)


def _packed_case(name: str, count: int, inner: int, outputs: int, width: int) -> Case:
    copies = max(2, int(L2_BYTES / (inner * outputs / 2)))
    codes = torch.randint(0, 16, (outputs, inner), device="cuda", dtype=torch.uint8)
    sizes = (torch.rand(inner // GROUP, outputs, device="cuda") * 0.01 + 0.005).half()
    words = packed.pack(codes, width, "int4")
    weights = [packed.Words(words.clone(), sizes.clone(), None, GROUP, width, "int4") for _ in range(copies)]
    x = torch.randn(count, inner, device="cuda", dtype=torch.bfloat16)

    def ours(config: packed.Config | None) -> Callable[[int], Tensor]:
        return lambda i: packed.linear(x, weights[i % copies], config=config, pdl=True)

    def reference() -> Tensor:
        return x.float() @ ((codes.float() - 8) * sizes.t().float().repeat_interleave(GROUP, 1)).t()

    variants: dict[str, Callable[[int], Tensor | None]] = {"(chosen)": ours(None)}
    for c in _packed_configs(count, outputs, inner // (4 * width)):
        variants[f"{c.outputs}x{c.rows}w{c.warps}s{c.stages}k{c.splits}i{c.inner}"] = ours(c)
    return Case(name, variants, reference, inner * outputs / 2, 2.0 * count * inner * outputs, 1e-2, max(2 * copies, 20))


def _packed_configs(count: int, outputs: int, steps: int) -> list[packed.Config]:
    """Tiles that leave registers for the sums, and so many programs for each that several lie on a processor."""
    found: dict[packed.Config, None] = {}
    tall = min(max(next_power(count), 8), 128)
    for wide, rows in itertools.product((64, 128, 256), {tall, max(tall // 2, 8)}):
        warps = 8 if wide * rows >= 8192 else 4
        for programs in (1, 2, 4, 7) if wide * rows <= 2 * packed.SUMS * warps else ():
            tiles = blocks(outputs, wide) * blocks(count, rows)
            splits = packed.splits_of(programs * chips.current().multiprocessors // tiles, count, outputs)
            for columns in (128, 256):
                found[packed.Config(wide, rows, warps, 3, min(splits, steps * 128 // columns), columns)] = None
    return list(found)


def scaled_cases() -> Iterator[Case]:
    for name, (inner, outputs) in LINEARS.items():
        for count in (1, 16, 64, 128, 256, 8192):
            yield _scaled_case(f"fp8 {name} {count}x{inner}x{outputs}", count, inner, outputs)


def _scaled_case(name: str, count: int, inner: int, outputs: int) -> Case:
    copies = max(2, int(L2_BYTES / (inner * outputs)))
    codes = (torch.randn(outputs, inner, device="cuda") * 0.5).to(FP8)
    sizes = torch.rand(1, outputs, device="cuda") * 0.01 + 0.005
    weights = [scaled.EightBits(codes.clone(), sizes, inner) for _ in range(copies)]
    q, by = scaled.quantize(torch.randn(count, inner, device="cuda", dtype=torch.bfloat16), FP8)

    def ours(cut: scaled.Cut | None) -> Callable[[int], Tensor]:
        return lambda i: scaled.rows(q, by, weights[i % copies], dtype=torch.bfloat16, cut=cut, pdl=True)

    def reference() -> Tensor:
        return (q.float() * by[:, None]) @ (codes.float() * sizes.t()).t()

    variants: dict[str, Callable[[int], Tensor | None]] = {"(chosen)": ours(None)}
    tall = min(max(next_power(count), 16), 256)
    for wide, rows, stages in itertools.product((64, 128, 256), {tall, max(tall // 2, 16)}, (3, 4)):
        warps, step = 8 if wide * rows > 8192 else 4, 256 if count <= 16 else 128
        tiles = blocks(outputs, wide) * blocks(count, rows)
        splits = packed.splits_of(2 * chips.current().multiprocessors // tiles, count, outputs)
        if wide * rows <= 32768:
            cut = scaled.Cut(wide, rows, warps, stages, splits, step)
            variants[f"{wide}x{rows}x{step}w{warps}s{stages}k{splits}"] = ours(cut)
    return Case(name, variants, reference, 1.0 * inner * outputs, 2.0 * count * inner * outputs, 1e-2, 3 if count > 4096 else 20)


def kept_cases() -> Iterator[Case]:
    for kind, (count, length) in itertools.product(("int8", "fp8", "int4"), ((8, 32768), (32, 4096), (128, 1024), (1, 1024))):
        yield _kept_case(kind, count, length, (32, 8, 128))


def _kept_case(kind: str, count: int, length: int, shape: tuple[int, int, int]) -> Case:
    heads, kv_heads, dim = shape
    layout, slots = layout_of([length - 1] * count, [1] * count, 16)
    spec = CacheSpec((kv_heads, dim), (kv_heads, dim)).as_kind(kind)
    cache = KVCache.allocate(spec, slots, torch.bfloat16, lambda sizes, dtype: torch.zeros(sizes, dtype=dtype, device="cuda"))
    for first in range(0, slots, 16384):
        new = torch.arange(first, min(first + 16384, slots), device="cuda", dtype=torch.int32)
        k, v = (torch.randn(len(new), kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        kv.store(k, v, cache.k, cache.v, new, cache.scales or cache.factors)
    q = torch.randn(count, heads, dim, device="cuda", dtype=torch.bfloat16)
    out, scales = torch.empty_like(q), cache.scales or cache.factors
    where = (layout.page_table, layout.rows_device, layout.query_starts, layout.context_lengths)

    def ours(tile: int, warps: int, stages: int, spans: int) -> Callable[[int], Tensor]:
        target = blocks(spans * chips.current().multiprocessors, kv_heads)
        plan = decode.make_plan(count, heads, kv_heads, dim, q.device, fewer_bits=kind != "plain", target=target)
        decode.plan(plan, layout.query_starts, layout.context_lengths)
        return lambda i: decode.attend(
            q, cache.k, cache.v, out, *where, plan, page_size=16, scale=dim**-0.5, scales=scales, tile=tile, warps=warps,
            stages=stages, pdl=True,
        )  # fmt: skip

    variants: dict[str, Callable[[int], Tensor | None]] = {"(chosen)": ours(0, 0, 3, 0)}
    for tile, warps, stages, spans in itertools.product((64, 128), (1, 2, 4), (3, 5), (4, 8)):
        variants[f"t{tile}w{warps}s{stages}n{spans}"] = ours(tile, warps, stages, spans)
    return Case(
        f"{kind} {count}x{length}", variants,
        lambda: PLAIN.attention(q, cache, PLAIN.plan_attention(layout), AttentionKind(dim**-0.5)),
        num_bytes=1.0 * count * length * spec.bytes_per_token(torch.bfloat16), calls=10,
    )  # fmt: skip


GROUPS: dict[str, Group] = {"packed": packed_cases, "scaled": scaled_cases, "kept": kept_cases}
