"""The same model in the forms that peers read: GGUF files of other block types, and a folder of float32 safetensors.

Knows file formats; nothing of engines.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadCheckpoint
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.gguf import KINDS, read_gguf
from trireme.hub.weights import Weight
from trireme.quant import decode

_CODES = {kind: code for code, kind in KINDS.items()}
_ALIGNMENT = 32


def q8_0_blocks(weight: Tensor) -> np.ndarray:
    """half d, int8 q[32] per 32 weights: w ≈ d q, d = max|w| / 127"""
    groups = weight.reshape(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 127.0
    q = (groups / scale.clamp_min(1e-30)).round().to(torch.int8)
    return _joined(weight, scale.half().numpy().view(np.uint8), q.numpy().view(np.uint8))


def q4_0_blocks(weight: Tensor) -> np.ndarray:
    """half d, nibbles of q[32] per 32 weights: w ≈ d (q - 8), d = the largest in size over -8; low nibbles come first"""
    groups = weight.reshape(-1, 32)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scale = largest / -8.0
    q = torch.where(scale == 0, 8.0, groups / torch.where(scale == 0, 1.0, scale) + 8.5).floor().clamp(0, 15).to(torch.uint8)
    return _joined(weight, scale.half().numpy().view(np.uint8), (q[:, :16] | (q[:, 16:] << 4)).numpy())


def _joined(weight: Tensor, *columns: np.ndarray) -> np.ndarray:
    return np.concatenate(columns, 1).reshape(weight.shape[0], -1)


MAKERS: dict[str, Callable[[Tensor], np.ndarray]] = {"Q4_0": q4_0_blocks, "Q8_0": q8_0_blocks}


def requantized(source: pathlib.Path, kind: str, target: pathlib.Path) -> pathlib.Path:
    """Writes `source` with every matrix below 8 bits requantized as `kind`. The metadata is copied byte for byte."""
    if target.exists():
        return target
    file = read_gguf(source)
    changed = {name: w.kind not in ("F32", "F16", "BF16", "Q8_0") for name, w in file.tensors.items()}
    whole = source.read_bytes()
    end = _metadata_end(whole, len(file.metadata), source)
    header = bytearray(whole[:8]) + struct.pack("<QQ", len(file.tensors), len(file.metadata)) + whole[24:end]
    place = 0
    for name, weight in file.tensors.items():
        new = kind if changed[name] else weight.kind
        header += struct.pack("<Q", len(name.encode())) + name.encode() + struct.pack("<I", len(weight.shape))
        header += struct.pack(f"<{len(weight.shape)}Q", *weight.shape[::-1]) + struct.pack("<IQ", _CODES[new], place)
        place += -(-_size(weight, new) // _ALIGNMENT) * _ALIGNMENT
    data = (_bytes(weight, kind if changed[name] else None) for name, weight in file.tensors.items())
    return _write(target, [bytes(header) + bytes(-len(header) % _ALIGNMENT)], data)


def _metadata_end(whole: bytes, count: int, source: pathlib.Path) -> int:
    """The offset at which the metadata ends and the list of tensors begins."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    place = 24

    def string() -> None:
        nonlocal place
        place += 8 + struct.unpack_from("<Q", whole, place)[0]

    def value(kind: int) -> None:
        nonlocal place
        if kind == 8:
            string()
        elif kind == 9:
            inner, number = struct.unpack_from("<IQ", whole, place)
            place += 12
            if inner in sizes:
                place += sizes[inner] * number
            else:
                for _ in range(number):
                    value(inner)
        elif kind in sizes:
            place += sizes[kind]
        else:
            raise BadCheckpoint(f"{source} has metadata of the unknown kind {kind}.")

    for _ in range(count):
        string()
        (kind,) = struct.unpack_from("<I", whole, place)
        place += 4
        value(kind)
    return place


def _size(weight: Weight, kind: str) -> int:
    if kind == weight.kind:
        return weight.raw().nbytes
    return int(np.prod(weight.shape)) // 32 * {"Q4_0": 18, "Q8_0": 34}[kind]


def _bytes(weight: Weight, kind: str | None) -> bytes:
    if kind is None:
        data = np.ascontiguousarray(weight.raw()).tobytes()
    else:
        data = MAKERS[kind](decode(weight, torch.float32)).tobytes()
    return data + bytes(-len(data) % _ALIGNMENT)


def _write(target: pathlib.Path, head: Iterable[bytes], data: Iterable[bytes]) -> pathlib.Path:
    """Writes a file under a temporary name until it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    with partial.open("wb") as file:
        for part in chain(head, data):
            file.write(part)
    os.replace(partial, target)
    return target


def float_folder(model: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """config.json and model.safetensors of a checkpoint's weights as float32, with the names and shapes of its config."""
    if (target / "config.json").exists():
        return target
    checkpoint = Checkpoint.open(model)
    names, entries, place = list(checkpoint.names()), {}, 0
    for name in names:
        size = 4 * int(np.prod(checkpoint.weight(name).shape))
        entries[name] = {"dtype": "F32", "shape": list(checkpoint.weight(name).shape), "data_offsets": [place, place + size]}
        place += size
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    data = (decode(checkpoint.weight(name), torch.float32).numpy().tobytes() for name in names)
    _write(target / "model.safetensors", [struct.pack("<Q", len(head)), head], data)
    plain = json.dumps(checkpoint.config, default=lambda value: value.tolist()).encode()
    _write(target / "config.json", [plain], [])
    return target
