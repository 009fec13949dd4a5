"""The llama2.c file format: a header of seven numbers, then float32 weights; a second file holds the tokens.

Knows these two files only. The result is the same as for any other checkpoint.
"""

from __future__ import annotations

import pathlib
import struct
from typing import Any

from trireme.errors import BadCheckpoint
from trireme.hub.gguf_models import paired_rows
from trireme.hub.vocabulary import BYTE, CONTROL, MAX_VOCABULARY, NORMAL, UNKNOWN, Vocabulary
from trireme.hub.weights import Weight, map_file, weight_from_bytes

Layout = list[tuple[str, tuple[int, ...]]]  # name and shape of each tensor, in the file's order

_FIXED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FIRST_PIECE = 259  # after <unk>, <s>, </s> and the 256 bytes


def llama2c_files(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
    """(model, tokens) where `path` is a folder of those two .bin files, or the first of them."""
    if path.suffix == ".bin" and path.is_file() and path.with_name("tokenizer.bin").is_file():
        return path, path.with_name("tokenizer.bin")
    if not path.is_dir() or (path / "config.json").exists() or not (path / "tokenizer.bin").is_file():
        return None
    models = sorted(file for file in path.glob("*.bin") if file.name != "tokenizer.bin")
    return (models[0], path / "tokenizer.bin") if len(models) == 1 else None


def read_llama2c(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Weight]]:
    """Settings and tensors under their Hugging Face names."""
    data = map_file(path)
    if len(data) < 28:
        raise _broken(path, "is too short for a header")
    width, inner, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", data[:28].tobytes())
    if min(width, inner, layers, heads, kv_heads, abs(vocab), context) <= 0 or width % (2 * heads) or heads % kv_heads:
        raise _broken(path, "has an impossible header")
    config = _FIXED | {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "vocab_size": abs(vocab),
        "max_position_embeddings": context,
        "tie_word_embeddings": vocab > 0,
    }
    kv_width = width // heads * kv_heads
    stacked = (
        ("input_layernorm", (width,)),
        ("self_attn.q_proj", (width, width)),
        ("self_attn.k_proj", (kv_width, width)),
        ("self_attn.v_proj", (kv_width, width)),
        ("self_attn.o_proj", (width, width)),
        ("post_attention_layernorm", (width,)),
        ("mlp.gate_proj", (inner, width)),
        ("mlp.down_proj", (width, inner)),
        ("mlp.up_proj", (inner, width)),
    )
    layout: Layout = [("model.embed_tokens.weight", (abs(vocab), width))]
    layout += [(name, (layers, *shape)) for name, shape in stacked]
    layout += [("model.norm.weight", (width,)), ("", (context, width // heads))]  # the nameless one is a table of rotations
    layout += [("lm_head.weight", (abs(vocab), width))] if vocab < 0 else []
    return config, _read_layout(path, data, layout, config)


def _read_layout(
    path: pathlib.Path, data: Any, layout: list[tuple[str, tuple[int, ...]]], config: dict[str, Any]
) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    place = 28
    for name, shape in layout:
        size = 4
        for axis in shape:
            size *= axis
        if place + size > len(data):
            raise _broken(path, f"is truncated at {name or 'the rotations'}")
        if name:
            weight = weight_from_bytes(name, "F32", shape, data[place : place + size])
            weights |= _by_layer(weight, config) if not name.endswith(".weight") else {name: weight}
        place += size
    if place != len(data):
        raise _broken(path, f"has {len(data) - place} bytes too many")
    return weights


def _by_layer(stacked: Weight, config: dict[str, Any]) -> dict[str, Weight]:
    """One tensor per layer from a stacked one. Reorders rows of q and k from llama2.c's rotated pairs to the checkpoint's order."""
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    found = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.{stacked.name}.weight"
        weight = stacked.part(layer)
        if stacked.name in heads:
            weight = weight.rows(paired_rows(weight.shape[0], heads[stacked.name]))
        found[name] = weight.renamed(name)
    return found


def llama2c_vocabulary(model: pathlib.Path, tokens: pathlib.Path) -> Vocabulary:
    """The SentencePiece vocabulary of llama2.c: as many tokens as the model has rows."""
    count = read_llama2c(model)[0]["vocab_size"]
    data = map_file(tokens).tobytes()
    texts, scores, place = [], [], 4
    for i in range(min(count, MAX_VOCABULARY)):
        if place + 8 > len(data):
            raise _broken(tokens, f"ends before token {i} of {count}")
        score, length = struct.unpack_from("<fi", data, place)
        place += 8 + length
        if length < 0 or place > len(data):
            raise _broken(tokens, f"ends within token {i} of {count}")
        text = data[place - length : place].decode("utf-8", "replace")
        texts.append(text.replace(" ", "▁") if i >= _FIRST_PIECE else text)
        scores.append(score)
    # Some files spell a byte token as the character with that number. It still stands for the byte.
    texts[:_FIRST_PIECE] = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]][: len(texts)]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(texts)][: len(texts)]
    return Vocabulary(texts, kinds, scores, bos_token_id=1, eos_token_id=2, unknown_token_id=0, add_bos=True)


def _broken(path: pathlib.Path, what: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} {what}.", "fetch the file again")
