"""Llama, and the models that differ from it by a line or two: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

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
from trireme.models.config import READ, ModelConfig, read_config
from trireme.models.registry import register
from trireme.models.strays import OTHER_HEADS, LeavesOut, further_layers


class Block(Module):
    def __init__(self, env: Env, cfg: ModelConfig, layer: int, rope: Rope):
        self.env = env
        self.input_layernorm = env.new(RMSNorm, cfg.hidden, cfg.eps)
        self.self_attn = self.attention(env, cfg, layer, rope)
        self.post_attention_layernorm = env.new(RMSNorm, cfg.hidden, cfg.eps)
        self.mlp = self.feed_forward(env, cfg, layer)

    def attention(self, env: Env, cfg: ModelConfig, layer: int, rope: Rope) -> Module:
        bias = bool(cfg.raw.get("attention_bias"))
        made = Projections(bias, bias)
        return env.new(Attention, cfg.hidden, cfg.heads, layer, rope, window=cfg.window(layer), projections=made)

    def feed_forward(self, env: Env, cfg: ModelConfig, layer: int) -> Module:
        return env.new(GatedMLP, cfg.hidden, cfg.inner, cfg.activation, bias=bool(cfg.raw.get("mlp_bias")))

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Batch, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.self_attn(x, batch, only), self.env.keep(residual, only)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class Decoder(Module):
    def __init__(self, env: Env, cfg: ModelConfig, block: type[Block]):
        self.env = env
        self.rope = Rope(env, cfg.heads.dim, cfg.rope, cfg.max_positions)
        self.embed_tokens = env.new(Embedding, cfg.vocab, cfg.hidden)
        self.layers = [env.new(block, cfg, i, self.rope) for i in range(cfg.num_layers)]
        self.norm = env.new(RMSNorm, cfg.hidden, cfg.eps)

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states of the tokens that need logits."""
        x = self.embed_tokens(batch.tokens)
        return self.norm(*run_blocks(self.env, self.layers, x, batch))[0]


@register("LlamaForCausalLM", "MistralForCausalLM")
class Llama(Module):
    block: type[Block] = Block
    reads = READ | {"attention_bias", "mlp_bias"}

    def __init__(self, env: Env, cfg: ModelConfig):
        self.model = env.new(Decoder, cfg, self.block)
        self.lm_head = env.new(Head, cfg.vocab, cfg.hidden, self.model.embed_tokens if cfg.tied else None)
        self.shares_prefixes = not self.model.rope.length_dependent

    @staticmethod
    def config(raw: dict[str, Any]) -> ModelConfig:
        return read_config(raw)

    @staticmethod
    def leaves_out(raw: dict[str, Any]) -> LeavesOut:
        return OTHER_HEADS | further_layers(raw)

    def __call__(self, batch: Batch) -> Tensor:
        """Logits of the tokens that need them."""
        return self.lm_head(self.model(batch))


class Qwen2Block(Block):
    def attention(self, env: Env, cfg: ModelConfig, layer: int, rope: Rope) -> Module:
        made = Projections(bias=True)
        return env.new(Attention, cfg.hidden, cfg.heads, layer, rope, window=cfg.window(layer), projections=made)


@register("Qwen2ForCausalLM")
class Qwen2(Llama):
    block = Qwen2Block


class Qwen3Block(Block):
    def attention(self, env: Env, cfg: ModelConfig, layer: int, rope: Rope) -> Module:
        bias = bool(cfg.raw.get("attention_bias"))
        made = Projections(bias, bias, HeadNormSpec(cfg.eps))
        return env.new(Attention, cfg.hidden, cfg.heads, layer, rope, window=cfg.window(layer), projections=made)


@register("Qwen3ForCausalLM")
class Qwen3(Llama):
    block = Qwen3Block
