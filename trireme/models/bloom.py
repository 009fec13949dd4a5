"""BLOOM: ALiBi in the place of rope, layer norms, biases everywhere, and q, k, v of each head side by side in one matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from trireme.layers import MLP, Batch, Embedding, Env, Head, Heads, LayerNorm, Linear, Module, Rows, alibi_slopes, run_blocks
from trireme.models.config import MAX_LAYERS, ModelConfig, number
from trireme.models.registry import register
from trireme.models.strays import OTHER_HEADS, LeavesOut
from trireme.ops import AttentionKind, CacheSpec


class Attention(Module):
    def __init__(self, env: Env, cfg: ModelConfig, layer: int):
        heads = cfg.heads
        self.env, self.layer, self.dim = env, layer, heads.dim
        mine, _ = env.tp.heads(heads.num, heads.num_kv)
        self.num_heads = mine.stop - mine.start
        rows = np.arange(3 * cfg.hidden).reshape(heads.num, 3, heads.dim)[mine]
        qkv = [Rows("query_key_value", 3 * cfg.hidden, rows[:, i].ravel()) for i in range(3)]
        self.qkv = env.new(Linear, cfg.hidden, qkv, cut="out", bias=True)
        columns = slice(mine.start * heads.dim, mine.stop * heads.dim)
        self.out = env.new(Linear, cfg.hidden, {"dense": cfg.hidden}, cut="in", bias=True, columns=columns)
        self.kind = AttentionKind(scale=heads.dim**-0.5, slopes=alibi_slopes(heads.num)[mine].to(env.device))

    def cache_specs(self) -> dict[int, CacheSpec]:
        shape = self.num_heads, self.dim
        return {self.layer: CacheSpec(shape, shape)}

    def __call__(self, x: Tensor, batch: Batch, only: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv.split(x))
        cache = batch.caches[self.layer]
        view = batch.views[cache.band]
        self.env.ops.store_kv(k, v, cache, view.slots)
        mixed = self.env.ops.attention(q, cache, view.plan, self.kind).flatten(1)
        return self.out(self.env.keep(mixed, only))


class Block(Module):
    def __init__(self, env: Env, cfg: ModelConfig, layer: int):
        self.env = env
        self.input_layernorm = env.new(LayerNorm, cfg.hidden, cfg.eps)
        self.self_attention = env.new(Attention, cfg, layer)
        self.post_attention_layernorm = env.new(LayerNorm, cfg.hidden, cfg.eps)
        self.mlp = env.new(MLP, cfg.hidden, cfg.inner, ("dense_h_to_4h", "dense_4h_to_h"), cfg.activation)
        self.residual_after_norm = bool(cfg.raw.get("apply_residual_connection_post_layernorm"))

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Batch, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        residual = x if self.residual_after_norm else residual
        x, residual = self.self_attention(x, batch, only), self.env.keep(residual, only)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), x if self.residual_after_norm else residual


class Decoder(Module):
    def __init__(self, env: Env, cfg: ModelConfig):
        self.env = env
        self.word_embeddings = env.new(Embedding, cfg.vocab, cfg.hidden)
        self.word_embeddings_layernorm = env.new(LayerNorm, cfg.hidden, cfg.eps)
        self.h = [env.new(Block, cfg, i) for i in range(cfg.num_layers)]
        self.ln_f = env.new(LayerNorm, cfg.hidden, cfg.eps)

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states of the tokens that need logits."""
        x, _ = self.word_embeddings_layernorm(self.word_embeddings(batch.tokens))
        return self.ln_f(*run_blocks(self.env, self.h, x, batch))[0]


@register("BloomForCausalLM")
class Bloom(Module):
    shares_prefixes = True
    reads = frozenset({"apply_residual_connection_post_layernorm", "alibi"})

    def __init__(self, env: Env, cfg: ModelConfig):
        self.transformer = env.new(Decoder, cfg)
        self.lm_head = env.new(Head, cfg.vocab, cfg.hidden, self.transformer.word_embeddings if cfg.tied else None)

    @staticmethod
    def config(raw: dict[str, Any]) -> ModelConfig:
        raw = {
            "hidden_size": raw.get("n_embed"),
            "n_layer": raw.get("num_hidden_layers"),
            "n_head": raw.get("num_attention_heads"),
        } | raw
        hidden, num_heads = number(raw, "hidden_size"), number(raw, "n_head")
        return ModelConfig(
            hidden=hidden,
            num_layers=number(raw, "n_layer", MAX_LAYERS),
            heads=Heads(num_heads, num_heads, hidden // num_heads),
            inner=4 * hidden,
            vocab=number(raw, "vocab_size"),
            eps=float(raw.get("layer_norm_epsilon", 1e-5)),
            max_positions=number({"seq_length": 2048} | raw, "seq_length"),
            tied=bool(raw.get("tie_word_embeddings", True)),
            activation="gelu_tanh",
            raw=raw,
        )

    @staticmethod
    def leaves_out(raw: dict[str, Any]) -> LeavesOut:
        return OTHER_HEADS

    def __call__(self, batch: Batch) -> Tensor:
        """Logits of the tokens that need them."""
        return self.lm_head(self.transformer(batch))
