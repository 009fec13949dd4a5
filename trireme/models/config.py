"""Reads a model's numbers from a checkpoint's config. Knows the different names of each setting; nothing of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trireme.errors import BadCheckpoint
from trireme.layers import Heads

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

# What `read_config` reads of the fields that change results (see `fields`)
READ = frozenset(
    {
        "layer_types",
        "max_window_layers",
        "partial_rotary_factor",
        "sliding_window",
        "sliding_window_pattern",
        "use_sliding_window",
    }
)
MAX_LAYERS = 4096
MAX_HEAD_DIM = 2**16


@dataclass(frozen=True)
class ModelConfig:
    hidden: int
    num_layers: int
    heads: Heads
    inner: int
    vocab: int
    eps: float
    max_positions: int
    tied: bool
    activation: str = "silu"
    rope: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int, ...] = ()  # per layer: how many tokens it sees, 0 for all
    raw: dict[str, Any] = field(default_factory=dict)  # for what only one family has

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0


def read_config(raw: dict[str, Any]) -> ModelConfig:
    """The numbers of a Llama-like config."""
    hidden, num_heads = number(raw, "hidden_size"), number(raw, "num_attention_heads")
    num_kv = int(raw.get("num_key_value_heads") or num_heads)
    head_dim = number({"head_dim": raw.get("head_dim") or hidden // num_heads}, "head_dim", MAX_HEAD_DIM)
    if num_heads % num_kv:
        raise BadCheckpoint(f"config.json: {num_heads} attention heads cannot share {num_kv} KV heads.", "check the file")
    num_layers = number(raw, "num_hidden_layers", MAX_LAYERS)
    return ModelConfig(
        hidden=hidden,
        num_layers=num_layers,
        heads=Heads(num_heads, num_kv, head_dim),
        inner=number(raw, "intermediate_size"),
        vocab=number(raw, "vocab_size"),
        eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_positions=number({"max_position_embeddings": 2048} | raw, "max_position_embeddings"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        activation=activation(raw.get("hidden_act") or raw.get("hidden_activation") or "silu"),
        rope=rope_settings(raw),
        windows=windows(raw, num_layers),
        raw=raw,
    )


def number(raw: dict[str, Any], name: str, limit: int = 2**24) -> int:
    """A size from the config. Refuses absurd sizes, because a damaged file must not make the engine allocate huge tensors."""
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
        raise BadCheckpoint(f"config.json: {name} is {value!r}, not a number from 1 to {limit}.", "check the file")
    return value


def activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise BadCheckpoint(f"config.json: the activation {name!r} is not known.", f"known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope_settings(raw: dict[str, Any], layer_type: str = "full_attention") -> dict[str, Any]:
    """Rope parameters, from the spellings of today (rope_parameters) and before (rope_theta, rope_scaling)."""
    settings = raw.get("rope_parameters") or {}
    settings = dict(settings.get(layer_type, settings))
    settings |= {k: v for k, v in (raw.get("rope_scaling") or {}).items() if v is not None}
    settings.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in raw:
        settings.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    return settings


def windows(raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """How many tokens each layer sees: from layer_types, from a pattern (every n-th layer sees all), or one window for all."""
    if not raw.get("sliding_window") or raw.get("use_sliding_window") is False:
        if "sliding_attention" in (raw.get("layer_types") or []):
            raise BadCheckpoint("config.json: layer_types names windowed layers; sliding_window is not set.", "check the file")
        return ()
    size = number(raw, "sliding_window", 2**40)
    if raw.get("layer_types"):
        return tuple(size if kind == "sliding_attention" else 0 for kind in raw["layer_types"])
    if raw.get("sliding_window_pattern"):
        return tuple(0 if (i + 1) % raw["sliding_window_pattern"] == 0 else size for i in range(num_layers))
    first = raw.get("max_window_layers", 0) if "use_sliding_window" in raw else 0
    return tuple(size if i >= first else 0 for i in range(num_layers))
