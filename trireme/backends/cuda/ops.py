"""The op table on a GPU: each op chooses between the kernels of `trireme.kernels`, torch's kernels, and the plain body.

Knows shapes and kernels; nothing of models. A shape no kernel covers falls through to the plain body.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trireme.backends.cuda import device as gpu
from trireme.kernels.steps import attention, decode, gate, in_bits, kv, rows, sampling, skinny
from trireme.ops import AttentionKind, AttentionPlan, Choosing, KVCache, Ops, StepLayout

HALVES = (torch.bfloat16, torch.float16)
# cuDNN's attention is the fastest for whole prompts, but prepares itself anew for each length: only for lengths that come often,
# which are the full chunks of long prompts.
LEAST_EVEN, EVEN_UNIT = 1024, 256
LEAST_WIDTH = 2048  # of all heads: below it the library's cost on the host is longer than the layer (H200: half a millisecond)


@dataclass
class Plan:
    """A step's layout, and the launch plans made from it. The first layer of each kind makes its plan; the others reuse it."""

    layout: StepLayout
    prompts: bool = False  # whether any sequence has several new tokens
    decodes: bool = False  # whether any sequence has exactly one new token
    num_tokens: int = 0
    even: int = 0  # the length of every sequence, where all are prompts from their beginning and of one library-friendly length
    spans: dict[tuple[int, ...], decode.DecodePlan] = field(default_factory=dict)
    tiles: dict[tuple[int, ...], attention.PromptPlan] = field(default_factory=dict)

    def spans_for(self, q: Tensor, cache: KVCache, window: int) -> tuple[decode.DecodePlan, bool]:
        """(spans, known): `known` says whether they were listed before this call, by an earlier kernel than the previous one."""
        kv_heads, fewer_bits = cache.k.shape[1], cache.k.element_size() == 1
        key = (q.shape[1], kv_heads, q.shape[2], window, fewer_bits)
        known = key in self.spans
        if not known:
            layout = self.layout
            self.spans[key] = decode.make_plan(
                len(layout.counts), q.shape[1], kv_heads, q.shape[2], q.device, fewer_bits=fewer_bits
            )  # fmt: skip
            decode.plan(self.spans[key], layout.query_starts, layout.context_lengths, window)
        return self.spans[key], known

    def tiles_for(self, q: Tensor, kv_heads: int) -> attention.PromptPlan:
        key, layout = (q.shape[1] // kv_heads, q.shape[2]), self.layout
        if key not in self.tiles:
            shape = None if q.dtype in HALVES else attention.WIDE
            if layout.replayed:
                self.tiles[key] = attention.plan_on_device(layout.query_starts, len(q), *key, shape=shape)
            else:
                self.tiles[key] = attention.make_plan(layout.starts, layout.counts, *key, q.device, shape=shape)
        return self.tiles[key]


class CudaOps(Ops):
    def __init__(self, pdl: bool = False):
        self.pdl = pdl  # kernels start before those they depend on have ended, and wait where they must

    # --- look-up and products -------------------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return rows.embedding(ids, weight)

    def select(self, x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
        if dim or x.dim() != 2 or not x.is_contiguous() or not len(index):
            return super().select(x, index, dim)
        return rows.embedding(index, x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _skinny(x, weight) and skinny.pays(x.shape[0], weight.shape[0], weight.shape[1]):
            return skinny.linear(x, weight, bias, pdl=self.pdl)
        return super().linear(x, weight, bias)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """As the products are summed up: in bf16 logits above 16 are 0.125 apart, and the best two are often equal."""
        if _skinny(x, weight) and skinny.pays(x.shape[0], weight.shape[0], weight.shape[1]):
            return skinny.linear(x, weight, pdl=self.pdl, dtype=torch.float32)
        if x.dtype in HALVES and x.shape[0] and gpu.sums_stay_wide(x.device):
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return super().logits(x, weight)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        if _skinny(x, weight) and skinny.pays(x.shape[0], weight.shape[0], weight.shape[1]):
            return skinny.linear(x, weight, bias, gated=kind, pdl=self.pdl)
        if gate.fits(x, weight) and gate.pays(x.shape[0], weight.shape[0] // 2, weight.shape[1]):
            return gate.linear(x, weight, kind, bias, pdl=self.pdl)
        return super().gated_linear(x, weight, bias, kind)

    # --- rows -----------------------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() not in (2, 3) or x.stride(-1) != 1:
            return super().rms_norm(x, weight, eps)
        return rows.rms_norm(x, weight, eps, pdl=self.pdl)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dim() != 2 or x.stride(-1) != 1 or not residual.is_contiguous() or residual.dtype != x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        return rows.rms_norm(x, weight, eps, residual, pdl=self.pdl), residual

    def gated(self, gate_up: Tensor, kind: str) -> Tensor:
        if gate_up.dim() != 2 or gate_up.stride(-1) != 1:
            return super().gated(gate_up, kind)
        return rows.gated(gate_up, kind, pdl=self.pdl)

    # --- attention ------------------------------------------------------------------------------------------------------------

    def store_kv(self, k: Tensor, v: Tensor, cache: KVCache, slots: Tensor) -> None:
        if not cache.is_alike:
            return super().store_kv(k, v, cache, slots)
        kv.store(_side_by_side(k), _side_by_side(v), cache.k, cache.v, slots, cache.scales or cache.factors, _given(cache))

    def qkv_rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor, cache: KVCache, slots: Tensor
    ) -> Tensor:
        if not cache.is_alike:
            return super().qkv_rope_store(q, k, v, table, index, cache, slots)
        q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
        scales = cache.scales or cache.factors
        return kv.rope_store(
            q, k, v, cache.k, cache.v, table, index, slots, scales=scales, given=_given(cache), pdl=self.pdl
        )  # fmt: skip

    def plan_attention(self, layout: StepLayout) -> AttentionPlan:
        counts = layout.counts
        if layout.replayed:  # the next replay may have any mix of prompts and single tokens
            return Plan(layout, True, True)
        even = int(counts[0]) if not layout.starts.any() and (counts == counts[0]).all() else 0
        even = even if even >= LEAST_EVEN and even % EVEN_UNIT == 0 else 0
        return Plan(layout, bool((counts > 1).any()), bool((counts == 1).any()), int(counts.sum()), even)

    def attention(self, q: Tensor, cache: KVCache, plan: AttentionPlan, kind: AttentionKind) -> Tensor:
        if not cache.is_alike:
            return super().attention(q, cache, super().plan_attention(plan.layout), kind)
        q, kv_heads, layout = _side_by_side(q), cache.k.shape[1], plan.layout
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not layout.replayed and plan.num_tokens < len(q):
            out[plan.num_tokens :] = 0  # padding rows
        slopes, sinks = (None if x is None else x.to(q.device, torch.float32) for x in (kind.slopes, kind.sinks))
        where = (layout.page_table, layout.rows_device, layout.query_starts, layout.context_lengths)
        scales = cache.scales or cache.factors
        if plan.prompts:
            tiles = plan.tiles_for(q, kv_heads)
            k, v, still = (cache.k, cache.v, scales) if not tiles.dense else _collected(q, cache, layout, tiles)
            if tiles.dense and plan.even and k.dtype == q.dtype and _is_for_library(q, kind):
                return gpu.causal_attention(q, k, v, plan.even, kind.scale)
            attention.attend(
                q, k, v, out, *where, tiles, page_size=layout.page_size, scale=kind.scale, window=kind.window,
                softcap=kind.softcap, slopes=slopes, sinks=sinks, scales=still, dense=tiles.dense,
            )  # fmt: skip
        if plan.decodes:
            spans, known = plan.spans_for(q, cache, kind.window)
            decode.attend(
                q, cache.k, cache.v, out, *where, spans, page_size=layout.page_size, scale=kind.scale, window=kind.window,
                softcap=kind.softcap, slopes=slopes, sinks=sinks, scales=scales, pdl=self.pdl and known,
            )  # fmt: skip
        return out

    # --- the tables of running requests ---------------------------------------------------------------------------------------

    def step_inputs(self, tokens: Tensor, pages: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        return kv.inputs(tokens, pages, rows, positions, page_size)

    def append_tokens(self, tokens: Tensor, rows: Tensor, positions: Tensor, ids: Tensor) -> None:
        kv.append(tokens, rows, positions, ids, pdl=self.pdl)

    # --- choosing tokens ------------------------------------------------------------------------------------------------------

    def choose_greedy(self, logits: Tensor) -> Tensor:
        return sampling.greedy(_dense_rows(logits), checked=True, pdl=self.pdl)

    def choose(self, logits: Tensor, by: Choosing, uniform: Tensor) -> Tensor:
        if by._fields != sampling.COLUMNS:
            return super().choose(logits, by, uniform)
        return sampling.sample(_dense_rows(logits), by, uniform, checked=True, pdl=self.pdl)

    def sample_greedy(self, logits: Tensor) -> Tensor:
        return sampling.greedy(_dense_rows(logits), pdl=self.pdl)

    def sample(self, logits: Tensor, by: Choosing, uniform: Tensor) -> Tensor:
        if by._fields != sampling.COLUMNS:
            return super().sample(logits, by, uniform)
        return sampling.sample(_dense_rows(logits), by, uniform, pdl=self.pdl)

    def logprobs(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return sampling.logprobs(_dense_rows(logits), ids)


def _skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels for few rows support this product."""
    few = x.dim() == 2 and 0 < x.shape[0] <= skinny.MAX_ROWS
    return few and x.dtype in HALVES and x.stride(1) == 1 and weight.dtype == x.dtype and weight.is_contiguous()


def _collected(
    q: Tensor, cache: KVCache, layout: StepLayout, tiles: attention.PromptPlan
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """A step's keys and values, one sequence after the other, and what still scales them."""
    where = (cache.k, cache.v, layout.page_table, layout.rows_device)
    if cache.scales:
        return *in_bits.unpack(*where, cache.scales, tiles.kv_starts, tiles.longest, layout.page_size, q, tiles.kv_total), None
    return *attention.collect(*where, tiles, layout.page_size), cache.factors


def _given(cache: KVCache) -> tuple[Tensor, Tensor] | None:
    """The scales that int8 takes instead of its own."""
    return cache.factors if cache.kind == "int8" else None


def _is_for_library(q: Tensor, kind: AttentionKind) -> bool:
    """Whether the library's attention does this kind, and is worth its cost on the host."""
    plain = not (kind.window or kind.softcap or kind.slopes is not None or kind.sinks is not None)
    return plain and q.dtype in HALVES and q.shape[1] * q.shape[2] >= LEAST_WIDTH


def _side_by_side(x: Tensor) -> Tensor:
    """x: [tokens, heads, dim] with a token's heads one after the other; copied only where they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _dense_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
