"""Tensors that nobody read: published checkpoints pass, with what their text model rightly leaves out; anything else is named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from trireme.errors import UnsupportedModel
from trireme.models.llama import Llama
from trireme.models.strays import TOWERS, compare, further_layers, leaves_out_of, refuse_strays


class Tensor(NamedTuple):
    shape: tuple[int, ...] = (4, 4)


def entries(*names: str, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return dict.fromkeys(names, Tensor()) | {name: Tensor(shape) for name, shape in shapes.items()}


def compared(names: Iterable[str], asked: Iterable[str], model: type, raw: dict[str, Any] | None = None) -> tuple[dict, list[str]]:
    left_out, strays = compare(entries(*names), set(asked), leaves_out_of(model, raw or {}))
    return dict(left_out), strays


class DeepSeek:
    """What a class of DeepSeek-V3 would say."""

    @staticmethod
    def leaves_out(raw: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        return further_layers(raw)


class GemmaWithTower:
    @staticmethod
    def leaves_out(raw: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        return TOWERS


def deepseek_layer(layer: int) -> list[str]:
    attention = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    names = [f"self_attn.{name}.weight" for name in attention]
    names += [f"mlp.experts.{i}.{name}.weight" for i in range(256) for name in ("gate_proj", "up_proj", "down_proj")]
    names += [f"mlp.shared_experts.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    names += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", "input_layernorm.weight", "post_attention_layernorm.weight"]
    return [f"model.layers.{layer}.{name}" for name in names]


def test_deepseek_with_its_further_layer() -> None:
    body = [name for layer in (59, 60) for name in deepseek_layer(layer)] + ["model.embed_tokens.weight", "lm_head.weight"]
    names = (
        "embed_tokens.weight",
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "shared_head.head.weight",
    )
    further = deepseek_layer(61) + [f"model.layers.61.{name}" for name in names]
    raw = {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    left_out, strays = compared(body + further, body, DeepSeek, raw)
    assert not strays and left_out == {"layers that predict further tokens": len(further)}
    # a layer that its config does not mention, and one of the body that nobody read, are no such layers
    assert len(compared(body + further, body, DeepSeek, raw | {"num_nextn_predict_layers": 0})[1]) == len(further)
    assert compared(body + further, body[1:], DeepSeek, raw)[1] == body[:1]


def test_gemma_with_its_tower() -> None:
    text = [f"language_model.model.layers.{i}.self_attn.{name}_proj.weight" for i in range(34) for name in "qkvo"]
    vision = "vision_tower.vision_model"
    tower = [
        f"{vision}.encoder.layers.{i}.self_attn.{name}_proj.{end}"
        for i in range(27)
        for name in "qkv"
        for end in ("weight", "bias")
    ]
    tower += [f"{vision}.embeddings.patch_embedding.weight", f"{vision}.post_layernorm.bias"]
    tower += ["multi_modal_projector.mm_input_projection_weight", "multi_modal_projector.mm_soft_emb_norm.weight"]
    for prefix in ("", "model."):  # as published, and as later releases write it
        left_out, strays = compared(text + [prefix + name for name in tower], text, GemmaWithTower)
        assert not strays and left_out == {"what sees and hears": len(tower)}
    assert compared(tower, [], Llama)[1] == tower


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (64,)),
        ("layers.3.attention.rotary_emb.inv_freq", (64,)),
        ("rope_freqs.weight", (64,)),
        ("bert.embeddings.position_ids", (1, 512)),
        ("h.0.attn.bias", (1, 1, 1024, 1024)),
        ("gpt_neox.layers.0.attention.masked_bias", ()),
    ],
)
def test_tables_and_masks_are_harmless(name: str, shape: tuple[int, ...]) -> None:
    assert compare({name: Tensor(shape)}, set(), {}) == ({}, [])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (64,)),
        ("transformer.h.0.attn.bias", (64,)),
        ("transformer.h.0.attn.bias", (64, 64)),
        ("model.layers.0.self_attn.q_norm.weight", (64,)),
        ("model.layers.32.mlp.up_proj.weight", (64, 64)),
        ("model.layers.0.mlp.experts.0.up_proj.weight", (64, 64)),
        ("transformer.wpe.weight", (64, 64)),
        ("rope_factors_long.weight", (64,)),
        ("model.layers.0.self_attn.sinks", (8,)),
        ("blk.0.ffn_gate_exps.weight", (8, 64, 64)),
    ],
)
def test_what_changes_answers_is_not(name: str, shape: tuple[int, ...]) -> None:
    assert compare({name: Tensor(shape)}, set(), leaves_out_of(Llama, {"num_hidden_layers": 32})) == ({}, [name])


def test_the_bare_body_leaves_out_the_first_word() -> None:
    left_out, strays = compare(
        entries("layers.61.enorm.weight"), set(), further_layers({"num_hidden_layers": 61, "num_nextn_predict_layers": 1})
    )
    assert not strays and sum(left_out.values()) == 1


def test_the_refusal_counts_those_alike() -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.bias" for i in range(56)]
    with pytest.raises(UnsupportedModel) as caught:
        refuse_strays("folder", Llama, names)
    said = "folder has tensors that the class Llama does not use: model.layers.0.self_attn.q_proj.bias and 55 like it."
    assert str(caught.value).startswith(said) and caught.value.fix
    with pytest.raises(UnsupportedModel, match=r"a\.1\.x, b\.1\.y and 2 like them"):
        refuse_strays("folder", Llama, ["a.1.x", "a.2.x", "b.1.y", "b.2.y"])
    refuse_strays("folder", Llama, [])
