"""GGUF files: bytes against the format's own library, names and row orders against the converters' formulas, broken files."""

import pathlib
import random
import struct
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.hub.gguf_writer import TYPES, gguf_bytes, llama_metadata, llama_tensors, random_tensor, write
from trireme.blocks import BLOCKS
from trireme.errors import BadCheckpoint, TriremeError, UnsupportedModel
from trireme.hub.advice import advised
from trireme.hub.catalogue import CATALOGUE
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.gguf import KINDS, read_gguf
from trireme.hub.tokenizer import Tokenizer
from trireme.types import SamplingParams


def test_files_read_as_the_library_reads_them(tmp_path: pathlib.Path) -> None:
    tensors = llama_tensors() | {kind: random_tensor(kind, 3, 2, 512) for kind in TYPES}
    path = write(
        tmp_path / "m.gguf", llama_metadata(**{"a.float": 0.1, "a.negative": -5, "a.true": True, "a.floats": [1.5]}), tensors
    )
    reference = gguf.GGUFReader(path)
    file = read_gguf(path)
    assert len(file.tensors) == len(reference.tensors) == len(tensors)
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type.name
        assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
        np.testing.assert_array_equal(ours.raw().view(np.uint8).reshape(-1), tensor.data.view(np.uint8).reshape(-1))
    for key, value in file.metadata.items():
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == reference.fields[key].contents(), key


def test_block_sizes_are_the_librarys() -> None:
    for number, kind in KINDS.items():
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        assert gguf.GGMLQuantizationType(number).name == kind
        if kind in BLOCKS:
            assert BLOCKS[kind] == (values, size)


def test_settings_of_the_default_model(smollm2_path: pathlib.Path) -> None:
    config = Checkpoint.open(smollm2_path).config
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    assert {name: config[name] for name in expected} == expected
    assert Checkpoint.open(smollm2_path.parent).eos_token_ids()[0] == 2


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_llama_rows_come_in_the_checkpoints_order(tmp_path: pathlib.Path, version: int, kind: str) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m.gguf", llama_metadata(), llama_tensors(kind), version=version))
    for name, heads in (("q", 4), ("k", 2)):
        stored = read_gguf(tmp_path / "m.gguf").tensors[f"blk.0.attn_{name}.weight"].raw()
        ours = checkpoint.weight(f"model.layers.0.self_attn.{name}_proj.weight").raw()
        # The converter's permutation, applied to what we give back, must give what is stored.
        rows = ours.shape[0]
        again = ours.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(ours.shape)
        np.testing.assert_array_equal(again, stored)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["rope_theta"] == 500000.0
    assert checkpoint.eos_token_ids() == [4, 3]
    assert "lm_head.weight" not in checkpoint


def test_what_the_makers_recommend_to_sample_by(tmp_path: pathlib.Path) -> None:
    """From the metadata; for models of the catalogue whose file does not say it, from the catalogue."""
    said = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "penalty_repeat": 1.05, "penalty_last_n": 64}
    metadata = llama_metadata(**{f"general.sampling.{name}": value for name, value in said.items()})
    known = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert advised(Checkpoint.open(write(tmp_path / "m.gguf", metadata, llama_tensors())).generation) == known
    off = llama_metadata(**{"general.sampling.top_k": -1, "general.sampling.temp": float("nan"), "general.sampling.top_p": "high"})
    assert advised(Checkpoint.open(write(tmp_path / "off.gguf", off, llama_tensors())).generation) == {}
    name = CATALOGUE["qwen2.5-coder-1.5b"].files[0].name
    theirs = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert advised(Checkpoint.open(write(tmp_path / name, llama_metadata(), llama_tensors())).generation) == theirs
    assert advised(Checkpoint.open(write(tmp_path / name, metadata, llama_tensors())).generation) == known
    for entry in CATALOGUE.values():
        SamplingParams(**entry.sampling).check(1 << 31)


def test_gemma3_norms_are_given_an_offset(tmp_path: pathlib.Path) -> None:
    metadata = {key.replace("llama.", "gemma3."): value for key, value in llama_metadata().items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.block_count": 12, "gemma3.attention.key_length": 16}
    metadata |= {"gemma3.attention.sliding_window": 512}
    tensors = llama_tensors() | {
        "blk.0.post_ffw_norm.weight": random_tensor("F32", 32),
        "blk.0.attn_q_norm.weight": random_tensor("F32", 16),
    }
    checkpoint = Checkpoint.open(write(tmp_path / "m.gguf", metadata, tensors))
    assert checkpoint.weight("model.layers.0.pre_feedforward_layernorm.weight").offset == -1.0
    assert checkpoint.weight("model.layers.0.self_attn.q_norm.weight").rows(slice(0, 8)).offset == -1.0
    assert checkpoint.weight("model.layers.0.self_attn.q_proj.weight").offset == 0.0
    assert checkpoint.config["head_dim"] == 16 and checkpoint.config["sliding_window"] == 512
    assert checkpoint.config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 2
    q = checkpoint.weight("model.layers.0.self_attn.q_proj.weight").raw()
    np.testing.assert_array_equal(q.reshape(-1), np.frombuffer(tensors["blk.0.attn_q.weight"][2], np.uint8))


def test_bloom_rows_come_in_the_checkpoints_order(tmp_path: pathlib.Path) -> None:
    heads, width = 4, 32
    original = np.random.default_rng(0).normal(size=(3 * width, width)).astype("<f4")
    # The converter takes [head, (q, k, v), row] apart and stacks all q, all k, all v.
    split = original.reshape(heads, 3, width // heads, width)
    stacked = np.concatenate([split[:, i].reshape(width, width) for i in range(3)])
    metadata: dict[str, Any] = {
        "general.architecture": "bloom",
        "bloom.block_count": 1,
        "bloom.embedding_length": width,
        "bloom.attention.head_count": heads,
        "bloom.attention.layer_norm_epsilon": 1e-5,
        "bloom.context_length": 64,
    }
    tensors = {
        "token_embd.weight": random_tensor("F32", 6, width),
        "blk.0.attn_qkv.weight": ("F32", original.shape, stacked.tobytes()),
    }
    checkpoint = Checkpoint.open(write(tmp_path / "m.gguf", metadata, tensors))
    ours = checkpoint.weight("transformer.h.0.self_attention.query_key_value.weight").raw()
    np.testing.assert_array_equal(ours, original)
    assert checkpoint.config["n_head"] == heads and checkpoint.config["n_layer"] == 1


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: pathlib.Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    theirs = LlamaConfig(
        hidden_size=32 * 128,
        num_attention_heads=32,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    factors = (plain / scaled.numpy()).astype("<f4")
    metadata = llama_metadata(**{"llama.attention.key_length": 128})
    path = write(tmp_path / "m.gguf", metadata, llama_tensors() | {"rope_freqs.weight": ("F32", (64,), factors.tobytes())})
    assert Checkpoint.open(path).config["rope_scaling"] == pytest.approx(scaling)
    other = llama_tensors() | {"rope_freqs.weight": ("F32", (64,), (factors * 1.1).tobytes())}
    with pytest.raises(UnsupportedModel, match="rope factors"):
        Checkpoint.open(write(path, metadata, other))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_settings(tmp_path: pathlib.Path, kind: str) -> None:
    scaling = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 32}
    config = Checkpoint.open(write(tmp_path / "m.gguf", llama_metadata(**scaling), llama_tensors())).config
    assert config["rope_scaling"] == {"rope_type": kind, "type": kind, "factor": 4.0, "original_max_position_embeddings": 32}


def test_split_files_are_one_model(tmp_path: pathlib.Path) -> None:
    tensors = llama_tensors()
    names = list(tensors)
    first = tmp_path / "m-00001-of-00002.gguf"
    write(first, llama_metadata(**{"split.count": 2}), {name: tensors[name] for name in names[:4]})
    with pytest.raises(BadCheckpoint, match="missing"):
        Checkpoint.open(first)
    write(tmp_path / "m-00002-of-00002.gguf", {"split.count": 2}, {name: tensors[name] for name in names[4:]})
    assert len(Checkpoint.open(tmp_path).names()) == len(tensors)
    with pytest.raises(BadCheckpoint, match="not the first"):
        Checkpoint.open(tmp_path / "m-00002-of-00002.gguf")


def test_nested_arrays_are_bounded(tmp_path: pathlib.Path) -> None:
    file = read_gguf(write(tmp_path / "m.gguf", {"a": [[1, 2], [3]]}, {}))
    assert [part.tolist() for part in file.metadata["a"]] == [[1, 2], [3]]
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    (tmp_path / "deep.gguf").write_bytes(head + struct.pack("<IQ", 9, 1) * 100_000)
    with pytest.raises(BadCheckpoint, match="depth"):
        read_gguf(tmp_path / "deep.gguf")


def broken_files() -> dict[str, bytes]:
    good = gguf_bytes(llama_metadata(), llama_tensors())
    start = struct.pack("<4sI", b"GGUF", 3)
    tensor = struct.pack("<Q", 1) + b"w"
    return {
        "empty": b"",
        "magic": b"GGML" + good[4:],
        "version 1": good[:4] + struct.pack("<I", 1) + good[8:],
        "big endian": good[:4] + struct.pack(">I", 3) + good[8:],
        "too many keys": start + struct.pack("<QQ", 0, 1 << 60) + good[24:],
        "too many tensors": start + struct.pack("<QQ", 1 << 60, 0),
        "key too long": start + struct.pack("<QQQ", 0, 1, 1 << 50) + bytes(64),
        "array too long": start + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(64),
        "unknown kind": start + struct.pack("<QQQ", 0, 1, 1) + b"a" + struct.pack("<I", 77) + bytes(64),
        "five axes": start + struct.pack("<QQ", 1, 0) + tensor + struct.pack("<I5QIQ", 5, 1, 1, 1, 1, 1, 0, 0) + bytes(64),
        "no axes": start + struct.pack("<QQ", 1, 0) + tensor + struct.pack("<IIQ", 0, 0, 0) + bytes(64),
        "huge axes": start + struct.pack("<QQ", 1, 0) + tensor + struct.pack("<I2QIQ", 2, 1 << 62, 1 << 62, 0, 0) + bytes(64),
        "misaligned": start + struct.pack("<QQ", 1, 0) + tensor + struct.pack("<I1QIQ", 1, 1, 0, 5) + bytes(128),
        "half a block": start + struct.pack("<QQ", 1, 0) + tensor + struct.pack("<I1QIQ", 1, 33, 2, 0) + bytes(128),
        "truncated": good[:-100],
        "cut in the metadata": good[:200],
        "alignment": gguf_bytes(llama_metadata(**{"general.alignment": 12}), llama_tensors()),
    }


@pytest.mark.parametrize("name", broken_files())
def test_broken_files_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(broken_files()[name])
    with pytest.raises(TriremeError) as caught:
        Checkpoint.open(path)
    assert "\n" not in str(caught.value)


CHANGES: list[dict[str, Any]] = [
    {"general.architecture": "mamba9"},
    {"llama.attention.head_count": 0},
    {"llama.attention.head_count": "four"},
    {"llama.embedding_length": 33},
    {"llama.attention.head_count_kv": 5},
    {"llama.rope.scaling.type": "mystery"},
    {"llama.feed_forward_length": [64, 32]},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_impossible_settings_are_refused(tmp_path: pathlib.Path, change: dict[str, Any]) -> None:
    with pytest.raises(TriremeError):
        Checkpoint.open(write(tmp_path / "m.gguf", llama_metadata(**change), llama_tensors()))


@pytest.mark.parametrize("rounds", [1500, pytest.param(3000, marks=pytest.mark.wide)])
def test_mutations_never_escape(rounds: int, tmp_path: pathlib.Path) -> None:
    whole = gguf_bytes(llama_metadata(), llama_tensors())
    header = len(whole) - sum(len(data) for _, _, data in llama_tensors().values())
    path = tmp_path / "m.gguf"
    rng = random.Random(2)
    refused = 0
    for round_number in range(rounds):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(header)
            data[place] = rng.choice([rng.randrange(256), 0, 1, 0x7F, 0xFF])
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        try:
            checkpoint = Checkpoint.open(path)
            for name in checkpoint.names():
                checkpoint.weight(name).raw()
            if round_number % 16 == 0:
                Tokenizer.open(path).encode("ab <|end|>")
        except TriremeError:
            refused += 1
    assert refused > rounds / 4


def test_a_file_that_somebody_keeps_is_read_once(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "m.gguf", llama_metadata(), llama_tensors())
    kept = read_gguf(path)
    assert read_gguf(path) is kept
    write(path, llama_metadata(**{"llama.context_length": 256}), llama_tensors() | {"more": random_tensor("F32", 64)})
    assert read_gguf(path).metadata["llama.context_length"] == 256


def test_merges_of_no_tokens_are_left_out(tmp_path: pathlib.Path) -> None:
    """Some files list merges whose parts or results are not in the vocabulary."""
    merges = ["a c", "a b", "b a", "a", " a b"]
    path = write(tmp_path / "m.gguf", llama_metadata(**{"tokenizer.ggml.merges": merges}), llama_tensors())
    assert Tokenizer.open(path).encode("abba") == [2, 1, 0]
