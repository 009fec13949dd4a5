"""The llama2.c format, against numbers laid out by hand."""

import pathlib
import struct

import numpy as np
import pytest

from trireme.errors import BadCheckpoint
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.tokenizer import Tokenizer

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT = 8, 12, 2, 2, 1, 262, 4
SHAPES = [
    (WIDTH,),
    (WIDTH, WIDTH),
    (4, WIDTH),
    (4, WIDTH),
    (WIDTH, WIDTH),
    (WIDTH,),
    (INNER, WIDTH),
    (WIDTH, INNER),
    (INNER, WIDTH),
]
NAMES = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
NAMES += ["post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]


@pytest.fixture(params=[VOCAB, -VOCAB], ids=["tied", "untied"])
def folder(tmp_path: pathlib.Path, request: pytest.FixtureRequest) -> pathlib.Path:
    head = struct.pack("<7i", WIDTH, INNER, LAYERS, HEADS, KV_HEADS, request.param, CONTEXT)
    sizes = [VOCAB * WIDTH, *[LAYERS * int(np.prod(shape)) for shape in SHAPES], WIDTH, CONTEXT * 4]
    sizes += [VOCAB * WIDTH] if request.param < 0 else []
    (tmp_path / "m.bin").write_bytes(head + np.arange(sum(sizes), dtype="<f4").tobytes())
    tokens = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *[f"<0x{i:02X}>".encode() for i in range(256)], b" ", b"a", b" a"]
    entries = [struct.pack("<fi", -i, len(token)) + token for i, token in enumerate(tokens)]
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("<i", 8) + b"".join(entries))
    return tmp_path


def test_tensors_are_where_the_format_puts_them(folder: pathlib.Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config["tie_word_embeddings"] is ("lm_head.weight" not in checkpoint)
    place = VOCAB * WIDTH
    for name, shape in zip(NAMES, SHAPES, strict=True):
        size = int(np.prod(shape))
        for layer in range(LAYERS):
            stored = np.arange(place, place + size, dtype="<f4").reshape(shape)
            ours = checkpoint.weight(f"model.layers.{layer}.{name}.weight").raw()
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(name)
            if heads:
                stored = stored.reshape(heads, -1, 2, WIDTH).transpose(0, 2, 1, 3).reshape(shape)
            np.testing.assert_array_equal(ours, stored)
            place += size
    np.testing.assert_array_equal(checkpoint.weight("model.norm.weight").raw(), np.arange(place, place + WIDTH))


def test_tokens(folder: pathlib.Path) -> None:
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.encode("a a") == [1, 261, 261]
    assert tokenizer.decode([1, 261, 261]) == "a a"
    assert tokenizer.encode("!") == [1, 259, 3 + ord("!")]


def test_bytes_that_are_written_as_characters_are_bytes(folder: pathlib.Path) -> None:
    tokens = [b"<unk>", b"<s>", b"</s>", *[chr(i).encode() for i in range(256)], b" ", b"a", b" a"]
    entries = [struct.pack("<fi", -i, len(token)) + token for i, token in enumerate(tokens)]
    (folder / "tokenizer.bin").write_bytes(struct.pack("<i", 8) + b"".join(entries))
    tokenizer = Tokenizer.open(folder)
    for text in ("é", "日本", "a é€"):
        ids = tokenizer.encode(text)
        assert 0 not in ids and tokenizer.decode(ids) == text
    assert tokenizer.encode("é") == [1, 259, *[3 + byte for byte in "é".encode()]]


def test_broken_files_are_refused(folder: pathlib.Path) -> None:
    whole = (folder / "m.bin").read_bytes()
    for data in (
        b"",
        whole[:20],
        whole[:-4],
        whole + b"\0\0\0\0",
        struct.pack("<i", 7) + whole[4:],
        struct.pack("<i", -8) + whole[4:],
    ):
        (folder / "m.bin").write_bytes(data)
        with pytest.raises(BadCheckpoint):
            Checkpoint.open(folder)
    (folder / "m.bin").write_bytes(whole)
    tokens = (folder / "tokenizer.bin").read_bytes()
    for data in (tokens[:-1], tokens[:100], tokens[:8] + b"\xff\xff\xff\xff" + tokens[12:]):
        (folder / "tokenizer.bin").write_bytes(data)
        with pytest.raises(BadCheckpoint):
            Tokenizer.open(folder)
