"""Tiny random models of every family, made by transformers, and what transformers says they compute."""

from __future__ import annotations

import copy
import functools
import pathlib
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 131  # a prime: no number of ranks divides it
LENGTH = 128  # positions a tiny model can be asked for

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

# family -> (transformers' config class, what differs from _BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 6}),
    "llama3": ("LlamaConfig", {"tie_word_embeddings": True} | _rope("llama3", **_LLAMA3)),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama-linear": ("LlamaConfig", _rope("linear", factor=4.0)),
    "llama-dynamic": ("LlamaConfig", {"max_position_embeddings": 32} | _rope("dynamic", factor=4.0)),
    "llama-yarn": ("LlamaConfig", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "mistral": ("MistralConfig", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 4, "query_pre_attn_scalar": 20}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "bloom": ("BloomConfig", {"n_layer": 3, "n_head": 6, "seq_length": LENGTH}),
    "bloom-after": ("BloomConfig", {"n_layer": 2, "n_head": 4, "apply_residual_connection_post_layernorm": True}),
}


def build(name: str, config: dict[str, Any], seed: int) -> Any:
    """A random model of transformers' config class, with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**config), attn_implementation="eager")
    made = made.float().eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 1.0 if "embed" in name else 1.4 * weight.shape[1] ** -0.5)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.5)
            else:  # a norm: near what it was (1, or 0 where the model adds 1)
                weight.add_(0.3 * torch.randn_like(weight))
    return made


@functools.cache
def model(family: str) -> Any:
    """The family's random model."""
    name, changes = FAMILIES[family]
    return build(name, _BASE | changes, sum(map(ord, family)))


def save(family: str, folder: pathlib.Path, shard: str = "5GB") -> pathlib.Path:
    model(family).save_pretrained(folder, max_shard_size=shard)
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference(family: str, tokens: list[int], num_new: int) -> tuple[list[int], Tensor]:
    """Greedy continuation and the logits of every position but the last, as transformers computes them step by step."""
    fresh = copy.deepcopy(model(family))  # rope that grows with the length keeps its state in the model
    out = fresh(torch.tensor([tokens]), use_cache=True)
    logits, answer = [out.logits[0]], []
    for _ in range(num_new):
        answer.append(int(logits[-1][-1].argmax()))
        if len(answer) < num_new:
            out = fresh(torch.tensor([[answer[-1]]]), past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0])
    return answer, torch.cat(logits)
