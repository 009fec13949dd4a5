"""The op table: every device operation the engine needs. The plain body of each op defines what it means.

A backend subclasses `Ops` and overrides the ops that it can do faster; the others still work. The default body of a fused op calls
the single ops. Knows tensors; nothing of models, requests or devices. Tokens are the first axis: x is [tokens, width] unless an op
says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from trireme.ops import kv_kinds
from trireme.ops.attention import AttentionKind, AttentionPlan, KVCache, StepLayout
from trireme.ops.choosing import Choosing, sample

Projection = Callable[[Tensor], Tensor]  # a linear layer, whatever its weights are stored as


class Ops:
    # --- moving and shaping -------------------------------------------------------------------------------------------------

    def copy(self, target: Tensor, source: Tensor) -> Tensor:
        """target[...] = source, across types and devices."""
        return target.copy_(source)

    def transpose(self, x: Tensor, a: int, b: int) -> Tensor:
        """x with two axes exchanged, as a contiguous tensor."""
        return x.transpose(a, b).contiguous()

    def convert(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in another type."""
        return x.to(dtype)

    def concat(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """The parts, one after the other."""
        return torch.cat(tuple(parts), dim)

    def select(self, x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
        """x[index] along an axis."""
        return x.index_select(dim, index.long())

    def split(self, x: Tensor, sizes: Sequence[int], dim: int = -1) -> tuple[Tensor, ...]:
        """x cut into pieces of these sizes; the pieces are views."""
        return x.split(list(sizes), dim)

    def slice(self, x: Tensor, dim: int, start: int, stop: int) -> Tensor:
        """x[start:stop] along an axis; a view."""
        return x.narrow(dim, start, stop - start)

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """x + bias, the bias over the last axis."""
        return x + bias

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b, broadcast."""
        return a * b

    # --- look-up and matrix products ------------------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """weight[ids]"""
        return F.embedding(ids.long(), weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x weightᵀ + bias.  weight: [out, in]"""
        return F.linear(x, weight, bias)

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x weightᵀ in float32. A backend may round to x's type first only if that saves much time:
        rounding can make different logits equal.

        weight: [vocabulary, in]
        """
        return self.linear(x, weight).float()

    def grouped_linear(self, x: Tensor, weights: Tensor, group_sizes: Tensor) -> Tensor:
        """Consecutive groups of rows of x, each times its own weights[g]ᵀ.  weights: [groups, out, in]"""
        parts = x.split([int(n) for n in group_sizes])
        return torch.cat([self.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])

    def lora_linear(self, x: Tensor, base: Projection, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """base(x) + scale * (x downᵀ) upᵀ"""
        return base(x) + scale * self.linear(self.linear(x, down), up)

    def quantize_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row as int8 with one scale: x ≈ q * scale.  scale: [tokens, 1] float32"""
        return kv_kinds.int8(x)

    def linear_int8(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (weight * scale)ᵀ + bias, the weights kept as int8.  weight: [out, in] int8; scale: [out] float32"""
        y = self.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)
        return y if bias is None else y + bias

    # --- norms ----------------------------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight, over the last axis, computed in float32."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias, over the last axis, computed in float32."""
        wide = F.layer_norm(x.float(), (x.shape[-1],), weight.float(), None if bias is None else bias.float(), eps)
        return wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). The residual's memory may be reused for the sum."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """(layer_norm(x + residual), x + residual). The residual's memory may be reused for the sum."""
        residual = x + residual
        return self.layer_norm(residual, weight, bias, eps), residual

    def qk_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm over each head.  x: [tokens, heads, head_dim]"""
        return self.rms_norm(x, weight, eps)

    # --- activations ----------------------------------------------------------------------------------------------------------

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """silu, gelu, gelu_tanh or relu."""
        if kind == "silu":
            return F.silu(x)
        if kind == "relu":
            return F.relu(x)
        return F.gelu(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[kind])

    def gated(self, gate_up: Tensor, kind: str) -> Tensor:
        """activation(gate) * up.  gate_up: [tokens, 2 * width], the gate first"""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate, kind) * up

    def softmax(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """softmax(x * scale + mask) over the last axis, computed in float32."""
        wide = x.float() * scale
        return torch.softmax(wide if mask is None else wide + mask, -1).to(x.dtype)

    # --- attention ------------------------------------------------------------------------------------------------------------

    def rope(self, x: Tensor, table: Tensor, index: Tensor) -> Tensor:
        """Turns the first 2r values of each head, as pairs (i, i + r), by the angles of table[index].

        x: [tokens, heads, head_dim]; table: [positions, 2r] float32, cosines then sines; index: [tokens]
        """
        cos, sin = table[index.long()].unsqueeze(1).chunk(2, -1)
        r = cos.shape[-1]
        a, b, rest = x[..., :r].float(), x[..., r : 2 * r].float(), x[..., 2 * r :]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def rope_interleaved(self, x: Tensor, table: Tensor, index: Tensor) -> Tensor:
        """As rope, on pairs (2i, 2i + 1)."""
        cos, sin = table[index.long()].unsqueeze(1).chunk(2, -1)
        r = cos.shape[-1]
        a, b = x[..., : 2 * r : 2].float(), x[..., 1 : 2 * r : 2].float()
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
        return torch.cat([turned, x[..., 2 * r :]], -1)

    def store_kv(self, k: Tensor, v: Tensor, cache: KVCache, slots: Tensor) -> None:
        """cache[slots[i]] = (k[i], v[i]).  k, v: [tokens, kv_heads, head_dim]; a slot below 0 is skipped

        Keys and values are kept as `kv_kinds` says of the cache's kind. If values are parts of keys, v is ignored.
        """
        live = slots >= 0
        if not bool(live.all()):
            k, v, slots = k[live], v[live], slots[live]
        cache.put(k, v, slots.long())

    def plan_attention(self, layout: StepLayout) -> AttentionPlan:
        """Computes what `attention` needs to know of a step, once for all layers."""
        return [(layout.slots(i), int(n)) for i, n in enumerate(layout.counts)]

    def attention(self, q: Tensor, cache: KVCache, plan: AttentionPlan, kind: AttentionKind) -> Tensor:
        """Causal attention of each sequence's new tokens over its cached tokens. With a window, only the last tokens are read.

        q: [tokens, heads, numbers of a key]; result: [tokens, heads, numbers of a value]
        """
        out, begin = q.new_empty((*q.shape[:2], cache.value_dim or cache.v.shape[-1])), 0
        for slots, n in plan:
            first = kind.first_seen(len(slots) - n) if n else 0
            out[begin : begin + n] = _attend(q[begin : begin + n], *cache.at(slots[first:]), kind, first)
            begin += n
        out[begin:] = 0  # padding rows of a captured step
        return out

    def qkv_rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, index: Tensor, cache: KVCache, slots: Tensor
    ) -> Tensor:
        """Turns q and k, stores k and v, returns q.  q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]"""
        self.store_kv(self.rope(k, table, index), v, cache, slots)
        return self.rope(q, table, index)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        """gated(linear(x)): activation(gate) * up of a product.  weight: [2 * width, in], the gate's rows first"""
        return self.gated(self.linear(x, weight, bias), kind)

    # --- the tables of running requests ---------------------------------------------------------------------------------------

    def step_inputs(self, tokens: Tensor, pages: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """(id, slot) of each token of a step: the token id at its row and position, and the slot for the KV of that position.

        tokens: [all rows, length] int32; pages: [all rows, pages] int32; rows, positions: [step's tokens] int32
        """
        row, position = rows.long(), positions.long()
        return tokens[row, position], pages[row, position // page_size] * page_size + positions % page_size

    def settle(self, lengths: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Corrects a step in place when its sequences are shorter than the host assumed while planning it. All tensors are int32.

        lengths: [slots], the real length of each sequence, by its state slot.
        Read from `columns`: `ends` [seqs], the planned length of each sequence after this step. `said` [seqs], the real length
        after this step if the host knows it; if it is negative, the real length is lengths[states_from]. `query_starts` [seqs + 1].
        `pick_sequences`, the sequence of each token to choose; below 0 for padding.
        Written to `columns`: `lengths` for each sequence; `positions` and `reach` for each token; `pick_positions`, the position of
        each token to choose.
        """
        starts, ends, reach = columns["query_starts"], columns["ends"], columns["reach"]
        known = torch.where(columns["said"] >= 0, columns["said"], lengths[columns["states_from"].clamp_min(0).long()])
        token = torch.arange(len(reach), device=reach.device, dtype=torch.int32)
        sequence = torch.searchsorted(starts[1:], token, right=True).clamp_max(len(ends) - 1)
        live = token < starts[-1:]
        position = known[sequence] - starts[sequence + 1] + token
        columns["lengths"].copy_(known)
        columns["positions"].copy_(torch.where(live, position, 0))
        reach.copy_(torch.where(live & (known < ends)[sequence], position + 1, reach))
        picks = columns["pick_sequences"]
        columns["pick_positions"].copy_(torch.where(picks >= 0, known[picks.clamp_min(0).long()], 0))

    def append_tokens(self, tokens: Tensor, rows: Tensor, positions: Tensor, ids: Tensor) -> None:
        """tokens[rows[i], positions[i]] = ids[i]; 0 for an id below 0."""
        tokens[rows.long(), positions.long()] = ids.clamp_min(0).to(torch.int32)

    # --- choosing tokens ------------------------------------------------------------------------------------------------------

    def mask_logits(self, logits: Tensor, allowed: Tensor) -> Tensor:
        """logits where allowed, -inf elsewhere.  allowed: bool, same shape"""
        return logits.masked_fill(~allowed, float("-inf"))

    def sample_greedy(self, logits: Tensor) -> Tensor:
        """The most likely token of each row; of equally likely tokens the one with the lowest id."""
        return logits.argmax(-1)

    def sample(self, logits: Tensor, by: Choosing, uniform: Tensor) -> Tensor:
        """One token per row, drawn as `choosing.sample` defines; the most likely one if the temperature is 0."""
        return torch.where(by.temperature == 0, self.sample_greedy(logits), sample(logits, by, uniform))

    def uniforms(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """[0, 1) from (seed, position): two rounds of the splitmix64 finaliser, the top 24 bits.  seeds: 64 bits as int64"""
        x = seeds + (positions.long() + 1) * _GOLDEN  # whole numbers of 64 bits wrap around
        for _ in range(2):
            x = (x ^ _shifted(x, 30)) * _FIRST
            x = (x ^ _shifted(x, 27)) * _SECOND
            x = x ^ _shifted(x, 31)
        return (_shifted(x, 40).double() / (1 << 24)).float()

    def choose_greedy(self, logits: Tensor) -> Tensor:
        """As sample_greedy, and -1 for a row whose largest logit is not a finite number."""
        ids = self.sample_greedy(logits).long()
        return torch.where(logits.gather(1, ids.unsqueeze(1)).squeeze(1).isfinite(), ids, -1)

    def choose(self, logits: Tensor, by: Choosing, uniform: Tensor) -> Tensor:
        """As sample, and -1 for a row whose largest logit is not a finite number."""
        ids = self.sample(logits, by, uniform).long()
        return torch.where(logits.amax(-1).isfinite(), ids, -1)

    def logprobs(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability, rank from 1) of ids[i] in row i: the negative of the usual loss."""
        wide = torch.log_softmax(logits.float(), -1)
        chosen = wide.gather(1, ids.long().unsqueeze(1))
        return chosen.squeeze(1), (wide > chosen).sum(-1) + 1


_GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits, treating x as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, kind: AttentionKind, first: int) -> Tensor:
    """softmax(mask(q kᵀ * scale)) v for one sequence, in float32.

    q: [n, heads, d]; k, v: [length, kv_heads, d], of the tokens from position `first` on
    """
    n, length = q.shape[0], k.shape[0]
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * kind.scale
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    distance = torch.arange(length, device=q.device)[None] - torch.arange(length - n, length, device=q.device)[:, None]
    if kind.slopes is not None:
        scores = scores + kind.slopes.float()[:, None, None] * distance
    hidden = distance > 0
    if kind.chunked:
        position = torch.arange(first, first + length, device=q.device)
        hidden = hidden | (position < position[-n:, None] // kind.window * kind.window)
    elif kind.window:
        hidden = hidden | (distance <= -kind.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if kind.sinks is not None:
        scores = torch.cat([scores, kind.sinks.float()[:, None, None].expand(-1, n, 1)], -1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1)[..., :length], v).to(q.dtype)
