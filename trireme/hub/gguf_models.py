"""Maps GGUF's tensor names, settings and row orders to those of Hugging Face, one record for each family of models.

Knows names and numbers, never values: no tensor is decoded here, except the few rope factors that stand for a setting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from trireme.errors import BadCheckpoint, BadRequest, UnsupportedModel
from trireme.hub.gguf import GgufFile
from trireme.hub.weights import Weight
from trireme.types import DRAWN, SamplingParams

Config = dict[str, Any]

_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.#.attn_norm": "model.layers.#.input_layernorm",
    "blk.#.attn_q": "model.layers.#.self_attn.q_proj",
    "blk.#.attn_k": "model.layers.#.self_attn.k_proj",
    "blk.#.attn_v": "model.layers.#.self_attn.v_proj",
    "blk.#.attn_output": "model.layers.#.self_attn.o_proj",
    "blk.#.attn_q_norm": "model.layers.#.self_attn.q_norm",
    "blk.#.attn_k_norm": "model.layers.#.self_attn.k_norm",
    "blk.#.ffn_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_gate": "model.layers.#.mlp.gate_proj",
    "blk.#.ffn_up": "model.layers.#.mlp.up_proj",
    "blk.#.ffn_down": "model.layers.#.mlp.down_proj",
}
_GEMMA_NAMES = {
    **_LLAMA_NAMES,
    "blk.#.post_attention_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_norm": "model.layers.#.pre_feedforward_layernorm",
    "blk.#.post_ffw_norm": "model.layers.#.post_feedforward_layernorm",
}
_BLOOM_NAMES = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.#.attn_norm": "transformer.h.#.input_layernorm",
    "blk.#.attn_qkv": "transformer.h.#.self_attention.query_key_value",
    "blk.#.attn_output": "transformer.h.#.self_attention.dense",
    "blk.#.ffn_norm": "transformer.h.#.post_attention_layernorm",
    "blk.#.ffn_up": "transformer.h.#.mlp.dense_h_to_4h",
    "blk.#.ffn_down": "transformer.h.#.mlp.dense_4h_to_h",
}
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_LLAMA_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
# Settings that no family here uses, by their names in config.json. The model class refuses those that it does not compute.
_OTHER_KEYS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
    "attention.max_alibi_bias": "alibi",
    "attention.causal": "is_causal",
    "attention.chunk_size": "attention_chunk_size",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.temperature_length": "attn_temperature_tuning",
    "attention.value_length": "v_head_dim",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_count": "num_local_experts",
    "swiglu_clamp_exp": "swiglu_limit",
    "use_parallel_residual": "use_parallel_residual",
}
_REAL = {"rms_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_local_base_freq", *_SOFTCAPS}
_BLOOM_KEYS = {
    "block_count": "n_layer",
    "context_length": "seq_length",
    "embedding_length": "hidden_size",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


@dataclass(frozen=True)
class Family:
    """How the names of one GGUF architecture map to those of Hugging Face."""

    architecture: str
    model_type: str
    names: dict[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    keys: dict[str, str] = field(default_factory=lambda: _LLAMA_KEYS)
    fixed: Config = field(default_factory=lambda: {"hidden_act": "silu"})
    norm_offset: float = 0.0  # what to add to norm weights to get the checkpoint's own
    order: dict[str, Callable[[int, Config], np.ndarray]] = field(default_factory=dict)  # GGUF row of each checkpoint row
    finish: Callable[[Config], None] | None = None


def paired_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """GGUF's llama interleaves the rotated halves of a head: checkpoint row (head, half, j) is file row (head, j, half)."""
    _divide("attention rows", num_rows, 2 * num_heads)
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _bloom_rows(num_rows: int, config: Config) -> np.ndarray:
    """GGUF's bloom stacks all of q, then k, then v; the checkpoint stacks q, k, v of each head."""
    _divide("attention rows", num_rows, 3 * config["n_head"])
    return np.arange(num_rows).reshape(3, config["n_head"], -1).swapaxes(0, 1).reshape(-1)


def _divide(what: str, total: int, parts: int) -> int:
    if parts <= 0 or total % parts:
        raise BadCheckpoint(f"{total} {what} do not divide by {parts}.", "fetch the file again")
    return total // parts


def _finish_gemma3(config: Config) -> None:
    config.setdefault("sliding_window", 4096)
    pattern, layers = config.get("sliding_window_pattern", 6), config["num_hidden_layers"]
    if type(pattern) is not int or pattern < 1:
        raise UnsupportedModel(
            f"Its windowed layers have no even pattern: {str(pattern)[:60]}.", "use a safetensors copy of the model"
        )
    # The 27B model alone scales its queries by the width per head instead of the head's own.
    wide = layers == 62
    config |= {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
        "sliding_window_pattern": pattern,
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)],
    }


def _finish_gemma2(config: Config) -> None:
    layers = config["num_hidden_layers"]
    wide = layers == 46  # as above
    config |= {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"],
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
    }


_GEMMA_FIXED: Config = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        "llama",
        order={
            "attn_q": lambda rows, config: paired_rows(rows, config["num_attention_heads"]),
            "attn_k": lambda rows, config: paired_rows(rows, config["num_key_value_heads"]),
        },
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "gemma": Family(
        "GemmaForCausalLM",
        "gemma",
        _GEMMA_NAMES | {"blk.#.ffn_norm": _LLAMA_NAMES["blk.#.ffn_norm"]},
        fixed=_GEMMA_FIXED,
        norm_offset=-1.0,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _GEMMA_NAMES,
        _LLAMA_KEYS | {name: name for name in _SOFTCAPS},
        _GEMMA_FIXED | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096},
        -1.0,
        finish=_finish_gemma2,
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _GEMMA_NAMES,
        _LLAMA_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"},
        _GEMMA_FIXED | {"rope_local_base_freq": 10000.0, "rope_theta": 1e6},
        -1.0,
        finish=_finish_gemma3,
    ),
    "bloom": Family("BloomForCausalLM", "bloom", _BLOOM_NAMES, _BLOOM_KEYS, {}, order={"attn_qkv": _bloom_rows}),
}


def family_of(file: GgufFile) -> Family:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise UnsupportedModel(
            f"{file.path} has the architecture {str(architecture)[:60]!r}.", f"use one of: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture]


def config_of(file: GgufFile) -> Config:
    """The settings of config.json, from metadata and tensor shapes."""
    family = family_of(file)
    prefix = file.metadata["general.architecture"] + "."
    found = {key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)}
    config: Config = {"architectures": [family.architecture], "model_type": family.model_type, **family.fixed}
    for key, name in family.keys.items():
        if key in found:
            config[name] = _number(file, prefix + key, found[key])
    _check_numbers(file, config, family)
    for key, name in _OTHER_KEYS.items():
        if key in found and name not in config and not _is_zero(found[key]):
            config[name] = _plain(found[key])
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadCheckpoint(f"{file.path} has no matrix token_embd.weight.", "use a whole model, not a vocabulary or an adapter")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if "rms_norm_eps" in family.keys.values():
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", _divide("values of the hidden size", config["hidden_size"], config["num_attention_heads"]))
        config.setdefault("rope_theta", 10000.0)
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
        config["rope_scaling"] = _rope_scaling(file, found, config)
        _partial_widths(file, found, config)
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = _token_id(file, f"tokenizer.ggml.{name}_token_id")
    if family.finish:
        family.finish(config)
    return config


def weights_of(file: GgufFile, config: Config) -> dict[str, Weight]:
    """The tensors under their checkpoint names, rows in the checkpoint's order. What has no name there keeps its own."""
    family = family_of(file)
    weights = {}
    for name, weight in file.tensors.items():
        stem, _, ending = name.rpartition(".")
        parts = stem.split(".")
        number = parts[1] if parts[0] == "blk" and len(parts) > 2 else ""
        pattern = f"blk.#.{'.'.join(parts[2:])}" if number else stem
        if pattern not in family.names:
            weights[name] = weight
            continue
        known = f"{family.names[pattern].replace('#', number)}.{ending}"
        is_norm = pattern.endswith("norm") and ending == "weight"
        order = family.order.get(parts[-1])
        if order:
            weight = weight.rows(order(weight.shape[0], config))
        weights[known] = weight.renamed(known, family.norm_offset if is_norm else 0.0)
    return weights


# Control tokens that always end an answer, because the metadata often names only one of them.
_ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>"}


# What the makers recommend to sample by: the end of `general.sampling.NAME`, and our name where that is another.
_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty", **{name: name for name in DRAWN}}


def generation_of(file: GgufFile) -> Config:
    """The settings of generation_config.json: the tokens that begin and end a text, and the sampling that the makers recommend."""
    ends = [_token_id(file, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        ends += [int(i) for i in np.flatnonzero(kinds == 3) if tokens[i] in _ENDS]
    generation: Config = {"eos_token_id": list(dict.fromkeys(i for i in ends if i is not None))}
    bos = _token_id(file, "tokenizer.ggml.bos_token_id")
    generation |= _recommended(file)
    return generation if bos is None else generation | {"bos_token_id": bos}


def _recommended(file: GgufFile) -> Config:
    """The sampling parameters in the metadata. A value outside of its range, such as top_k -1, means that it is off."""
    found: Config = {}
    for name, ours in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{name}")
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            with contextlib.suppress(BadRequest, msgspec.ValidationError):
                msgspec.convert({ours: value}, SamplingParams).check_fields()
                found[ours] = round(value, 6)  # float32: 0.949999988
    return found


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    return value if type(value) is int and 0 <= value < 2**31 else None


def _number(file: GgufFile, key: str, value: Any) -> int | float:
    """A scalar, or the one value that all layers share."""
    if isinstance(value, np.ndarray) and value.size:
        values = set(value.tolist())
        if len(values) > 1:
            raise UnsupportedModel(f"{file.path} varies {key} from layer to layer.", "use a model whose layers are alike")
        value = values.pop()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadCheckpoint(f"{file.path} has no number for {key}.", "fetch the file again")
    # Metadata floats are 32 bits wide; the shortest decimal is what was meant (1e-05, not 9.99999974e-06).
    return value if isinstance(value, int) else float(str(np.float32(value)))


_NEEDED = ("block_count", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon")


def _check_numbers(file: GgufFile, config: Config, family: Family) -> None:
    """Every count and every real setting is positive, and those no model can do without are there."""
    for key, name in family.keys.items():
        value = config.get(name)
        if value is None and key in _NEEDED:
            raise BadCheckpoint(f"{file.path} does not give {name}.", "fetch the file again")
        if value is not None and not 0 < value < 2**31:
            raise BadCheckpoint(f"{file.path} says {name} is {value}.", "fetch the file again")
        if isinstance(value, float) and name not in _REAL:
            raise BadCheckpoint(f"{file.path} says {name} is {value}, which is no count.", "fetch the file again")


def _is_zero(value: Any) -> bool:
    """Whether a setting is the number zero, which means that the feature is absent. False does not count as zero."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _partial_widths(file: GgufFile, found: Config, config: Config) -> None:
    """Where values are as wide as keys, and rope turns whole heads, the config says nothing of it."""
    if config.get("v_head_dim") == config["head_dim"]:
        del config["v_head_dim"]
    if "rope.dimension_count" in found:
        turned = _number(file, "rope.dimension_count", found["rope.dimension_count"])
        if turned != config["head_dim"]:
            config["partial_rotary_factor"] = turned / config["head_dim"]


def _rope_scaling(file: GgufFile, found: Config, config: Config) -> Config | None:
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(file, factors, config)
    kind = found.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"{file.path} scales rope by {str(kind)[:40]!r}.", "use a model with linear, yarn or llama3 scaling")
    scaling: Config = {"rope_type": kind, "type": kind}
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    if kind == "yarn":
        names |= {"attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    for key, name in names.items():
        if f"rope.scaling.{key}" in found:
            scaling[name] = _number(file, f"rope.scaling.{key}", found[f"rope.scaling.{key}"])
    others = {key.removeprefix("rope.scaling."): _plain(value) for key, value in found.items() if key.startswith("rope.scaling.")}
    scaling |= {key: value for key, value in others.items() if key not in {"type", "finetuned", *names} and value != 1}
    if not scaling.get("factor", 0) > 0:
        raise BadCheckpoint(f"{file.path} scales rope by no factor.", "fetch the file again")
    return scaling


def _llama3_scaling(file: GgufFile, tensor: Weight, config: Config) -> Config:
    """The file keeps llama 3's factors per frequency; the setting they came from is recovered and checked against them."""
    factors = tensor.raw().astype(np.float64).reshape(-1) if tensor.kind == "F32" else np.zeros(0)
    half = config["head_dim"] // 2
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max(initial=0.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(half) / half)
    turns = 8192 / wavelengths
    smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    with np.errstate(all="ignore"):
        expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModel(
            f"{file.path} has rope factors of an unknown rule in rope_freqs.weight.", "use a safetensors copy of the model"
        )
    return scaling
