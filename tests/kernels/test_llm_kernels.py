"""The engine's kernels against the plain bodies of the op table: tiny shapes in the interpreter, the same and more on a GPU."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from trireme.backends.conformance import check_case
from trireme.backends.cuda.ops import CudaOps, _collected
from trireme.kernels import chips
from trireme.kernels.steps import attention, decode, gate, kv, rows, sampling, skinny
from trireme.ops import AttentionKind, CacheSpec, Choosing, KVCache, Ops, StepLayout
from trireme.ops.cases import cases

PLAIN = Ops()
GPU = not chips.current().interpreted
DEVICE = torch.device("cuda" if GPU else "cpu")
TYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def close(out: Tensor, expected: Tensor) -> None:
    """‖out − expected‖ / ‖expected‖ within the type's tolerance; a NaN never passes."""
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert float(error) <= TOLERANCE[out.dtype], float(error)


def layout(starts: list[int], counts: list[int], page_size: int) -> tuple[StepLayout, int]:
    """A step whose pages lie scattered and whose rows are not in order; and how many slots there are."""
    random = np.random.default_rng(1)
    s, c = np.array(starts, np.int32), np.array(counts, np.int32)
    pages = -(-(s + c) // page_size)
    order = random.permutation(int(pages.sum()) + 3)
    taken = random.permutation(len(s) + 2)[: len(s)].astype(np.int32)
    table = np.zeros((len(s) + 2, int(pages.max())), np.int32)
    for row, end, n in zip(taken, np.cumsum(pages), pages, strict=True):
        table[row, :n] = order[end - n : end]
    columns = (table, taken, np.concatenate([[0], np.cumsum(c)]).astype(np.int32), s + c)
    return StepLayout(page_size, taken, s, c, *(torch.from_numpy(x).to(DEVICE) for x in columns)), len(order) * page_size


def attention_case(
    starts: list[int], counts: list[int], page: int, heads: tuple[int, int, int], kind: AttentionKind, dtype: torch.dtype,
    kept: str = "plain",
):  # fmt: skip
    step, slots = layout(starts, counts, page)
    q = drawn(sum(counts), heads[0], heads[2], dtype=dtype)
    cache = KVCache.allocate(CacheSpec(heads[1:], heads[1:], kept), slots, dtype, zeros)
    if kept == "fp8":
        cache.factors = torch.linspace(0.02, 0.3, heads[1]).to(DEVICE), torch.linspace(0.5, 0.01, heads[1]).to(DEVICE)
    k, v = (drawn(slots, heads[1], heads[2], dtype=dtype) for _ in "kv")
    PLAIN.store_kv(k, v, cache, torch.arange(slots, device=DEVICE))
    return step, q, cache, PLAIN.attention(q, cache, PLAIN.plan_attention(step), kind)


def per_head(*values: float) -> Tensor:
    return torch.tensor(values, device=DEVICE)


KINDS = {
    "plain": ((4, 2, 64), 16, AttentionKind(0.125)),
    "token pages, one KV head": ((3, 1, 32), 1, AttentionKind(0.2)),
    "odd page, odd head, window": ((6, 2, 80), 7, AttentionKind(0.1, window=20)),
    "capped and sloped": ((4, 2, 32), 16, AttentionKind(0.2, softcap=5.0, slopes=per_head(0.5, 0.25, 0.1, 0.01))),
    "sinks": ((6, 2, 32), 16, AttentionKind(0.2, sinks=per_head(-3.0, 0.0, 2.0, 5.0, 1.0, -1.0))),
    "sinks, window": ((4, 4, 64), 4, AttentionKind(0.1, window=40, sinks=per_head(-3.0, 0.0, 2.0, 5.0))),
}
KEPT = [(name, "plain") for name in KINDS] + [
    (name, kept)
    for name, several in {
        "plain": ("int8", "int4", "fp8"),
        "odd page, odd head, window": ("int8", "int4"),
        "capped and sloped": ("int4",),
        "sinks, window": ("fp8",),
    }.items()
    for kept in several
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("name", "kept"), KEPT)
def test_decode_attention_joins_its_spans(name: str, kept: str, dtype: torch.dtype) -> None:
    heads, page, kind = KINDS[name]
    step, q, cache, expected = attention_case([3, 149, 64, 0, 260], [1] * 5, page, heads, kind, dtype, kept)
    plan = decode.make_plan(5, heads[0], heads[1], heads[2], DEVICE, target=9)
    decode.plan(plan, step.query_starts, step.context_lengths, kind.window, min_span=32)
    out = torch.full_like(q, float("nan"))
    for _ in range(2):  # the counters are ready for the next layer
        decode.attend(
            q, cache.k, cache.v, out, step.page_table, step.rows_device, step.query_starts, step.context_lengths, plan,
            page_size=page, scale=kind.scale, window=kind.window, softcap=kind.softcap,
            tile=32, slopes=kind.slopes, sinks=kind.sinks, scales=cache.scales or cache.factors,
        )  # fmt: skip
        close(out, expected)
    assert int(plan.counters.abs().sum()) == 0
    assert int(plan.info[5]) > 1, "the longest sequence was not cut"


@pytest.mark.parametrize("kept", ["plain", "int4"])
def test_many_spans_are_joined_in_runs(kept: str) -> None:
    """Two sequences, of 35 and 9 spans: six runs and three, the last of each shorter than the others or not."""
    heads, page, kind = KINDS["plain"]
    step, q, cache, expected = attention_case([1099, 280], [1, 1], page, heads, kind, torch.float32, kept)
    plan = decode.make_plan(2, heads[0], heads[1], heads[2], DEVICE, target=60)
    decode.plan(plan, step.query_starts, step.context_lengths, min_span=32)
    assert plan.info.tolist() == [32, 35, 9]
    out = torch.full_like(q, float("nan"))
    for _ in range(2):
        decode.attend(
            q, cache.k, cache.v, out, step.page_table, step.rows_device, step.query_starts, step.context_lengths, plan,
            page_size=page, scale=kind.scale, tile=32, scales=cache.scales or cache.factors,
        )  # fmt: skip
        close(out, expected)
    assert int(plan.counters.abs().sum()) == 0


def test_decode_spans_cover_each_sequence_once() -> None:
    lengths = [1, 700, 33, 64, 65, 0, 5]
    starts = torch.tensor([0, 1, 2, 3, 4, 5, 5, 8], dtype=torch.int32, device=DEVICE)  # the sixth has no token, the last has three
    plan = decode.make_plan(7, 4, 2, 64, DEVICE, target=10)
    decode.plan(plan, starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), min_span=32)
    span = int(plan.info[0])
    found = [(int(s), int(b)) for s, b in zip(plan.sequence, plan.begin, strict=True) if s >= 0]
    assert found == [(i, b) for i in range(5) for b in range(0, lengths[i], span)]


@pytest.mark.parametrize(
    "count, target, span",
    [
        (4, 14, 192),  # of 160 tokens there would be sixteen, of 192 there are twelve
        (4, 11, 192),  # no span up to a quarter longer than 192 tokens lets all run at once
        (4, 17, 128),  # sixteen as they are
        (9, 8, 576),  # more sequences than can run at once
    ],
)
def test_decode_spans_are_a_little_longer_where_all_run_at_once_then(count: int, target: int, span: int) -> None:
    starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    plan = decode.make_plan(count, 4, 2, 64, DEVICE, target=target)
    decode.plan(plan, starts, torch.full((count,), 512, dtype=torch.int32, device=DEVICE), min_span=32)
    assert int(plan.info[0]) == span
    assert (plan.sequence >= 0).sum() == count * -(-512 // span)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("name", "kept"), KEPT)
def test_prompt_attention(name: str, kept: str, dense: bool, dtype: torch.dtype) -> None:
    heads, page, kind = KINDS[name]
    if dense and heads[2] & (heads[2] - 1):
        pytest.skip("bulk copies take heads of a power of two")
    starts, counts = [0, 37, 64, 5, 20], [30, 1, 3, 60, 0]
    step, q, cache, expected = attention_case(starts, counts, page, heads, kind, dtype, kept)
    shape = attention.Shape(32, 32, 4, 2)
    plan = attention.make_plan(step.starts, step.counts, heads[0] // heads[1], heads[2], DEVICE, shape=shape)
    k, v, scales = _collected(q, cache, step, plan) if dense else (cache.k, cache.v, cache.scales or cache.factors)
    out = torch.full_like(q, float("nan"))
    attention.attend(
        q, k, v, out, step.page_table, step.rows_device, step.query_starts, step.context_lengths, plan, page_size=page,
        scale=kind.scale, window=kind.window, softcap=kind.softcap, dense=dense, slopes=kind.slopes, sinks=kind.sinks,
        scales=scales,
    )  # fmt: skip
    assert out[30].isnan().all(), "a sequence with one new token is not the prompt kernel's"
    close(torch.cat([out[:30], out[31:]]), torch.cat([expected[:30], expected[31:]]))


@pytest.mark.parametrize("window", [0, 20])
def test_what_no_token_sees_may_be_anything(window: int) -> None:
    """Slots behind a sequence's end and before its window may be another's by now, and hold what is not finite."""
    heads, page, kind, starts, counts = (4, 2, 32), 4, AttentionKind(0.2, window=window), [0, 37, 64], [30, 3, 6]
    step, q, cache, expected = attention_case(starts, counts, page, heads, kind, torch.float32)
    hidden = torch.ones(len(cache.k), dtype=torch.bool, device=DEVICE)
    for row, start, count in zip(step.rows_device.tolist(), starts, counts, strict=True):
        seen = torch.arange(max(start - window + 1, 0) if window else 0, start + count, device=DEVICE)
        hidden[step.page_table[row].long()[seen // page] * page + seen % page] = False
    cache.k[hidden] = cache.v[hidden] = float("nan")
    plan = attention.make_plan(step.starts, step.counts, 2, 32, DEVICE, shape=attention.Shape(32, 32, 4, 2))
    out = torch.empty_like(q)
    attention.attend(
        q, cache.k, cache.v, out, step.page_table, step.rows_device, step.query_starts, step.context_lengths, plan, page_size=page,
        scale=kind.scale, window=window, softcap=0.0, dense=False, slopes=None, sinks=None,
    )  # fmt: skip
    close(out, expected)


@pytest.mark.parametrize("replayed", [False, True])
def test_backend_takes_mixed_steps_apart(replayed: bool) -> None:
    """Prompts behind a prefix, drafts, decodes and a sequence without tokens in one step, and padding rows behind them."""
    kind = AttentionKind(0.2)
    step, q, cache, expected = attention_case([0, 40, 7, 0], [9, 1, 3, 0], 4, (4, 2, 32), kind, torch.float32)
    ops = CudaOps()
    out = ops.attention(torch.cat([q, q[:2]]), cache, ops.plan_attention(replace(step, room=len(q) + 2 if replayed else 0)), kind)
    close(out[:13], expected)
    assert replayed or not out[13:].any()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.wide)], ids=str)
@pytest.mark.parametrize("kind", ["fp8", pytest.param("int8", marks=pytest.mark.wide), "int4"])
def test_keys_and_values_in_fewer_bits(kind: str, dtype: torch.dtype) -> None:
    """Every such case of the conformance suite; of float32, where all is interpreted slowly, those with small heads."""
    backend = SimpleNamespace(ops=CudaOps(), device=DEVICE, cache=lambda spec, n, d: KVCache.allocate(spec, n, d, zeros))
    all_heads = GPU or dtype != torch.float32
    chosen = [case for case in cases() if case.kv == kind and (all_heads or "heads" not in case.name)]
    findings = [check_case(backend, case, dtype) for case in chosen]
    assert findings and [finding for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_given_scales(kind: str, dtype: torch.dtype) -> None:
    """They take the place of computed ones; what is too large for them is cut off, what is no number stays none."""
    num, num_kv, dim, count = 6, 3, 80, 5
    q, k, v = (drawn(count, heads, dim, dtype=dtype) for heads in (num, num_kv, num_kv))
    k[0, 0, 3] = float("nan")
    table, index = drawn(40, 2 * 16), torch.tensor([3, 0, 7, 39, 12], dtype=torch.int32, device=DEVICE)
    slots, spec = torch.tensor([9, 2, -1, 0, 30], dtype=torch.int32, device=DEVICE), CacheSpec((num_kv, dim), (num_kv, dim), kind)
    most = 448 if kind == "fp8" else 127
    for rope in (False, True):
        kept = []
        for ops in (CudaOps(), PLAIN):
            cache = KVCache.allocate(spec, 31, dtype, zeros)
            cache.factors = per_head(2.3 / most, 0.9 / most, 1.7 / most), per_head(1.9 / most, 3.1 / most, 0.4 / most)
            if rope:
                ops.qkv_rope_store(q, k, v, table, index, cache, slots)
            else:
                ops.store_kv(k, v, cache, slots)
            kept.append(torch.cat(cache.at(torch.tensor([9, 2, 0, 30], device=DEVICE)), 1))
        ours, plain = kept
        assert torch.equal(ours.isnan(), plain.isnan()) and plain.isnan().any()
        apart = (ours - plain).nan_to_num(0.0) != 0  # rope may turn a number by one rounding, hence to the next code
        assert int(apart.sum()) <= (8 if rope else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_fp8_cannot_hold(dtype: torch.dtype) -> None:
    """It is kept as the largest number; what is no number stays none."""
    cache = KVCache.allocate(CacheSpec((1, 16), (1, 16), "fp8"), 2, dtype, zeros)
    k = torch.full((1, 1, 16), 1e4, dtype=dtype, device=DEVICE)
    k[..., 0], k[..., 1] = float("nan"), -1e4
    CudaOps().store_kv(k, k, cache, torch.tensor([1], dtype=torch.int32, device=DEVICE))
    found = cache.at(torch.tensor([1], device=DEVICE))[0].flatten().tolist()
    assert math.isnan(found[0]) and found[1:] == [-448.0, *[448.0] * 14]


def test_tables() -> None:
    tokens, pages = torch.arange(200, dtype=torch.int32, device=DEVICE).view(5, 40), torch.arange(35, dtype=torch.int32).view(5, 7)
    spots = torch.tensor([[4, 0, 2, 2], [39, 0, 7, 6]], dtype=torch.int32, device=DEVICE)
    for ours, plain in zip(
        kv.inputs(tokens, pages.to(DEVICE), *spots, 6), PLAIN.step_inputs(tokens, pages.to(DEVICE), *spots, 6), strict=True
    ):
        assert torch.equal(ours, plain)
    other, ids = tokens.clone(), torch.tensor([800, -1, 0, 7], device=DEVICE)
    kv.append(tokens, *spots, ids)
    PLAIN.append_tokens(other, *spots, ids)
    assert torch.equal(tokens, other)


@pytest.mark.parametrize("heads, turned, normed", [((4, 2, 32), 16, False), ((20, 3, 80), 20, True), ((3, 3, 64), 32, True)])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rope_and_store(heads: tuple[int, int, int], turned: int, normed: bool, dtype: torch.dtype) -> None:
    num, num_kv, dim = heads
    projected = drawn(5, (num + 2 * num_kv) * dim, dtype=dtype)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in projected.split([num * dim, num_kv * dim, num_kv * dim], -1))
    table = drawn(40, 2 * turned)
    index = torch.tensor([3, 0, 7, 39, 12], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([9, 2, -1, 0, 30], dtype=torch.int32, device=DEVICE)
    a, b = (KVCache(*(torch.zeros(31, num_kv, dim, dtype=dtype, device=DEVICE) for _ in "kv")) for _ in "ab")
    norms = (drawn(dim, dtype=dtype), drawn(dim, dtype=dtype)) if normed else None
    nq, nk = (PLAIN.qk_norm(q, norms[0], 1e-5), PLAIN.qk_norm(k, norms[1], 1e-5)) if norms else (q, k)
    expected = PLAIN.qkv_rope_store(nq, nk, v, table, index, a, slots)
    close(kv.rope_store(q, k, v, b.k, b.v, table, index, slots, norms=norms, eps=1e-5), expected)
    close(b.k, a.k)
    assert torch.equal(b.v, a.v)
    kv.store(k, v, b.k, b.v, slots)
    PLAIN.store_kv(k, v, a, slots)
    assert torch.equal(b.k, a.k)


SKINNY = [  # rows, in, out, bias, residual, norm, gate, cut
    (1, 96, 40, True, True, True, "", None),
    (1, 100, 30, True, False, True, "gelu_tanh", skinny.Config(8, 64, 4)),
    (5, 96, 40, True, True, True, "", skinny.Config(32, 32, 4)),
    (17, 160, 70, True, True, False, "", skinny.Config(32, 32, 4, 1, 3)),
    (3, 128, 64, True, False, False, "silu", skinny.Config(32, 32, 4, 1, 2)),
    (3, 128, 64, False, False, True, "gelu", skinny.Config(32, 64, 4)),
    (2, 72, 64, False, False, False, "relu", None),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", SKINNY, ids=str)
def test_skinny_products(case: tuple, dtype: torch.dtype) -> None:
    count, inner, outputs, biased, added, normed, kind, config = case
    x, weight = drawn(count, inner, dtype=dtype), drawn(outputs * (2 if kind else 1), inner, dtype=dtype)
    bias = drawn(len(weight), dtype=dtype) if biased else None
    residual = drawn(count, outputs, dtype=dtype) if added else None
    norm = drawn(inner, dtype=dtype) if normed else None
    wide = x.double() if norm is None else PLAIN.rms_norm(x.float(), norm.float(), 1e-5).double()
    expected = PLAIN.linear(wide, weight.double(), None if bias is None else bias.double())
    expected = PLAIN.gated(expected, kind) if kind else expected
    expected = expected if residual is None else expected + residual.double()
    close(skinny.linear(x, weight, bias, residual=residual, norm=norm, eps=1e-5, gated=kind, config=config), expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 96, 72), (130, 64, 136), (33, 40, 16)], ids=str)
@pytest.mark.parametrize("kind, biased", [("silu", False), ("gelu_tanh", True)])
def test_gated_products(shape: tuple[int, int, int], kind: str, biased: bool, dtype: torch.dtype) -> None:
    """More rows, outputs and inner elements than a tile has, and fewer; neither a multiple of it."""
    count, inner, outputs = shape
    x, weight = drawn(count, inner, dtype=dtype), drawn(2 * outputs, inner, dtype=dtype) * 0.3
    bias = drawn(2 * outputs, dtype=dtype) if biased else None
    if GPU and not gate.fits(x, weight):
        pytest.skip("the copy engine takes half types")
    wide = PLAIN.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(gate.linear(x, weight, kind, bias, config=gate.Config(64, 64, 32, 4, 3)), PLAIN.gated(wide, kind))


def test_no_rows_are_no_gated_product() -> None:
    """A step of unfinished prompts alone: nothing can be described to the copy engine."""
    assert not gate.fits(drawn(0, 64, dtype=torch.bfloat16), drawn(32, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows(dtype: torch.dtype) -> None:
    x, weight, residual = drawn(5, 100, dtype=dtype), drawn(100, dtype=dtype), drawn(5, 100, dtype=dtype)
    close(rows.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x, weight, 1e-5))
    expected, total = PLAIN.add_rms_norm(x, residual, weight, 1e-5)
    close(rows.rms_norm(x, weight, 1e-5, residual), expected)
    assert torch.equal(residual, total)
    heads = drawn(6, 300, dtype=dtype)[:, 50 : 50 + 4 * 32].unflatten(-1, (4, 32))
    close(rows.rms_norm(heads, weight[:32], 1e-5), PLAIN.rms_norm(heads, weight[:32], 1e-5))
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        close(rows.gated(x, kind), PLAIN.gated(x.float(), kind))
    ids = torch.tensor([3, 4, 0], dtype=torch.int32, device=DEVICE)
    assert torch.equal(rows.embedding(ids, x), x[ids.long()])


@pytest.mark.parametrize("ties", [False, True])
def test_sampling_is_the_plain_bodys(ties: bool) -> None:
    torch.manual_seed(int(ties))
    logits = drawn(8, 300) * 3
    if ties:  # many equal logits, and tokens that must never be chosen
        logits = (logits * 2).round() / 2
        logits[:, ::3] = float("-inf")

    def column(*values: float) -> Tensor:
        return torch.tensor(values, device=DEVICE)

    heat = column(0, 1, 0.7, 1.3, 1, 1, 0.5, 2)
    top_k = column(0, 0, 5, 20, 1, 50, 0, 300).int()
    top_p, min_p = column(1, 1, 0.9, 1, 0.5, 0.8, 0.3, 0.95), column(0, 0, 0, 0.1, 0, 0.05, 0, 0.01)
    uniform = torch.rand(8, device=DEVICE)
    by = Choosing(heat, top_k, top_p, min_p)
    chosen = sampling.sample(logits, by, uniform)
    assert chosen.tolist() == PLAIN.sample(logits, by, uniform).tolist()
    logprob, rank = sampling.logprobs(logits, chosen)
    expected = PLAIN.logprobs(logits, chosen)
    close(logprob, expected[0])
    assert torch.equal(rank, expected[1])


def test_greedy_shows_broken_rows() -> None:
    logits = drawn(3, 5000)
    logits[1, 4500], logits[2] = float("nan"), float("-inf")
    assert sampling.greedy(logits).tolist() == [int(logits[0].argmax()), 4500, 0]
    assert sampling.greedy(logits, checked=True).tolist() == [int(logits[0].argmax()), -1, -1]
    ones = torch.ones(3, device=DEVICE)
    assert sampling.sample(logits, Choosing(ones, ones.int() * 9, ones, ones * 0), ones / 2, checked=True).tolist()[1:] == [-1, -1]


@pytest.mark.parametrize("prompts", [[40], [40, 50], [7, 130, 64]], ids=str)
def test_a_plan_lies_aligned(prompts: list[int]) -> None:
    """Whatever the number of tiles: memory that is aligned now and then would be another compiled form of the attention kernel."""
    counts = np.array(prompts, np.int32)
    plan = attention.make_plan(np.zeros_like(counts), counts, 4, 64, torch.device(DEVICE))
    assert plan.kv_starts.data_ptr() % 16 == 0 and plan.tiles.data_ptr() % 16 == 0
    assert plan.kv_starts.tolist() == [0, *np.cumsum(counts).tolist()]


@pytest.mark.gpu
def test_any_number_of_rows_is_one_compiled_form() -> None:
    """A step with another number of prompts than ever before must not wait for a compiler."""
    if not GPU:
        pytest.skip("nothing is compiled in the interpreter")
    weight, scale = drawn(96, 64, dtype=torch.bfloat16), drawn(64, dtype=torch.bfloat16)
    compiled = []
    for count in (33, 48, 64, 47):
        x = drawn(count, 64, dtype=torch.bfloat16)
        skinny.linear(x, weight, config=skinny.Config(32, 64, 4, 2))
        rows.rms_norm(x, scale, 1e-5)
        compiled.append((len(skinny._few_rows.compiled), len(rows._norm.compiled)))
    assert len(set(compiled)) == 1
