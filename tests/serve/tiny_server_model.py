"""A tiny random llama with a byte-level tokenizer, written in milliseconds, for tests where only load matters."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from safetensors.numpy import save_file

HIDDEN, LAYERS, HEADS, WIDTH = 32, 2, 2, 64


def write_tiny(
    folder: pathlib.Path, context: int = 1 << 16, chat_template: str = "", seed: int = 7, special: Sequence[str] = ()
) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(folder, chat_template, special)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocab, seed), folder / "model.safetensors")
    return folder


def write_tokenizer(folder: pathlib.Path, chat_template: str = "", special: Sequence[str] = ()) -> int:
    """A token per byte, after an end, whose id is 0, and further `special` tokens; returns how many that are."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate(["<end>", *special, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<end>", *special)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>"} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocab)


def _weights(vocab: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 1.4 * shape[-1] ** -0.5).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": random.standard_normal((vocab, HIDDEN)).astype(np.float32),
        "lm_head.weight": noise(vocab, HIDDEN) * 4,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            weights[f"{at}.self_attn.{name}_proj.weight"] = noise(HIDDEN, HIDDEN)
        weights[f"{at}.mlp.gate_proj.weight"] = noise(WIDTH, HIDDEN)
        weights[f"{at}.mlp.up_proj.weight"] = noise(WIDTH, HIDDEN)
        weights[f"{at}.mlp.down_proj.weight"] = noise(HIDDEN, WIDTH)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return weights
