"""Cases of the engine's own kernels: shapes, several cuts of each, and the op table's plain bodies beside them.

Part of `trireme.bench.llm_kernels`, which checks and times them. Knows shapes and kernels; nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trireme.kernels.steps import attention, decode, kv, rows, sampling, skinny
from trireme.ops import AttentionKind, Choosing, KVCache, Ops, StepLayout

PLAIN = Ops()
L2_BYTES = 200e6  # inputs are rotated until they are several times as large as the second-level cache
MODELS = {  # hidden, heads, kv_heads, head_dim, inner, layers
    "llama8b": (4096, 32, 8, 128, 14336, 32),
    "qwen05b": (896, 14, 2, 64, 4864, 24),
    "smol135m": (576, 9, 3, 64, 1536, 30),
}


@dataclass
class Case:
    """One shape of one kernel: ways to compute it, what it should be, and what it must move or multiply."""

    name: str
    variants: dict[str, Callable[[int], Tensor | None]]  # each takes the number of the turn, to rotate among its inputs
    reference: Callable[[], Tensor] | None = None
    num_bytes: float = 0.0
    flops: float = 0.0
    tolerance: float = 2e-2
    calls: int = 20
    extra: dict[str, float] = field(default_factory=dict)


# --- products ---------------------------------------------------------------------------------------------------------------


def skinny_cases() -> Iterator[Case]:
    shapes = [("qkv", 4096, 6144, ""), ("o", 4096, 4096, ""), ("gate_up", 4096, 28672, "silu"), ("down", 14336, 4096, "")]
    shapes += [("head", 4096, 128256, ""), ("qwen qkv", 896, 1152, ""), ("qwen gate_up", 896, 9728, "silu")]
    shapes += [
        ("qwen down", 4864, 896, ""),
        ("qwen head", 896, 151936, ""),
        ("smol gate_up", 576, 3072, "silu"),
        ("smol o", 576, 576, ""),
    ]
    for name, inner, outputs, gated in shapes:
        for count in (1, 2, 8, 32, 64):
            yield _skinny_case(f"{name} {count}x{inner}x{outputs}", count, inner, outputs, gated)


def _skinny_case(name: str, count: int, inner: int, outputs: int, gated: str) -> Case:
    copies = max(1, min(40, int(L2_BYTES / (2 * inner * outputs)) + 1))
    weights = [torch.randn(outputs, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(count, inner, device="cuda", dtype=torch.bfloat16)

    def plain(i: int) -> Tensor:
        y = F.linear(x, weights[i % copies])
        return rows.gated(y, gated) if gated else y

    def ours(config: skinny.Config | None) -> Callable[[int], Tensor]:
        return lambda i: skinny.linear(x, weights[i % copies], gated=gated, config=config)

    variants: dict[str, Callable[[int], Tensor | None]] = {"torch": plain, "chosen": ours(None)}
    for config in _skinny_configs(count, inner, outputs):
        label = f"{config.outputs}x{config.inner}w{config.warps}s{config.stages}k{config.splits}"
        variants[label] = ours(config)

    def reference() -> Tensor:
        y = F.linear(x.float(), weights[0].float())
        return PLAIN.gated(y, gated) if gated else y

    return Case(name, variants, reference, num_bytes=2.0 * inner * outputs, calls=max(copies, 20))


def _skinny_configs(count: int, inner: int, outputs: int) -> list[skinny.Config]:
    if count == 1:
        cuts = [(2, 1024, 4), (4, 512, 4), (4, 1024, 4), (8, 256, 4), (8, 512, 4), (16, 256, 4), (16, 512, 8), (8, 1024, 8)]
        return [skinny.Config(n, k, w) for n, k, w in cuts if k <= max(512, inner)]
    configs = [
        skinny.Config(64, 128, 4, 4),
        skinny.Config(64, 64, 4, 6),
        skinny.Config(32, 128, 4, 5),
        skinny.Config(16, 256, 4, 4),
    ]
    configs += [skinny.Config(128, 64, 4, 5), skinny.Config(64, 256, 8, 3)]
    few = outputs < 128 * 132
    configs += [skinny.Config(64, 128, 4, 4, s) for s in (2, 4) if few] + [skinny.Config(128, 64, 4, 5, s) for s in (4,) if few]
    return [c for c in configs if inner >= c.inner * c.splits]


# --- attention ----------------------------------------------------------------------------------------------------------------


def layout_of(starts: list[int], counts: list[int], page_size: int) -> tuple[StepLayout, int]:
    """The layout of a step with scattered pages, and the number of slots it needs."""
    random = np.random.default_rng(5)
    s, c = np.array(starts, np.int32), np.array(counts, np.int32)
    pages = -(-(s + c) // page_size)
    order = random.permutation(int(pages.sum()))
    table = np.zeros((len(s), int(pages.max())), np.int32)
    for i, end in enumerate(np.cumsum(pages)):
        table[i, : pages[i]] = order[end - pages[i] : end]
    rows_of = np.arange(len(s), dtype=np.int32)
    columns = (table, rows_of, np.concatenate([[0], np.cumsum(c)]).astype(np.int32), s + c)
    page_table, on_device, query_starts, lengths = (torch.from_numpy(x).cuda() for x in columns)
    return StepLayout(page_size, rows_of, s, c, page_table, on_device, query_starts, lengths), int(pages.sum()) * page_size


def _caches(slots: int, kv_heads: int, dim: int, rotate: bool) -> list[KVCache]:
    copies = max(1, min(24, int(L2_BYTES / (4 * slots * kv_heads * dim)) + 1)) if rotate else 1
    make = lambda: torch.randn(slots, kv_heads, dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    return [KVCache(make(), make()) for _ in range(copies)]


def decode_cases() -> Iterator[Case]:
    mixed = [int(x) for x in np.random.default_rng(3).lognormal(5.6, 1.2, 128).clip(4, 16000)]
    for lengths, page, heads in (
        ([512], 16, (32, 8, 128)), ([8192], 16, (32, 8, 128)), ([1024] * 8, 16, (32, 8, 128)), ([1024] * 32, 16, (32, 8, 128)),
        ([1024] * 128, 16, (32, 8, 128)), ([512] * 256, 16, (32, 8, 128)), ([1024] * 128, 1, (32, 8, 128)),
        (mixed, 16, (32, 8, 128)),
        ([256], 16, (14, 2, 64)), ([256] * 256, 16, (14, 2, 64)), ([256], 16, (9, 3, 64)), ([256] * 256, 16, (9, 3, 64)),
    ):  # fmt: skip
        yield _decode_case(lengths, page, *heads)


def _decode_case(lengths: list[int], page: int, heads: int, kv_heads: int, dim: int) -> Case:
    layout, slots = layout_of([n - 1 for n in lengths], [1] * len(lengths), page)
    caches = _caches(slots, kv_heads, dim, True)
    q = torch.randn(len(lengths), heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    where = (layout.page_table, layout.rows_device, layout.query_starts, layout.context_lengths)

    def ours(tile: int, stages: int, spans: int, least: int, pdl: bool = False) -> Callable[[int], Tensor]:
        plan = decode.make_plan(len(lengths), heads, kv_heads, dim, q.device, target=-(-spans * 132 // kv_heads))
        decode.plan(plan, layout.query_starts, layout.context_lengths, min_span=least)

        def call(i: int) -> Tensor:
            cache = caches[i % len(caches)]
            return decode.attend(
                q, cache.k, cache.v, out, *where, plan, page_size=page, scale=dim**-0.5, tile=tile, stages=stages, pdl=pdl
            )

        return call

    tiles = (64, 128) if dim == 64 else (32, 64)
    cuts = [(t, 3, n, m) for t in tiles for n, m in ((1, 64), (2, 64), (4, 64), (2, 128))] + [(tiles[1], 4, 3, 64)]
    variants: dict[str, Callable[[int], Tensor | None]] = {f"t{t}s{s}n{n}m{m}": ours(t, s, n, m) for t, s, n, m in cuts}
    variants["t64s3n2m32"] = ours(64, 3, 2, 32)
    variants["t64s3n2m64 pdl"] = ours(64, 3, 2, 64, pdl=True)
    spare = decode.make_plan(len(lengths), heads, kv_heads, dim, q.device)
    variants["(plan)"] = lambda i: decode.plan(spare, layout.query_starts, layout.context_lengths)
    name = f"{len(lengths)}x{lengths[0] if len(set(lengths)) == 1 else 'mixed'} p{page} {heads}/{kv_heads}/{dim}"
    return Case(
        name, variants, lambda: PLAIN.attention(q, caches[0], PLAIN.plan_attention(layout), AttentionKind(dim**-0.5)),
        num_bytes=4.0 * sum(lengths) * kv_heads * dim, calls=max(20, len(caches)),
    )  # fmt: skip


def prompt_cases() -> Iterator[Case]:
    big = (32, 8, 128)
    for starts, counts, heads in (
        ([0] * 8, [2048] * 8, big), ([0], [8192], big), ([0] * 32, [256] * 32, big), ([4096] * 4, [512] * 4, big),
        ([0], [128], big),
        ([1000] * 32, [4] * 32, big), ([0] * 8, [2048] * 8, (14, 2, 64)), ([0], [8192], (9, 3, 64)),
    ):  # fmt: skip
        yield _prompt_case(starts, counts, *heads)


def _prompt_case(starts: list[int], counts: list[int], heads: int, kv_heads: int, dim: int) -> Case:
    layout, slots = layout_of(starts, counts, 16)
    cache = _caches(slots, kv_heads, dim, False)[0]
    q = torch.randn(sum(counts), heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    where = (layout.page_table, layout.rows_device, layout.query_starts, layout.context_lengths)

    def ours(shape: attention.Shape | None, dense: bool, alone: bool = False) -> Callable[[int], Tensor]:
        plan = attention.make_plan(layout.starts, layout.counts, heads // kv_heads, dim, q.device, shape=shape)
        ready = attention.collect(cache.k, cache.v, where[0], where[1], plan, 16)

        def call(i: int) -> Tensor:
            k, v = cache.k, cache.v
            if dense:
                k, v = ready if alone else attention.collect(cache.k, cache.v, where[0], where[1], plan, 16)
            return attention.attend(q, k, v, out, *where, plan, page_size=16, scale=dim**-0.5, dense=dense)

        return call

    variants: dict[str, Callable[[int], Tensor | None]] = {"chosen": ours(None, False), "chosen dense": ours(None, True)}
    for r, n, w, s in ((64, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 4), (64, 128, 4, 2), (64, 32, 4, 4)):
        shape = attention.Shape(r, n, w, s)
        variants[f"{r}x{n}w{w}s{s}"] = ours(shape, False)
        variants[f"{r}x{n}w{w}s{s} dense"] = ours(shape, True)
    variants["(128x128w8s3 dense, copied before)"] = ours(attention.Shape(128, 128, 8, 3), True, True)
    variants["(64x64w4s3 dense, copied before)"] = ours(attention.Shape(64, 64, 4, 3), True, True)
    if not any(starts) and len(set(counts)) == 1:
        variants |= _torch_attention(q, len(counts), counts[0], kv_heads)
    pairs = sum(c * s + c * c / 2 for s, c in zip(starts, counts, strict=True))
    return Case(
        f"{len(counts)}x{counts[0]} after {starts[0]} {heads}/{kv_heads}/{dim}", variants,
        lambda: PLAIN.attention(q, cache, PLAIN.plan_attention(layout), AttentionKind(dim**-0.5)),
        flops=4.0 * pairs * heads * dim, calls=4,
    )  # fmt: skip


def _torch_attention(q: Tensor, batch: int, count: int, kv_heads: int) -> dict[str, Callable[[int], Tensor | None]]:
    """torch's attention over dense keys. It has no pages, so it is a bound rather than a competitor."""
    heads, dim = q.shape[1:]
    dense_q = q.view(batch, count, heads, dim).transpose(1, 2)
    k, v = (torch.randn(batch, count, kv_heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))

    def call(backend: SDPBackend) -> Callable[[int], None]:
        def run(i: int) -> None:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(dense_q, k, v, is_causal=True, enable_gqa=True)

        return run

    return {"(cudnn)": call(SDPBackend.CUDNN_ATTENTION), "(flash)": call(SDPBackend.FLASH_ATTENTION)}


# --- what lies between --------------------------------------------------------------------------------------------------------


def row_cases() -> Iterator[Case]:
    for count in (1, 32, 256, 8192):
        yield from _norm_cases(count)
        yield _gate_case(count)
        yield _rope_case(count)
        yield _sampling_case(min(count, 256))


def _norm_cases(count: int) -> Iterator[Case]:
    x, residual = (torch.randn(count, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(4096, device="cuda", dtype=torch.bfloat16)
    alone: dict[str, Callable[[int], Tensor | None]] = {"ours": lambda i: rows.rms_norm(x, weight, 1e-5)}
    added: dict[str, Callable[[int], Tensor | None]] = {"ours": lambda i: rows.rms_norm(x, weight, 1e-5, residual)}
    yield Case(f"rms_norm {count}", alone, lambda: PLAIN.rms_norm(x, weight, 1e-5), num_bytes=4.0 * x.numel())
    yield Case(f"add_rms_norm {count}", added, num_bytes=8.0 * x.numel())


def _gate_case(count: int) -> Case:
    x = torch.randn(count, 28672, device="cuda", dtype=torch.bfloat16)
    variants: dict[str, Callable[[int], Tensor | None]] = {"ours": lambda i: rows.gated(x, "silu")}
    return Case(f"silu_mul {count}", variants, lambda: PLAIN.gated(x.float(), "silu"), num_bytes=3.0 * x.numel())


def _rope_case(count: int) -> Case:
    qkv = torch.randn(count, 48 * 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in qkv.split([4096, 1024, 1024], -1))
    cache = _caches(count + 7, 8, 128, False)[0]
    spare = KVCache(cache.k.clone(), cache.v.clone())
    table = torch.randn(count + 3, 128, device="cuda")
    index, slots = torch.arange(count, device="cuda", dtype=torch.int32), torch.randperm(count, device="cuda").int()

    def reference() -> Tensor:
        out = PLAIN.qkv_rope_store(q, k, v, table, index, spare, slots)
        return torch.cat([out.flatten(), spare.k.flatten(), spare.v.flatten()])

    def ours(i: int) -> Tensor:
        return kv.rope_store(q, k, v, cache.k, cache.v, table, index, slots)

    def checked(i: int) -> Tensor:
        return torch.cat([ours(i).flatten(), cache.k.flatten(), cache.v.flatten()])

    variants: dict[str, Callable[[int], Tensor | None]] = {"checked": checked, "ours": lambda i: _silent(ours(i))}
    return Case(f"rope_store {count}", variants, reference, 4.0 * qkv.numel())


def _silent(*_: object) -> None:
    """For operations that are timed but not compared."""


def _sampling_case(count: int) -> Case:
    logits = torch.randn(count, 128256, device="cuda", dtype=torch.bfloat16) * 2
    ones, zeros = torch.ones(count, device="cuda"), torch.zeros(count, device="cuda")
    top_k, uniform = torch.full((count,), 50, device="cuda", dtype=torch.int32), torch.rand(count, device="cuda")
    none = torch.zeros_like(top_k)
    variants: dict[str, Callable[[int], Tensor | None]] = {
        "greedy": lambda i: sampling.greedy(logits),
        "(torch argmax)": lambda i: _silent(logits.argmax(-1)),
        "(random)": lambda i: _silent(sampling.sample(logits, Choosing(ones, none, ones, zeros), uniform)),
        "(top-k 50)": lambda i: _silent(sampling.sample(logits, Choosing(ones, top_k, ones, zeros), uniform)),
        "(top-p 0.9)": lambda i: _silent(sampling.sample(logits, Choosing(ones, none, ones * 0.9, zeros), uniform)),
        "(logprobs)": lambda i: _silent(sampling.logprobs(logits, none.long())),
    }
    case = Case(f"sampling {count}x128256", variants, lambda: logits.argmax(-1), num_bytes=2.0 * logits.numel(), tolerance=0.0)
    by = Choosing(ones, top_k, ones * 0.8, ones * 0.02)
    drawn, plain = sampling.sample(logits, by, uniform), PLAIN.sample(logits, by, uniform)
    case.extra["share of draws equal to the plain body's"] = float((drawn == plain).double().mean())
    return case


# --- a whole layer, as a decode step sees it ------------------------------------------------------------------------------------


def chain_cases() -> Iterator[Case]:
    for model in MODELS:
        for batch in (1, 8, 32, 64):
            yield _chain_case(model, batch)


def _chain_case(model: str, batch: int) -> Case:
    hidden, heads, kv_heads, dim, inner, layers = MODELS[model]
    layers = min(layers, 8)
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02  # noqa: E731
    width = (heads + 2 * kv_heads) * dim
    weights = [
        (make(width, hidden), make(hidden, heads * dim), make(2 * inner, hidden), make(hidden, inner)) for _ in range(layers)
    ]
    norm, x0 = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), make(batch, hidden) * 50
    layout, slots = layout_of([299] * batch, [1] * batch, 16)
    caches = [_caches(slots, kv_heads, dim, False)[0] for _ in range(layers)]
    table, position = torch.randn(400, dim, device="cuda"), torch.full((batch,), 299, device="cuda", dtype=torch.int32)
    new = torch.arange(batch, device="cuda", dtype=torch.int32)
    plan = decode.make_plan(batch, heads, kv_heads, dim, x0.device)
    decode.plan(plan, layout.query_starts, layout.context_lengths)
    where = (layout.page_table, layout.rows_device, layout.query_starts, layout.context_lengths)

    def mix(qkv: Tensor, layer: int, pdl: bool) -> Tensor:
        q, k, v = (p.unflatten(-1, (-1, dim)) for p in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
        cache = caches[layer]
        q = kv.rope_store(q, k, v, cache.k, cache.v, table, position, new, pdl=pdl)
        out = torch.empty_like(q)
        return decode.attend(q, cache.k, cache.v, out, *where, plan, page_size=16, scale=dim**-0.5, pdl=pdl).flatten(1)

    def plain(pdl: bool, ours: bool) -> Callable[[int], Tensor]:
        linear = (lambda x, w: skinny.linear(x, w, pdl=pdl)) if ours else F.linear

        def call(i: int) -> Tensor:
            x, residual = x0, x0.clone()
            for layer, (qkv, o, gate_up, down) in enumerate(weights):
                y = rows.rms_norm(x, norm, 1e-5, residual, pdl=pdl)
                y = rows.rms_norm(linear(mix(linear(y, qkv), layer, pdl), o), norm, 1e-5, residual, pdl=pdl)
                x = linear(
                    skinny.linear(y, gate_up, gated="silu", pdl=pdl) if ours else rows.gated(F.linear(y, gate_up), "silu"), down
                )
            return x + residual

        return call

    def fused(pdl: bool) -> Callable[[int], Tensor]:
        def call(i: int) -> Tensor:
            x = x0 + x0
            for layer, (qkv, o, gate_up, down) in enumerate(weights):
                y = mix(skinny.linear(x, qkv, norm=norm, eps=1e-5, pdl=pdl), layer, pdl)
                x = skinny.linear(y, o, residual=x, pdl=pdl)
                y = skinny.linear(x, gate_up, norm=norm, eps=1e-5, gated="silu", pdl=pdl)
                x = skinny.linear(y, down, residual=x, pdl=pdl)
            return x

        return call

    num_bytes = 2.0 * layers * (hidden * width + hidden * heads * dim + 3 * hidden * inner)
    variants: dict[str, Callable[[int], Tensor | None]] = {
        "torch linears": plain(False, False), "ours": plain(False, True), "ours, started early": plain(True, True),
        "norms fused, started early": fused(True),
    }  # fmt: skip
    reference = plain(False, False)
    return Case(
        f"{layers} layers of {model} x{batch}", variants, lambda: reference(0), num_bytes=num_bytes, calls=3, tolerance=5e-2
    )


Group = Callable[[], Iterator[Case]]
GROUPS: dict[str, Group] = {
    "rows": row_cases, "decode": decode_cases, "prompt": prompt_cases, "skinny": skinny_cases, "chain": chain_cases,
}  # fmt: skip
