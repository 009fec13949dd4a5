"""The model shapes and the request trace on which GPU engines are compared. Knows lengths and sizes; nothing of engines."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import random
from typing import Any

from tokenizers import pre_tokenizers

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA
    | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 16384, "rope_theta": 10000.0, "tie_word_embeddings": True}
    | {"bos_token_id": 0, "eos_token_id": 1},
    "llama8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072}
    | {"rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001},
    "qwen05b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6}
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "max_window_layers": 24}
    | {"use_sliding_window": False, "rope_theta": 1000000.0, "tie_word_embeddings": True}
    | {"bos_token_id": 151643, "eos_token_id": 151645},
    "smol135m": _LLAMA
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 16384, "rope_theta": 100000.0}
    | {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1},
}


def write_model(name: str, root: pathlib.Path) -> pathlib.Path:
    """Writes a model folder with a configuration and an empty weight file, for weights that are drawn at random."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name] | {"dtype": "bfloat16", "torch_dtype": "bfloat16", "initializer_range": 0.02, "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "generation_config.json").write_text(json.dumps({k: config[k] for k in ("bos_token_id", "eos_token_id")}))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"])))
    return folder


def _tokenizer(size: int) -> dict[str, Any]:
    """A vocabulary of this size, so that models with random weights can be served: bytes first, then made-up words."""
    words = ["".join(letters) for letters in itertools.islice(itertools.product("etaoinshrdlu", repeat=5), size)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *words][:size]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": bytes_only,
        "decoder": bytes_only,
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(vocabulary)}, "merges": []},
    }


def trace(count: int = 512, seed: int = 1234) -> list[tuple[int, int]]:
    """(prompt, output) lengths like those of conversations: lognormal, means of about 220 and 190; the same on every machine."""
    source = random.Random(seed)

    def draw(mean: float, sigma: float, most: int) -> int:
        return max(4, min(most, int(source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))

    return [(draw(220, 1.0, 2048), draw(190, 0.8, 1024)) for _ in range(count)]
