"""Config fields that change results: what published models set passes where its class computes it, and nothing else does."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest
import transformers

from trireme.cli.main import main
from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.models import MODELS, model_class, registry
from trireme.models.config import windows
from trireme.models.fields import FIELDS, check_fields, unread_fields

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# As published: the fields that could be in doubt
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": {
        "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                         "rope_type": "llama3"},
    },
    "SmolLM2": {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "transformers.js_config": {"dtype": {}}},
    "Mistral 7B v0.1": {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "rope_theta": 10000.0},
    "Mistral 7B v0.3": {"architectures": ["MistralForCausalLM"], "sliding_window": None, "rope_theta": 1000000.0},
    "Qwen2.5 7B": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 131072,
                   "max_window_layers": 28, "use_mrope": False, "rope_scaling": _YARN},
    "Qwen3 8B": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "use_sliding_window": False,
                 "sliding_window": None, "max_window_layers": 36, "rope_scaling": None, "layer_types": ["full_attention"] * 2},
    "Gemma 3 1B": {"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
                   "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256, "query_pre_attn_scalar": 256,
                   "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000,
                   "sliding_window": 512, "sliding_window_pattern": 6},
    "Gemma 3 270M": {"architectures": ["Gemma3ForCausalLM"], "_sliding_window_pattern": 6, "use_bidirectional_attention": False,
                     "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512, "query_pre_attn_scalar": 256},
    "BLOOM": {"architectures": ["BloomForCausalLM"], "n_layer": 2, "n_head": 4, "apply_residual_connection_post_layernorm": False,
              "attention_softmax_in_fp32": True, "masked_softmax_fusion": True, "offset_alibi": 100, "seq_length": 2048,
              "skip_bias_add": True, "slow_but_exact": False, "pretraining_tp": 4},
}  # fmt: skip


def config_of(raw: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    cls = model_class(raw)
    return cls, cls.config(raw).raw


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_pass(name: str) -> None:
    cls, raw = config_of(_LLAMA | PUBLISHED[name])
    check_fields("folder", cls, raw)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        ("LlamaConfig", "LlamaForCausalLM"),
        ("MistralConfig", "MistralForCausalLM"),
        ("Qwen2Config", "Qwen2ForCausalLM"),
        ("Qwen3Config", "Qwen3ForCausalLM"),
        ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        ("BloomConfig", "BloomForCausalLM"),
    ],
)
def test_defaults_of_every_family_pass(config: str, architecture: str) -> None:
    cls, raw = config_of(getattr(transformers, config)().to_dict() | {"architectures": [architecture]})
    check_fields("folder", cls, raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logits_scaling", 8.0),
        ("attention_multiplier", 0.0156),
        ("residual_multiplier", 0.22),
        ("clip_qkv", 8.0),
        ("query_pre_attn_scalar", 256),
        ("scale_emb", 12),
        ("position_embedding_type", "alibi"),
        ("rotary_pct", 0.25),
        ("rope_interleaved", True),
        ("no_rope_layers", [1, 0]),
        ("attention_chunk_size", 8192),
        ("use_bidirectional_attention", True),
        ("num_local_experts", 8),
        ("kv_lora_rank", 512),
        ("norm_type", "layernorm"),
        ("use_qk_norm", True),
        ("use_parallel_residual", True),
        ("qkv_bias", True),
        ("rope_local_base_freq", 10000.0),
    ],
)
def test_a_field_that_is_not_read_is_refused_by_name(field: str, value: Any) -> None:
    assert field in FIELDS
    cls, raw = config_of(_LLAMA | {field: value})
    with pytest.raises(UnsupportedModel) as caught:
        check_fields("folder", cls, raw)
    assert f"sets {field} to {str(value)[:20]}" in str(caught.value) and "class Llama " in str(caught.value) and caught.value.fix


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}}, "rope_parameters.llama_4_scaling_beta"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000}}, "rope_scaling.alpha"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
         "rope_parameters.sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types.linear_attention"),
    ],
)  # fmt: skip
def test_ropes_and_layers_of_kinds_that_are_not_computed(changes: dict, named: str) -> None:
    assert named in [name for name, _ in unread_fields(_LLAMA | changes, MODELS["LlamaForCausalLM"].reads)]


def test_one_rope_said_for_each_kind_of_layer_is_one_rope() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    raw = _LLAMA | {"rope_parameters": {"full_attention": rope, "sliding_attention": dict(rope)}}
    assert not unread_fields(raw, MODELS["LlamaForCausalLM"].reads)


def test_a_class_reads_what_the_one_above_it_reads_and_more() -> None:
    above = MODELS["LlamaForCausalLM"]
    below = type("Capped", (above,), {"reads": above.reads | {"final_logit_softcapping"}})
    raw = _LLAMA | {"final_logit_softcapping": 30.0, "attention_bias": True}
    assert unread_fields(raw, above.reads) == [("final_logit_softcapping", 30.0)]
    check_fields("folder", below, raw)
    with pytest.raises(UnsupportedModel, match="attention_bias"):  # a class that says nothing reads nothing
        check_fields("folder", type("Silent", (), {}), raw)


def test_windows_that_are_switched_off_change_nothing() -> None:
    off = {"use_sliding_window": False, "sliding_window": 4096}
    assert not unread_fields(off, ()) and unread_fields(off | {"use_sliding_window": True}, ())
    with pytest.raises(BadCheckpoint, match="sliding_window is not set"):
        windows({"layer_types": ["sliding_attention"], "sliding_window": None}, 1)


def test_gemma_says_what_its_config_leaves_unsaid() -> None:
    """A Gemma 3 whose config names the sizes alone has the windows, scale and rope of its kind."""
    sizes = _LLAMA | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "hidden_act": "relu"}
    cfg = MODELS["Gemma3ForCausalLM"].config(sizes)
    assert cfg.windows == (4096,) * 5 + (0,) and cfg.rope["rope_theta"] == 1e6 and cfg.heads.dim == 256 and cfg.tied
    assert cfg.activation == "gelu_tanh" and cfg.raw["query_pre_attn_scalar"] == 256


def test_plug_ins_are_named_among_the_architectures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    brought = [importlib.metadata.EntryPoint("AcmeForCausalLM", "acme:Acme", "trireme.models")]
    monkeypatch.setattr(registry, "entry_points", lambda group, name="": [e for e in brought if name in ("", e.name)])
    with pytest.raises(UnsupportedModel, match=r"known are AcmeForCausalLM, .*LlamaForCausalLM"):
        model_class({"architectures": ["NobodyForCausalLM"]})
    assert main(["models", "--architectures"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "AcmeForCausalLM (by a plug-in)" in told and "LlamaForCausalLM" in told
