"""Rope frequencies against transformers' own, for every scaling and for the settings found in real models' configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from trireme.backends import open_backend
from trireme.config import DeviceOptions
from trireme.errors import UnsupportedModel
from trireme.layers import Env, Rope, alibi_slopes
from trireme.layers.rope import FREQUENCIES

ENV = Env(open_backend(DeviceOptions(backend="reference")), max_len=300)

_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}

SETTINGS: dict[str, tuple[dict[str, Any], int]] = {  # (rope parameters, positions trained for)
    "linear": ({"rope_type": "linear", "factor": 2.5}, 128),
    "dynamic": ({"rope_type": "dynamic", "factor": 3.0}, 64),
    "llama 3.1": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
        | {"original_max_position_embeddings": 8192},
        131072,
    ),
    "llama 3.2": (
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
        | {"original_max_position_embeddings": 8192},
        131072,
    ),
    "yarn, qwen": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}, 131072),
    "yarn, betas": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
        512,
    ),
    "yarn, attention factor": (
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
        512,
    ),
    "yarn, mscale": (
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
        163840,
    ),
    "yarn, not truncated": (
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "rope_theta": 150000.0},
        131072,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("head_dim", [64, 128, 20])
def test_frequencies(name: str, head_dim: int) -> None:
    settings, trained = SETTINGS[name]
    settings = {"rope_theta": 10000.0} | settings
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=trained,
        rope_parameters=dict(settings),
    )
    for length in (trained, 2 * trained) if name == "dynamic" else (trained,):
        exact, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, torch.device("cpu"), seq_len=length)
        found, own_factor = FREQUENCIES[settings["rope_type"]](settings, head_dim, trained, length)
        torch.testing.assert_close(found.float(), exact.float(), rtol=2e-6, atol=0.0)
        assert own_factor == pytest.approx(factor)


def test_table_rows_are_cosines_then_sines() -> None:
    rope = Rope(ENV, 16, {"rope_theta": 100.0, "partial_rotary_factor": 0.5}, 300)
    assert rope.table.shape == (300, 8)
    angles = torch.arange(300).double()[:, None] * 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(rope.table.double(), torch.cat([angles.cos(), angles.sin()], -1), atol=2e-5, rtol=0)


def test_only_dynamic_rope_beyond_its_length_depends_on_it() -> None:
    assert Rope(ENV, 16, {"rope_type": "dynamic", "factor": 2.0}, 200).length_dependent
    assert not Rope(ENV, 16, {"rope_type": "dynamic", "factor": 2.0}, 300).length_dependent
    assert not Rope(ENV, 16, {"rope_type": "linear", "factor": 2.0}, 200).length_dependent


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="'spiral'"):
        Rope(ENV, 16, {"rope_type": "spiral"}, 300)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 14, 16, 112])
def test_alibi_slopes(heads: int) -> None:
    exact = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32).view(heads, 2)[:, 1]
    torch.testing.assert_close(alibi_slopes(heads), exact)
