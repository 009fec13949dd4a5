"""From checkpoint to worker: what does not fit together is refused in one line, and sizes add up."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest
import safetensors.torch
import tiny_models
import torch
from drive import Drive, ThreadGroup
from tiny_models import LENGTH, prompt

from trireme.config import resolve
from trireme.errors import BadCheckpoint, BadConfig, OutOfMemory, TriremeError, UnsupportedModel
from trireme.worker.worker import LocalWorker


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama2", tmp_path_factory.mktemp("llama2"))


@pytest.fixture
def folder(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def change_config(folder: pathlib.Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def change_tensors(folder: pathlib.Path, **changes: torch.Tensor | None) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors") | changes
    safetensors.torch.save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def refusal(folder: pathlib.Path, kind: type[TriremeError], **settings: Any) -> str:
    with pytest.raises(kind) as caught:
        LocalWorker(resolve({"backend": "reference", **settings}, environ={}), folder)
    assert "\n" not in str(caught.value) and caught.value.fix
    return str(caught.value)


def test_missing_tensor(folder: pathlib.Path) -> None:
    change_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    assert "no tensor model.layers.1.mlp.up_proj.weight" in refusal(folder, BadCheckpoint)


def test_misshapen_tensor(folder: pathlib.Path) -> None:
    change_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": torch.zeros(96, 47)})
    said = refusal(folder, BadCheckpoint)
    assert "[96, 47]" in said and "[96, 48]" in said and "up_proj" in said


def test_misshapen_norm(folder: pathlib.Path) -> None:
    change_tensors(folder, **{"model.norm.weight": torch.zeros(49)})
    assert "model.norm.weight" in refusal(folder, BadCheckpoint)


@pytest.mark.parametrize("names", [["NoSuchForCausalLM"], [], None])
def test_unknown_architecture(folder: pathlib.Path, names: Any) -> None:
    change_config(folder, architectures=names)
    assert "LlamaForCausalLM" in refusal(folder, UnsupportedModel)  # the fix names what is known


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "48"),
        ("num_attention_heads", -2),
        ("num_hidden_layers", 2**40),
        ("vocab_size", True),
        ("num_key_value_heads", 4),
        ("hidden_act", "mystery"),
        ("intermediate_size", None),
    ],
)
def test_config_out_of_its_mind(folder: pathlib.Path, name: str, value: Any) -> None:
    change_config(folder, **{name: value})
    said = refusal(folder, BadCheckpoint)
    assert name in said or str(value) in said


_ANYTHING = (None, -1, 2**40, "x", [1], float("inf"), {"rope_type": "yarn"})


@pytest.mark.parametrize(
    "family", ["llama-yarn", pytest.param("gemma3", marks=pytest.mark.wide), pytest.param("bloom", marks=pytest.mark.wide)]
)
def test_mutated_configs_are_refused_or_run(family: str, tmp_path: pathlib.Path) -> None:
    """Anything in the place of anything: one line, or a model that steps. Never a traceback."""
    tiny_models.save(family, tmp_path)
    raw, refused = json.loads((tmp_path / "config.json").read_text()), 0
    for name in raw:
        for value in _ANYTHING:
            (tmp_path / "config.json").write_text(json.dumps(raw | {name: value}))
            try:
                Drive(tmp_path, kv_tokens=32).run("a", prompt(12), max_tokens=2)
            except TriremeError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 30


def test_unknown_rope(folder: pathlib.Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    assert "spiral" in refusal(folder, UnsupportedModel)


def test_context_longer_than_the_model_has(folder: pathlib.Path) -> None:
    assert f"end at {LENGTH}" in refusal(folder, BadConfig, max_model_len=LENGTH + 1)


def test_more_kv_than_memory(folder: pathlib.Path) -> None:
    said = refusal(folder, OutOfMemory, kv_tokens=10**12)
    assert "bytes a token" in said and "--kv-tokens" in said


def test_context_longer_than_the_kv_asked_for(folder: pathlib.Path) -> None:
    assert "--max-model-len 64" in refusal(folder, OutOfMemory, max_model_len=100, kv_tokens=64)


def test_more_ranks_than_heads(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query head is computed by one rank: its part of the sum would count twice."""
    with pytest.raises(BadConfig, match=r"6 attention heads.*--tp 6"):
        ThreadGroup(resolve({"backend": "reference", "tp": 7}, environ={}), folder, monkeypatch)


def test_sizes_add_up(folder: pathlib.Path) -> None:
    drive = Drive(folder, max_model_len=60, kv_tokens=100, page_size=16)
    ready = drive.worker.ready
    assert ready.num_pages == 100 // 16 and ready.page_size == 16 and ready.max_model_len == 60
    assert ready.kv_bytes == 6 * 16 * 3 * 2 * 6 * 8 * 4  # pages, slots, layers, k and v, heads, head size, float32
    assert ready.weight_bytes == sum(p.numel() * 4 for p in tiny_models.model("llama2").parameters())
    assert ready.vocab_size == tiny_models.VOCAB and ready.dtype == "float32" and ready.backend == "reference"


def test_tied_weights_are_kept_once(tmp_path: pathlib.Path) -> None:
    drive = Drive(tiny_models.save("llama3", tmp_path), max_model_len=60)
    unique = {p.data_ptr(): p.numel() * 4 for p in tiny_models.model("llama3").parameters()}
    assert drive.worker.ready.weight_bytes == sum(unique.values())


def test_random_weights_run(folder: pathlib.Path) -> None:
    tokens = [Drive(folder, max_model_len=60, random_weights=True).run("a", prompt(5), max_tokens=6).tokens for _ in range(2)]
    assert len(tokens[0]) == 6 and tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_are_near(folder: pathlib.Path, dtype: str) -> None:
    _, exact = tiny_models.reference("llama2", prompt(20, 3), 1)
    run = Drive(folder, max_model_len=60, dtype=dtype).run("a", prompt(20, 3), max_tokens=1)
    found = torch.stack([run.logits[i] for i in range(20)])
    error = float((found - exact).norm() / exact.norm())
    assert 1e-5 < error < (0.05 if dtype == "bfloat16" else 0.01)
