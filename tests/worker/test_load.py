"""From files to a model: pickles only as tensors, every mismatch one clear line, memory counted before it is taken."""

import json
import pathlib
from typing import Any

import pytest
import tiny_models
import torch

from trireme.config import Config, resolve
from trireme.errors import BadCheckpoint, BadConfig, OutOfMemory, TriremeError, UnsupportedModel
from trireme.worker.worker import LocalWorker


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A tiny model as a folder of its own, to be spoiled."""
    model = tiny_models.model("llama2")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    return tmp_path


def load(path: pathlib.Path, **settings: Any) -> LocalWorker:
    return LocalWorker(configured(**settings), path)


def configured(**settings: Any) -> Config:
    return resolve({"backend": "reference", "max_running": 2, **settings}, environ={})


def pickled(folder: pathlib.Path, value: Any) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save(value, folder / "pytorch_model.bin")


def test_pickled_tensors_are_read(folder: pathlib.Path) -> None:
    pickled(folder, {name: value.bfloat16() for name, value in tiny_models.model("llama2").state_dict().items()})
    assert load(folder).ready.vocab_size == tiny_models.VOCAB


def test_pickled_code_never_runs(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple:
            return pathlib.Path.touch, (tmp_path / "touched",)

    pickled(folder, {"model.embed_tokens.weight": Hostile()})
    with pytest.raises(BadCheckpoint, match="more than tensors"):
        load(folder)
    assert not (tmp_path / "touched").exists()


def spoil(folder: pathlib.Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "word"),
    [
        ({"architectures": ["NoSuchModel"]}, UnsupportedModel, "NoSuchModel"),
        ({"architectures": None}, UnsupportedModel, "none named"),
        ({"hidden_size": 64}, BadCheckpoint, "shape"),
        ({"num_hidden_layers": 4}, BadCheckpoint, "model.layers.3"),
        ({"hidden_size": -1}, BadCheckpoint, "hidden_size"),
        ({"hidden_size": 10**12}, BadCheckpoint, "hidden_size"),
        ({"vocab_size": "many"}, BadCheckpoint, "vocab_size"),
        ({"num_key_value_heads": 5}, BadCheckpoint, "5 KV heads"),
        ({"hidden_act": "sigmoidal"}, BadCheckpoint, "sigmoidal"),
        ({"rope_parameters": {"rope_type": "spiral"}}, UnsupportedModel, "spiral"),
    ],
)
def test_what_does_not_fit_is_one_line(folder: pathlib.Path, changes: dict, kind: type[TriremeError], word: str) -> None:
    spoil(folder, **changes)
    with pytest.raises(kind) as caught:
        load(folder)
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_kv_is_counted_before_it_is_taken(folder: pathlib.Path) -> None:
    with pytest.raises(OutOfMemory, match="--kv-tokens"):
        load(folder, kv_tokens=10**12)
    with pytest.raises(OutOfMemory, match="--max-model-len 32"):
        load(folder, kv_tokens=32, max_model_len=64)
    with pytest.raises(BadConfig, match="positions end at"):
        load(folder, max_model_len=10**6)


def test_what_is_not_set_shrinks_to_fit(folder: pathlib.Path) -> None:
    ready = load(folder, kv_tokens=40, page_size=16).ready
    assert ready.num_pages == 2 and ready.max_model_len == 32


@pytest.mark.parametrize(("page_size", "expected"), [(1, (96, 1)), (16, (6, 16)), (0, (2, 48))])
def test_page_sizes(folder: pathlib.Path, page_size: int, expected: tuple[int, int]) -> None:
    ready = load(folder, kv_tokens=96, page_size=page_size, max_model_len=48).ready
    assert (ready.num_pages, ready.page_size) == expected


def test_random_weights_need_no_tensors(folder: pathlib.Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert load(folder, random_weights=True).ready.weight_bytes > 0
