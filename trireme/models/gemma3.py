"""Gemma 3: norms around both halves of a block, normed heads, windowed layers with a rope of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from trireme.layers import (
    Attention,
    Batch,
    Embedding,
    Env,
    GatedMLP,
    Head,
    HeadNormSpec,
    Module,
    Projections,
    RMSNorm,
    Rope,
    run_blocks,
)
from trireme.models.config import READ, ModelConfig, read_config, rope_settings, windows
from trireme.models.registry import register
from trireme.models.strays import OTHER_HEADS, TOWERS, LeavesOut

# Defaults of settings that a config leaves out
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_NORM_OFFSET = 1.0  # Gemma's checkpoints store norm weights less one


class Block(Module):
    def __init__(self, env: Env, cfg: ModelConfig, layer: int, rope: Rope):
        def norm() -> RMSNorm:
            return env.new(RMSNorm, cfg.hidden, cfg.eps, _NORM_OFFSET)

        self.env = env
        bias = bool(cfg.raw.get("attention_bias"))
        self.input_layernorm = norm()
        self.self_attn = env.new(
            Attention,
            cfg.hidden,
            cfg.heads,
            layer,
            rope,
            scale=1.0 / math.sqrt(cfg.raw.get("query_pre_attn_scalar", cfg.heads.dim)),
            window=cfg.window(layer),
            projections=Projections(bias, bias, HeadNormSpec(cfg.eps, _NORM_OFFSET)),
        )
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = env.new(GatedMLP, cfg.hidden, cfg.inner, cfg.activation)
        self.post_feedforward_layernorm = norm()

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Batch, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, _ = self.post_attention_layernorm(self.self_attn(x, batch, only))
        x, residual = self.pre_feedforward_layernorm(x, self.env.keep(residual, only))
        x, _ = self.post_feedforward_layernorm(self.mlp(x))
        return x, residual


class Decoder(Module):
    def __init__(self, env: Env, cfg: ModelConfig):
        self.env, self.scale = env, cfg.hidden**0.5
        local = rope_settings(cfg.raw, "sliding_attention") if cfg.raw.get("rope_parameters") else _local_rope(cfg.raw)
        self.rope = Rope(env, cfg.heads.dim, cfg.rope, cfg.max_positions)
        local_rope = Rope(env, cfg.heads.dim, local, cfg.max_positions)
        self.embed_tokens = env.new(Embedding, cfg.vocab, cfg.hidden)
        self.layers = [env.new(Block, cfg, i, local_rope if cfg.window(i) else self.rope) for i in range(cfg.num_layers)]
        self.norm = env.new(RMSNorm, cfg.hidden, cfg.eps, _NORM_OFFSET)

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states of the tokens that need logits."""
        x = self.embed_tokens(batch.tokens) * self.scale
        return self.norm(*run_blocks(self.env, self.layers, x, batch))[0]


@register("Gemma3ForCausalLM")
class Gemma3(Module):
    reads = READ | {
        "attention_bias",
        "query_pre_attn_scalar",
        "rope_local_base_freq",
        "rope_parameters.sliding_attention",
        "_sliding_window_pattern",
    }

    def __init__(self, env: Env, cfg: ModelConfig):
        self.model = env.new(Decoder, cfg)
        self.lm_head = env.new(Head, cfg.vocab, cfg.hidden, self.model.embed_tokens if cfg.tied else None)
        self.shares_prefixes = not self.model.rope.length_dependent

    @staticmethod
    def config(raw: dict[str, Any]) -> ModelConfig:
        raw = _DEFAULTS | raw | {"hidden_act": raw.get("hidden_activation") or "gelu_pytorch_tanh"}
        if not raw.get("layer_types"):
            pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
            raw |= {"sliding_window_pattern": pattern}
        cfg = read_config(raw)
        return replace(cfg, windows=windows(raw, cfg.num_layers))

    @staticmethod
    def leaves_out(raw: dict[str, Any]) -> LeavesOut:
        return OTHER_HEADS | TOWERS

    def __call__(self, batch: Batch) -> Tensor:
        """Logits of the tokens that need them."""
        return self.lm_head(self.model(batch))


def _local_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The rope of windowed layers: it has a smaller base and is never scaled."""
    return {"rope_theta": raw.get("rope_local_base_freq", 10000.0)}
