"""What is not understood ends the loading in one line: storage, tensors and settings that no layer would use."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive
from safetensors.torch import load_file, save_file
from torch import Tensor

from trireme.errors import TriremeError, UnsupportedModel

BACKENDS = ("reference", "cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama2", tmp_path_factory.mktemp("llama2"))


@pytest.fixture
def folder(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "model"))


def set_config(folder: pathlib.Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def set_tensors(folder: pathlib.Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Puts what `change` gives in the place of each tensor."""
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors |= change(name, value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run(path: pathlib.Path, backend: str) -> None:
    Drive(path, full=False, backend=backend, kv_tokens=32, max_model_len=32).run("a", [1, 2, 3], max_tokens=1)


def refusal(path: pathlib.Path, backend: str, kind: type[TriremeError] = UnsupportedModel) -> str:
    with pytest.raises(kind) as caught:
        run(path, backend)
    assert "\n" not in str(caught.value) and caught.value.fix
    return str(caught.value)


def as_bare_fp8(name: str, value: Tensor) -> dict[str, Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: value}
    return {name: value.to(torch.float8_e4m3fn)}


def as_int8_without_scales(name: str, value: Tensor) -> dict[str, Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: value}
    scale = value.abs().amax(1, keepdim=True) / 127
    return {name: (value / scale).round().to(torch.int8), f"{name}_zero_point": scale}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "format"), [(as_bare_fp8, "fp8"), (as_int8_without_scales, "compressed-tensors")])
@pytest.mark.parametrize("said", [True, False])
def test_quantized_weights_that_are_not_read(folder: pathlib.Path, backend: str, change: Any, format: str, said: bool) -> None:
    """Whether the config says so or not."""
    set_tensors(folder, change)
    if said:
        set_config(folder, quantization_config={"quant_method": format})
    refused = refusal(folder, backend)
    assert format in refused and "_proj.weight" in refused


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_numbers_are_no_values(folder: pathlib.Path, backend: str) -> None:
    """A norm or a table of tokens as much as a matrix."""
    for part in ("model.norm", "embed_tokens"):
        set_tensors(folder, lambda name, value, part=part: {name: value.to(torch.int16) if part in name else value})
        assert "I16" in refusal(folder, backend)


def test_whole_numbers_that_nobody_reads_are_passed_over(folder: pathlib.Path) -> None:
    """Beside pickled weights there are often counters and masks."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors["model.embeddings.position_ids"] = torch.arange(8).reshape(1, 8)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    run(folder, "reference")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "fp8" in refusal(folder, "reference")
