"""Safetensors files against the format's own library; broken ones are refused in one line."""

import json
import pathlib
import random
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from trireme.errors import BadCheckpoint, TriremeError
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.safetensors import read_safetensors

ARRAYS = {
    "model.a.weight": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
    "model.b.weight": np.arange(4, dtype=np.int64),
    "c": np.float16([[1.5], [2.5]]),
    "scalar": np.array(3, dtype=np.int8),
    "empty": np.zeros((0, 4), dtype=np.float32),
}


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    save_file(ARRAYS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def with_header(header: object, body: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_reads_what_the_library_wrote(file: pathlib.Path) -> None:
    weights = read_safetensors(file)
    assert weights.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert weights[name].shape == array.shape
        np.testing.assert_array_equal(weights[name].raw(), array)


def test_folder_with_index(tmp_path: pathlib.Path) -> None:
    save_file({"model.x": np.ones(3, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"lm_head.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    places = {"model.x": "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "eos_token_id": [1, 2]}')
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(checkpoint.names()) == sorted(places)
    assert checkpoint.weight("lm_head.weight").shape == (2, 2)
    assert checkpoint.eos_token_ids() == [1, 2]
    with pytest.raises(BadCheckpoint, match=r"no tensor lm_head\.bias; nearest are lm_head\.weight"):
        checkpoint.weight("lm_head.bias")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert Checkpoint.open(tmp_path).eos_token_ids() == [7]
    for wrong in ("../evil.safetensors", "/etc/passwd", "missing.safetensors", ".."):
        index.write_text(json.dumps({"weight_map": {"model.x": wrong}}))
        with pytest.raises(BadCheckpoint):
            Checkpoint.open(tmp_path)


def test_body_without_its_first_word(file: pathlib.Path) -> None:
    save_file({"h.0.weight": np.ones(2, np.float32)}, file)
    (file.parent / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(file.parent)
    assert "transformer.h.0.weight" in checkpoint and "transformer.h.1.weight" not in checkpoint


def test_pickles_come_through_the_loader_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BadCheckpoint, match="pickled"):
        Checkpoint.open(tmp_path).names()
    asked = []

    def loader(path: pathlib.Path) -> dict[str, tuple[str, np.ndarray]]:
        asked.append(path)
        return {"w": ("F32", np.ones((2, 2), np.float32))}

    checkpoint = Checkpoint.open(tmp_path, torch_loader=loader)
    assert checkpoint.bin_files == [tmp_path / "pytorch_model.bin"]
    assert checkpoint.weight("w").rows(slice(0, 1)).raw().tolist() == [[1.0, 1.0]]
    assert asked == checkpoint.bin_files


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
BROKEN = {
    "empty": b"",
    "short": b"\x10",
    "header beyond the end": struct.pack("<Q", 1 << 62) + b"{}",
    "not json": with_header(b"{oops"),
    "deep": with_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "list": with_header([1]),
    "incomplete": with_header({"a": {"dtype": "F32"}}),
    "truncated": with_header({"a": ENTRY | {"shape": [2, 200], "data_offsets": [0, 1600]}}),
    "wrong size": with_header({"a": ENTRY | {"shape": [2, 3]}}),
    "overflow": with_header({"a": ENTRY | {"shape": [1 << 62, 4]}}),
    "negative": with_header({"a": ENTRY | {"shape": [-2, -2]}}),
    "backwards": with_header({"a": ENTRY | {"data_offsets": [16, 0]}}),
    "boolean": with_header({"a": ENTRY | {"shape": [True, 4]}}),
    "zero with a huge axis": with_header({"a": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}),
    "overlap": with_header({"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 24]}}),
    "twice": with_header(b'{"a":%b,"a":%b}' % ((json.dumps(ENTRY).encode(),) * 2)),
    "unknown type": with_header({"a": ENTRY | {"dtype": "Q99"}}),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_broken_files_are_refused(tmp_path: pathlib.Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(TriremeError) as caught:
        read_safetensors(path)
    assert "\n" not in str(caught.value)


def test_mutations_never_escape(file: pathlib.Path) -> None:
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(1)
    refused = 0
    for _ in range(2500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(header)] = rng.choice([rng.randrange(256), 0x30 + rng.randrange(10), 0x5D, 0x2C, 0xFF])
        file.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        try:
            for weight in read_safetensors(file).values():
                weight.raw()
        except TriremeError:
            refused += 1
    assert refused > 400
