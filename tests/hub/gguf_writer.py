"""A small writer of GGUF files for tests, independent of the reader."""

import pathlib
import struct
from typing import Any

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "BF16": 30}
SIZES = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144)}
SCALES = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1, "Q4_K": 2}  # how many float16 a block begins with


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> bytes:
    """A metadata value with its kind in front."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 2**32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    first = value[0] if value else 0
    kind, code = {str: (8, ""), float: (6, "f"), int: (5, "i"), list: (9, "")}[type(first)]
    head = struct.pack("<IIQ", 9, kind, len(value))
    if kind == 8:
        return head + b"".join(text(item) for item in value)
    if kind == 9:
        return head + b"".join(typed(item)[4:] for item in value)
    return head + struct.pack(f"<{len(value)}{code}", *value)


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]], *, version: int = 3, alignment: int = 32
) -> bytes:
    """`tensors`: name to (kind, shape in numpy's order, bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        body += bytes(-len(body) % alignment)
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", TYPES[kind], len(body))
        body += data
    return head + bytes(-len(head) % alignment) + body


def random_tensor(kind: str, *shape: int, seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    values, size = SIZES[kind]
    count = int(np.prod(shape)) // values * size
    if kind == "F32":
        return kind, shape, np.random.default_rng(seed).normal(size=shape).astype("<f4").tobytes()
    blocks = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8).reshape(-1, size)
    blocks[:, 1 : 2 * SCALES.get(kind, 0) : 2] &= 0xBF  # scales that are not finite are refused
    return kind, shape, blocks.tobytes()


def llama_metadata(**changes: Any) -> dict[str, Any]:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|end|>", "<|endoftext|>", "Ġ"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 4,
    }
    return metadata | changes


def llama_tensors(kind: str = "Q8_0") -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        "token_embd.weight": random_tensor(kind, 6, 32, seed=1),
        "output_norm.weight": random_tensor("F32", 32, seed=2),
        "blk.0.attn_norm.weight": random_tensor("F32", 32, seed=3),
        "blk.0.attn_q.weight": random_tensor(kind, 32, 32, seed=4),
        "blk.0.attn_k.weight": random_tensor(kind, 16, 32, seed=5),
        "blk.0.attn_v.weight": random_tensor(kind, 16, 32, seed=6),
        "blk.0.attn_output.weight": random_tensor(kind, 32, 32, seed=7),
        "blk.0.ffn_norm.weight": random_tensor("F32", 32, seed=8),
        "blk.0.ffn_gate.weight": random_tensor(kind, 64, 32, seed=9),
        "blk.0.ffn_up.weight": random_tensor(kind, 64, 32, seed=10),
        "blk.0.ffn_down.weight": random_tensor(kind, 32, 64, seed=11),
    }


def write(path: pathlib.Path, metadata: dict[str, Any], tensors: dict[str, Any], **options: Any) -> pathlib.Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path
