"""The plain bodies against independent formulas: loops, complex numbers, torch's own functions. Knows no backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from trireme.ops import AttentionKind, Choosing, Ops
from trireme.ops.cases import Draw
from trireme.ops.choosing import pick

OPS = Ops()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def test_norms_are_torchs_own() -> None:
    x, residual, weight, bias = normal(5, 24), normal(5, 24, seed=1), normal(24, seed=2), normal(24, seed=3)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), F.rms_norm(x, (24,), weight, 1e-5))
    torch.testing.assert_close(OPS.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (24,), weight, bias, 1e-5))
    normed, total = OPS.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, (24,), weight, 1e-5))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("r", [8, 5])
def test_rope_is_a_complex_rotation(interleaved: bool, r: int) -> None:
    x, positions = normal(6, 3, 16).double(), torch.tensor([0, 1, 5, 2, 9, 9])
    angles = torch.outer(torch.arange(10).double(), torch.rand(r, generator=torch.Generator().manual_seed(4)).double())
    table = torch.cat([angles.cos(), angles.sin()], -1).float()
    turned = (OPS.rope_interleaved if interleaved else OPS.rope)(x, table, positions)
    a, b = (x[..., : 2 * r : 2], x[..., 1 : 2 * r : 2]) if interleaved else (x[..., :r], x[..., r : 2 * r])
    z = torch.complex(a, b) * torch.polar(torch.ones(6, 1, r).double(), angles[positions].unsqueeze(1))
    pairs = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    torch.testing.assert_close(turned[..., : 2 * r], pairs, atol=1e-6, rtol=1e-6)
    assert torch.equal(turned[..., 2 * r :], x[..., 2 * r :])


def _attention_by_hand(q: Tensor, k: Tensor, v: Tensor, start: int, kind: AttentionKind) -> Tensor:
    """One query, one head, one key at a time, in Python's own doubles."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = start + i
        first = max(0, position - kind.window + 1) if kind.window else 0
        for head in range(q.shape[1]):
            scores = []
            for j in range(first, position + 1):
                score = float(q[i, head].double() @ k[j, head // group].double()) * kind.scale
                if kind.softcap:
                    score = kind.softcap * math.tanh(score / kind.softcap)
                if kind.slopes is not None:
                    score -= float(kind.slopes[head]) * (position - j)
                scores.append(score)
            top = max(scores)
            sink = 0.0 if kind.sinks is None else math.exp(float(kind.sinks[head]) - top)
            weights = [math.exp(score - top) for score in scores]
            for j, weight in zip(range(first, position + 1), weights, strict=True):
                out[i, head] += weight / (sum(weights) + sink) * v[j, head // group].double()
    return out


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "alibi", "sinks", "all"])
def test_attention_by_hand(page_size: int, kind: str) -> None:
    chosen = AttentionKind(
        0.3,
        window=5 if kind in ("window", "all") else 0,
        softcap=2.0 if kind in ("softcap", "all") else 0.0,
        slopes=torch.tensor([0.5, 0.25, 0.1, 0.7]) if kind in ("alibi", "all") else None,
        sinks=torch.tensor([-1.0, 0.5, 3.0, 0.0]) if kind in ("sinks", "all") else None,
    )
    draw, sequences = Draw(5, torch.float32), [(0, 7), (11, 1), (4, 5)]
    layout = draw.layout(sequences, page_size)
    cache = draw.cache(draw.num_slots(layout), 2, 8, OPS)
    q = draw.normal(13, 4, 8, scale=2.0)
    found, begin = OPS.attention(q, cache, OPS.plan_attention(layout), chosen), 0
    for i, (start, count) in enumerate(sequences):
        pages = layout.page_table[int(layout.rows[i])]
        slots = [int(pages[p // page_size]) * page_size + p % page_size for p in range(start + count)]
        exact = _attention_by_hand(q[begin : begin + count], cache.k[slots], cache.v[slots], start, chosen)
        torch.testing.assert_close(found[begin : begin + count].double(), exact, atol=1e-5, rtol=1e-5)
        begin += count


def test_quantize_int8_is_within_half_a_step() -> None:
    x = normal(9, 40) * torch.logspace(-6, 6, 9).unsqueeze(1)
    q, scale = OPS.quantize_int8(x)
    assert q.dtype == torch.int8 and int(q.abs().max()) == 127
    assert bool(((q * scale - x).abs() <= 0.5001 * scale).all())


# --- sampling, against one row of plain Python ------------------------------------------------------------------------------------


def sample_by_hand(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """The op's docstring, one row at a time, without tensors."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return order[0]
    kept = order[:top_k] if top_k > 0 else order
    top = logits[order[0]]
    weights = {i: math.exp((logits[i] - top) / temperature) for i in kept}
    total = sum(weights.values())
    chosen, before = {}, 0.0
    for i in kept:
        p = weights[i] / total
        if not chosen or (before < top_p and p >= min_p * weights[order[0]] / total):
            chosen[i] = p
        before += p
    target, passed = uniform * sum(chosen.values()), 0.0
    for i in sorted(chosen):
        passed += chosen[i]
        if passed > target:
            return i
    return max(chosen)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.25, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 59, 1000]),
    top_p=st.sampled_from([0.0, 0.3, 0.85, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
def test_sample_is_its_docstring(seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    rows = 6
    logits = 2 * normal(rows, vocab, seed=seed)
    uniform = torch.rand(rows, generator=torch.Generator().manual_seed(seed + 1))
    column = (torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p))
    found = OPS.sample(logits, Choosing(*column), uniform).tolist()
    expected = [
        sample_by_hand(row, temperature, top_k, top_p, min_p, u)
        for row, u in zip(logits.double().tolist(), uniform.double().tolist(), strict=True)
    ]
    assert found == expected


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.15), (8, 0.9, 0.05)])
def test_sampled_shares_are_the_probabilities(top_k: int, top_p: float, min_p: float) -> None:
    """Evenly spread random numbers give every token its share, to within one draw."""
    draws, vocab = 4000, 20
    logits = 1.5 * normal(1, vocab, seed=8)
    uniform = (torch.arange(draws) + 0.5) / draws
    column = (torch.ones(draws), torch.full((draws,), top_k), torch.full((draws,), top_p), torch.full((draws,), min_p))
    ids = OPS.sample(logits.expand(draws, vocab), Choosing(*column), uniform)
    shares = np.bincount(ids.numpy(), minlength=vocab) / draws
    p = torch.softmax(logits[0].double(), 0)
    ranked = p.argsort(descending=True)
    keep = torch.zeros(vocab, dtype=torch.bool)
    keep[ranked[: top_k or vocab]] = True
    kept = torch.where(keep, p, 0.0) / p[keep].sum()
    before = kept[ranked].cumsum(0) - kept[ranked]
    allowed = torch.zeros(vocab, dtype=torch.bool)
    allowed[ranked] = (before < top_p) & (kept[ranked] >= min_p * kept.max()) & keep[ranked]
    exact = torch.where(allowed, kept, 0.0) / kept[allowed].sum()
    assert np.abs(shares - exact.numpy()).max() <= 1.5 / draws
    assert set(np.flatnonzero(shares)) == set(torch.nonzero(allowed).flatten().tolist())


def test_pick_never_takes_weight_nothing() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).double().expand(4, 5)
    assert pick(weights, torch.tensor([0.0, 0.2999, 0.3001, 1.0])).tolist() == [1, 1, 3, 3]


def test_logprobs_and_rank() -> None:
    logits, ids = normal(7, 33), torch.arange(7)
    logprob, rank = OPS.logprobs(logits, ids)
    torch.testing.assert_close(logprob, -F.cross_entropy(logits, ids, reduction="none"))
    for i in range(7):
        assert int(rank[i]) == sorted(logits[i].tolist(), reverse=True).index(float(logits[i, i])) + 1
