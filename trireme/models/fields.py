"""Finds the fields of a config that change what a model computes and that its class does not read.

Knows names and the values that change nothing; nothing of layers. A class says in `reads` what it computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from trireme.errors import UnsupportedModel

_OFF: tuple[Any, ...] = (False, 0)
_ONE: tuple[Any, ...] = (1,)
_ROPE: tuple[Any, ...] = ("rope", "rotary")


def _all(neutral: tuple[Any, ...], names: str) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), neutral)


# Field: the values that change nothing. A field that is missing, null or empty never does.
FIELDS: dict[str, tuple[Any, ...]] = {
    # soft caps and clipping
    **_all(_OFF, "attn_logit_softcapping final_logit_softcapping attention_logit_softcapping logit_softcapping"),
    **_all(_OFF, "attn_logit_softcap final_logit_softcap attention_logit_softcap logits_soft_cap"),
    **_all(_OFF, "clip_qkv swiglu_limit activation_clip"),
    # scales and multipliers
    **_all(_ONE, "logit_scale logits_scaling logits_scale output_multiplier_scale lm_head_multiplier"),
    **_all(_ONE, "embedding_multiplier embedding_scale embedding_multiplier_scale emb_scale scale_emb residual_multiplier"),
    **_all(_ONE, "attention_in_multiplier attention_out_multiplier key_multiplier residual_scale width_scale"),
    **_all((), "attention_multiplier attention_scale attn_scale softmax_scale query_pre_attn_scalar"),
    **_all((), "scale_depth dim_model_base mup_width_multiplier mup_embedding_multiplier"),
    **_all(([1, 1], [1.0, 1.0]), "mlp_multipliers"),
    **_all((True,), "scale_attn_weights"),
    **_all(_OFF, "scale_attn_by_inverse_layer_idx scale_embedding use_logn_attn log_scaled_attention attn_temperature_tuning"),
    # positions
    **_all(_ROPE, "position_embedding_type position_encoding_type pos_embed_type"),
    **_all(_OFF, "alibi use_alibi use_dynamic_ntk learned_pos_embeddings"),
    **_all(_OFF, "rope_interleaved rope_interleave use_interleaved_rope rope_local_base_freq global_rope_theta local_rope_theta"),
    **_all(_ONE, "partial_rotary_factor rotary_pct rotary_percent rope_ratio"),
    **_all((), "rotary_dim rotary_emb_base qk_rope_head_dim no_rope_layers no_rope_layer_interval nope_layer_interval"),
    # what a token sees
    **_all(_OFF, "sliding_window use_sliding_window attention_window_size window_size attention_chunk_size local_attention"),
    **_all((), "layer_types sliding_window_pattern _sliding_window_pattern attention_types global_attn_every_n_layers"),
    **_all(_OFF, "use_bidirectional_attention bidirectional_attention is_encoder_decoder add_cross_attention attention_sink_size"),
    **_all((True,), "is_causal causal_attention"),
    # layers of another kind
    **_all(_OFF, "num_experts num_local_experts n_routed_experts num_routed_experts moe_num_experts enable_moe_block"),
    **_all(_OFF, "kv_lora_rank q_lora_rank num_kv_shared_layers hidden_size_per_layer_input altup_num_inputs laurel_rank"),
    **_all(_OFF, "attn_layer_period hybrid_override_pattern full_attention_interval mamba_d_state linear_num_value_heads"),
    **_all((), "v_head_dim attention_k_eq_v"),
    # norms and the order of a block
    **_all(("rms", "rmsnorm", "rms_norm", "RMSNorm"), "norm_type layer_norm_type normalization_type"),
    **_all(_OFF, "use_qk_norm qk_norm qk_layernorm qk_layernorms layernorm_1p apply_layernorm_1p norm_head normalize_head"),
    **_all(_OFF, "parallel_attn use_parallel_residual parallel_residual parallel_block use_parallel_embedding"),
    **_all(_OFF, "apply_residual_connection_post_layernorm use_post_norm post_norm sandwich_norm new_decoder_architecture"),
    # biases
    **_all(_OFF, "attention_bias mlp_bias qkv_bias use_qkv_bias add_qkv_bias use_bias bias add_bias_linear attention_out_bias"),
    **_all(_OFF, "attention_output_bias o_proj_bias ffn_bias use_mlp_bias lm_head_bias"),
}  # fmt: skip
# What `layers.Rope` reads of the rope settings, and what changes nothing for text
_ROPE_SETTINGS = (
    *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"),
    *("finetuned", "mrope_section", "mrope_interleaved"),
)
_WINDOWS = ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern")
_LAYER_TYPES = ("full_attention", "sliding_attention")  # read by `config.windows`; the first changes nothing


def unread_fields(raw: dict[str, Any], reads: Collection[str]) -> list[tuple[str, Any]]:
    """Every field that has a value with an effect and that the class does not read, with its value."""
    off = _WINDOWS if raw.get("use_sliding_window") is False else ()
    found = [
        (name, raw[name])
        for name, neutral in FIELDS.items()
        if name in raw and name not in off and not _is_neutral(name, raw[name], neutral)
    ]
    return [(name, value) for name, value in (*found, *_rope_fields(raw), *_kinds_of_layers(raw)) if name not in reads]


def check_fields(path: Any, model: type, raw: dict[str, Any]) -> None:
    """Refuses a config that asks for something the class does not compute."""
    unread = unread_fields(raw, getattr(model, "reads", ()))
    if not unread:
        return
    name, value = unread[0]
    more = f" (and {', '.join(name for name, _ in unread[1:6])})" if unread[1:] else ""
    raise UnsupportedModel(
        f"{path}: the config sets {name} to {str(value)[:60]}{more}, which the class {model.__name__} does not compute.",
        f"use another model, or a class that has {name} in `reads` (docs/add-a-model.md)",
    )


def _is_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or value in ("", [], {}) or value in neutral:
        return True
    return name == "layer_types" and isinstance(value, list) and set(map(str, value)) == {_LAYER_TYPES[0]}


def _rope_fields(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Rope settings that no rope here reads, and those of single kinds of layers where they differ from the others'."""
    for section in ("rope_parameters", "rope_scaling"):
        settings = raw.get(section)
        if not isinstance(settings, dict):
            continue
        common = settings.get(_LAYER_TYPES[0], settings)
        for name, value in settings.items():
            if isinstance(value, dict):
                yield from ((f"{section}.{inner}", v) for inner, v in value.items() if inner not in _ROPE_SETTINGS and v)
                if value != common:
                    yield f"{section}.{name}", value
            elif name not in _ROPE_SETTINGS and value:
                yield f"{section}.{name}", value


def _kinds_of_layers(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    kinds = raw.get("layer_types")
    for kind in sorted({str(kind) for kind in kinds} - set(_LAYER_TYPES)) if isinstance(kinds, list) else ():
        yield f"layer_types.{kind}", kind
