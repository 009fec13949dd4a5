"""The GGUF file format, versions 2 and 3: metadata and tensors in one file. Every count is checked before it is believed.

Knows the format only. `gguf_models` knows what names and settings mean, `vocabulary` what the tokens mean.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import struct
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.hub.weights import Weight, map_file, num_bytes, weight_from_bytes

KINDS: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

MAX_AXES = 4
MAX_NESTING = 4
MAX_NAME = 65_535
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_LEAST_SIZE = {**{kind: struct.calcsize(code) for kind, code in _SCALARS.items()}, _STRING: 8, _ARRAY: 12}


@dataclass
class GgufFile:
    """What one file (or a set of split files) holds. Arrays of numbers are numpy arrays, strings are str."""

    path: pathlib.Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Weight] = field(default_factory=dict)


# By path, size and time: the tokenizer, the checkpoint and the worker of one process each open their model's file.
_OPEN: weakref.WeakValueDictionary[tuple[pathlib.Path, int, int], GgufFile] = weakref.WeakValueDictionary()


def read_gguf(path: pathlib.Path) -> GgufFile:
    """Metadata and mapped tensors; the first of a set of split files brings its siblings along. Not to be changed: it is shared
    with whoever else reads the file while somebody keeps it."""
    try:
        status = path.stat()
        key = (path, status.st_size, status.st_mtime_ns)
    except OSError:
        return _read_set(path)  # raises the error with its cause
    found = _OPEN.get(key)
    if found is None:
        found = _OPEN[key] = _read_set(path)
    return found


def _read_set(path: pathlib.Path) -> GgufFile:
    file = _read_one(path)
    count = file.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return file
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if not match or int(match[2]) != count:
        raise BadCheckpoint(f"{path} is one of {count} split files, but not the first.", "name the file *-00001-of-*.gguf")
    for number in range(2, count + 1):
        sibling = path.with_name(f"{match[1]}-{number:05d}-of-{match[2]}.gguf")
        if not sibling.exists():
            raise BadCheckpoint(f"{sibling} is missing: {path.name} is split in {count}.", "fetch all files of the set")
        file.tensors |= _read_one(sibling).tensors
    return file


def _read_one(path: pathlib.Path) -> GgufFile:
    reader = _Reader(path)
    if reader.data[:4] != b"GGUF":
        raise reader.broken("does not begin as a GGUF file")
    reader.place = 4
    version = reader.number("I")
    if version not in (2, 3):
        raise UnsupportedModel(f"{path} is GGUF version {version}; versions 2 and 3 are read.", "convert the model anew")
    num_tensors, num_keys = reader.number("Q"), reader.number("Q")
    reader.expect(num_keys, 13, "metadata entries")
    file = GgufFile(path)
    for _ in range(num_keys):
        key = reader.string(MAX_NAME)
        if key in file.metadata:
            raise reader.broken(f"has the key {key[:100]!r} twice")
        file.metadata[key] = reader.value(reader.number("I"), 0)
    reader.expect(num_tensors, 24, "tensors")
    entries = [_tensor_entry(reader) for _ in range(num_tensors)]
    _map_tensors(reader, file, entries)
    return file


def _tensor_entry(reader: _Reader) -> tuple[str, str, tuple[int, ...], int]:
    name = reader.string(MAX_NAME)
    num_axes = reader.number("I")
    if not 1 <= num_axes <= MAX_AXES:
        raise reader.broken(f"gives tensor {name[:100]!r} {num_axes} axes")
    sizes = tuple(reader.number("Q") for _ in range(num_axes))
    kind = reader.number("I")
    if kind not in KINDS:
        raise UnsupportedModel(f"Tensor {name[:100]!r} of {reader.path.name} has the unknown type {kind}.")
    if any(size >= 2**63 for size in sizes):
        raise reader.broken(f"gives tensor {name[:100]!r} an impossible shape")
    return name, KINDS[kind], sizes[::-1], reader.number("Q")  # the file's first axis is the one that varies fastest


def _map_tensors(reader: _Reader, file: GgufFile, entries: list[tuple[str, str, tuple[int, ...], int]]) -> None:
    alignment = file.metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65_536 or alignment & (alignment - 1):
        raise reader.broken("has an impossible alignment")
    start = -(-reader.place // alignment) * alignment
    space = len(reader.data) - start
    spans = []
    for name, kind, shape, place in entries:
        size = num_bytes(name, kind, shape)
        if place + size > space:
            raise reader.broken(f"is truncated: tensor {name[:100]!r} ends at byte {place + size} of {max(space, 0)}")
        if place % alignment:
            raise reader.broken(f"places tensor {name[:100]!r} off its alignment of {alignment}")
        if name in file.tensors:
            raise reader.broken(f"has the tensor {name[:100]!r} twice")
        file.tensors[name] = weight_from_bytes(name, kind, shape, reader.mapped[start + place : start + place + size])
        spans.append((place, place + size, name))
    spans.sort()
    for (_, stop, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < stop:
            raise reader.broken(f"lets the tensors {first[:100]} and {second[:100]} overlap")


class _Reader:
    """A read position in the bytes of one file. Each read advances it; a read past the end is refused."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.mapped = map_file(path)
        self.data = self.mapped.data
        self.place = 0

    def broken(self, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path} {what}.", "fetch the file again")

    def expect(self, count: int, least_size: int, what: str) -> None:
        """Refuses a count that the rest of the file could not hold."""
        if count * least_size > len(self.data) - self.place:
            raise self.broken(f"promises {count} {what}, more than its {len(self.data)} bytes can hold")

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        self.expect(1, size, "more numbers")
        (value,) = struct.unpack_from("<" + code, self.data, self.place)
        self.place += size
        return value

    def string(self, limit: int) -> str:
        length = self.number("Q")
        if length > limit:
            raise self.broken(f"has a string of {length} bytes where at most {limit} are allowed")
        self.expect(length, 1, "bytes of text")
        self.place += length
        return bytes(self.data[self.place - length : self.place]).decode("utf-8", "replace")

    def value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self.string(len(self.data))
        if kind == _ARRAY:
            return self.array(depth + 1)
        if kind not in _SCALARS:
            raise self.broken(f"has a metadata value of the unknown kind {kind}")
        number = self.number(_SCALARS[kind])
        return bool(number) if kind == _BOOL else number

    def array(self, depth: int) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind not in _LEAST_SIZE or depth > MAX_NESTING:
            raise self.broken(f"has a metadata array of kind {kind} at depth {depth}")
        self.expect(count, _LEAST_SIZE[kind], "array entries")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.array(depth + 1) for _ in range(count)]
        size = _LEAST_SIZE[kind] * count
        self.place += size
        dtype = np.dtype("?") if kind == _BOOL else np.dtype("<" + {"q": "i8", "Q": "u8"}.get(_SCALARS[kind], _SCALARS[kind]))
        if kind == _BOOL:
            return self.mapped[self.place - size : self.place] != 0
        return np.frombuffer(self.mapped[self.place - size : self.place].tobytes(), dtype=dtype)

    def strings(self, count: int) -> list[str]:
        """Reads many strings at once. Vocabularies have hundreds of thousands, so the loop does as little as possible."""
        data, place, end = self.data, self.place, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if place + 8 > end:
                raise self.broken("ends within an array of strings")
            (length,) = unpack(data, place)
            begin = place + 8
            place = begin + length
            if place > end:
                raise self.broken("ends within an array of strings")
            found.append(str(data[begin:place], "utf-8", "replace"))
        self.place = place
        return found
