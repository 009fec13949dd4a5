"""Matrices that the libraries of the published formats wrote themselves decode to the values that those libraries say they mean.

`tools/made_formats.py` recorded the files of `made/`, and names the libraries and their versions.
"""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from trireme.errors import UnsupportedModel
from trireme.hub.composite import Composite
from trireme.hub.safetensors import read_safetensors
from trireme.hub.schemes import join
from trireme.quant import decode

MADE = pathlib.Path(__file__).parent / "made"
# What is not read, and a word of why
REFUSED: dict[str, tuple[type[UnsupportedModel], str]] = {
    "compressed-tensors-before-w7-sym": (UnsupportedModel, "7 bits"),  # its words have the shape of those of 8 bits
    "compressed-tensors-mxfp6": (UnsupportedModel, "6 bits"),
    "gptqmodel-3-bit-in-planes": (UnsupportedModel, "planes"),  # its words have the shape of those without planes
}
NAMES = sorted(file.stem for file in MADE.glob("*.safetensors"))
READ = [name for name in NAMES if name not in REFUSED]
# The library multiplies in another order in float32: by the scale and 1 / 127, not by a quotient.
CLOSE = {"bitsandbytes-int8": 2e-7}


def joined(name: str) -> tuple[Composite, Tensor]:
    """(the one matrix of a file, the values that it means)"""
    file = MADE / f"{name}.safetensors"
    with safe_open(file, "pt") as opened:
        settings, values = json.loads(opened.metadata()["made"])["settings"], opened.get_tensor("values")
    weights = read_safetensors(file)
    del weights["values"]
    (found,) = join(weights, settings).values()
    assert isinstance(found, Composite)
    return found, values


def check(name: str, got: Tensor, values: Tensor) -> None:
    """The same, once rounded to the type in which the library gave the values: most compute in bfloat16 or float16."""
    if name in CLOSE:
        torch.testing.assert_close(got, values, rtol=CLOSE[name], atol=0)
    else:
        assert torch.equal(got.to(values.dtype), values)


@pytest.mark.parametrize("name", READ)
def test_decodes_to_the_librarys_values(name: str) -> None:
    matrix, values = joined(name)
    matrices = [matrix] if len(matrix.shape) == 2 else [matrix.part(index) for index in range(matrix.shape[0])]
    for one, meant in zip(matrices, values.view(len(matrices), -1, values.shape[-1]), strict=True):
        height, columns = one.shape
        above = height - len(meant)  # of a high matrix only the last values are recorded
        check(name, decode(one, torch.float32)[above:], meant)
        rows, span = slice(height - 11, height - 2), slice(19, columns - 7)
        check(name, decode(one.rows(rows).columns(span), torch.float32), meant[-11:-2, span])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    error, why = REFUSED[name]
    with pytest.raises(error, match=why):
        joined(name)


def test_every_library_is_there() -> None:
    libraries = set()
    for name in NAMES:
        with safe_open(MADE / f"{name}.safetensors", "pt") as opened:
            libraries.add(json.loads(opened.metadata()["made"])["library"])
    assert libraries >= {"compressed-tensors", "bitsandbytes", "gptqmodel", "auto-gptq", "autoawq", "auto-round", "nvidia-modelopt"}
    assert "transformers" in libraries and set(REFUSED) < set(NAMES)


@pytest.mark.parametrize("name", ["rotation", "rotation_config", "spinquant_config", "transform_config"])
def test_turned_weights_are_refused(name: str) -> None:
    """GPTQModel, AutoRound and compressed-tensors write so, and the words look as ever."""
    weights = read_safetensors(MADE / "gptqmodel-4-bit-sym.safetensors")
    with pytest.raises(UnsupportedModel, match=name):
        join(weights, {"quant_method": "gptq", name: "hadamard"})


def test_tiles_are_refused(tmp_path: pathlib.Path) -> None:
    """Older bitsandbytes stored int8 in the order of a kernel, and says so by a number beside the matrix."""
    tensors = load_file(MADE / "bitsandbytes-int8.safetensors")
    del tensors["values"]
    for number in (0, 2):
        file = tmp_path / f"{number}.safetensors"
        save_file(tensors | {"layer.weight_format": torch.tensor(number, dtype=torch.uint8)}, file)
        if number == 0:
            assert list(join(read_safetensors(file), {})) == ["layer.weight"]
            continue
        with pytest.raises(UnsupportedModel, match="tiles"):
            join(read_safetensors(file), {})


def test_scales_of_activations_are_passed_over(tmp_path: pathlib.Path) -> None:
    """transformers' fp8 with scales measured before: one beside each matrix, under a name of its own."""
    tensors = load_file(MADE / "transformers-fp8-whole.safetensors")
    del tensors["values"]
    save_file(tensors | {"layer.activation_scale": torch.tensor(0.02)}, tmp_path / "model.safetensors")
    (found,) = join(read_safetensors(tmp_path / "model.safetensors"), {"quant_method": "fp8"}).values()
    assert isinstance(found, Composite) and found.form.facts["inputs"]
