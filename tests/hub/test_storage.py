"""Formats of quantized weights are recognised by what is stored, and what nobody reads is refused by name."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import pytest

from trireme.errors import UnsupportedModel
from trireme.hub.storage import check_storage, recognise

FLOATS = {"F32", "F16", "BF16", "Q8_0"}
LAYER = "model.layers.0.self_attn.q_proj"


class Tensor(NamedTuple):
    kind: str
    shape: tuple[int, ...] = (64, 64)


PLAIN = {
    "model.embed_tokens.weight": Tensor("BF16"),
    f"{LAYER}.weight": Tensor("Q8_0"),
    f"{LAYER}.bias": Tensor("F16", (64,)),
    "model.norm.weight": Tensor("F32", (64,)),
    "model.embeddings.position_ids": Tensor("I64", (1, 64)),
    "transformer.h.0.attn.bias": Tensor("BOOL", (1, 1, 64, 64)),
    # scales that are a part of the model
    "model.layers.0.router.scale": Tensor("BF16", (64,)),
    "model.layers.0.router.per_expert_scale": Tensor("BF16", (8,)),
    "logit_scale": Tensor("F32", ()),
}
SCALE = Tensor("F32", (64, 1))
# format: (what the layer holds, how the config calls it)
FORMATS: dict[str, tuple[dict[str, Tensor], str | None]] = {
    "GPTQ": ({"qweight": Tensor("I32", (8, 64)), "qzeros": Tensor("I32"), "scales": Tensor("F16"), "g_idx": Tensor("I32")}, "gptq"),
    "GPTQ without order": ({"qweight": Tensor("I32", (8, 64)), "qzeros": Tensor("I32"), "scales": Tensor("F16", (2, 64))}, None),
    "AWQ": ({"qweight": Tensor("I32", (64, 8)), "qzeros": Tensor("I32", (2, 8)), "scales": Tensor("F16", (2, 64))}, "awq"),
    "compressed-tensors": (
        {"weight_packed": Tensor("I32", (64, 8)), "weight_scale": Tensor("BF16"), "weight_shape": Tensor("I64", (2,))},
        "compressed-tensors",
    ),
    "compressed-tensors int8": ({"weight": Tensor("I8"), "weight_scale": SCALE}, None),
    "fp8": ({"weight": Tensor("F8_E4M3"), "weight_scale_inv": Tensor("F32", (1, 1))}, "fp8"),
    "fp8 by tensor": ({"weight": Tensor("F8_E4M3"), "weight_scale": Tensor("F32", ()), "input_scale": Tensor("F32", ())}, None),
    "fp8 alone": ({"weight": Tensor("F8_E5M2")}, None),
    "bitsandbytes": (
        {"weight": Tensor("U8", (2048, 1)), "weight.absmax": Tensor("F32"), "weight.quant_state.bitsandbytes__nf4": Tensor("U8")},
        "bitsandbytes",
    ),
    "bitsandbytes int8": ({"weight": Tensor("I8"), "SCB": Tensor("F32", (64,)), "weight_format": Tensor("U8", ())}, None),
    "MXFP4": ({"down_proj_blocks": Tensor("U8"), "down_proj_scales": Tensor("U8"), "down_proj_bias": Tensor("BF16")}, "mxfp4"),
    "MLX": ({"weight": Tensor("U32"), "scales": Tensor("F16"), "biases": Tensor("F16")}, None),
    "GGUF IQ3_S": ({"weight": Tensor("IQ3_S")}, None),
    "unknown": ({"weight": Tensor("I16")}, None),
    "unknown scales": ({"weight": Tensor("I16"), "weight_scale_2": Tensor("F32", ())}, None),
}


def entries(members: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in PLAIN.items() if name != f"{LAYER}.weight"} | {
        f"{LAYER}.{name}": tensor for name, tensor in members.items()
    }


def config(method: str | None) -> dict:
    return {"quantization_config": {"quant_method": method}} if method else {}


@pytest.mark.parametrize("case", FORMATS)
def test_formats_are_recognised_and_refused_by_name(case: str) -> None:
    members, method = FORMATS[case]
    expected = case if case.startswith("GGUF") else case.split(" ")[0]
    for raw in (config(method), {}):
        found = recognise(entries(members), raw, FLOATS)
        assert found and found.format == expected and found.tensor.startswith(LAYER)
    with pytest.raises(UnsupportedModel) as caught:
        check_storage(pathlib.Path("folder"), entries(members), config(method), FLOATS)
    said = str(caught.value)
    assert expected in said and LAYER in said and caught.value.fix and "\n" not in said


def test_plain_tensors_pass() -> None:
    check_storage(pathlib.Path("folder"), PLAIN, {"quantization_config": None}, FLOATS)


@pytest.mark.parametrize(("section", "said"), [({"quant_method": "quip"}, "'quip'"), ({"bits": 4}, "(no name)")])
def test_a_config_that_says_so_is_enough(section: dict, said: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        check_storage(pathlib.Path("folder"), PLAIN, {"quantization_config": section}, FLOATS)
    assert said in str(caught.value)


def test_a_config_that_names_a_format_with_a_reader_passes() -> None:
    """Every matrix may be one that was left out."""
    check_storage(pathlib.Path("folder"), PLAIN, config("gptq"), FLOATS)
