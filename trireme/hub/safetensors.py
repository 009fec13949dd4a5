"""The safetensors file format: a JSON header, then bytes. Every length is checked before it is believed.

Knows files, not folders: which files make a checkpoint is `checkpoint`'s.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.hub.weights import PLAIN, Weight, map_file, num_bytes, weight_from_bytes

MAX_HEADER = 100_000_000
MAX_AXES = 8
_FETCH_AGAIN = "fetch the file again"


def read_safetensors(path: pathlib.Path) -> dict[str, Weight]:
    """Every tensor of the file, mapped."""
    data = map_file(path)
    if len(data) < 8:
        raise _broken(path, f"has {len(data)} bytes, too few for a header")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(MAX_HEADER, len(data) - 8):
        raise _broken(path, f"promises a header of {length} bytes and has {len(data) - 8} after its first 8")
    header = _parse(path, data[8 : 8 + length].tobytes())
    body = data[8 + length :]
    weights: dict[str, Weight] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, start, stop = _entry(path, name, entry)
        if stop > len(body):
            raise _broken(path, f"is truncated: tensor {name} ends at byte {stop} of {len(body)}")
        if stop - start != num_bytes(name, kind, shape):
            raise _broken(path, f"gives tensor {name} {stop - start} bytes, but {kind} {list(shape)} takes another number")
        weights[name] = weight_from_bytes(name, kind, shape, body[start:stop])
        spans.append((start, stop, name))
    _check_overlap(path, spans)
    return weights


def _parse(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"has a header that is not JSON ({str(error)[:80]})") from None
    if not isinstance(header, dict):
        raise _broken(path, "has a header that is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(path: pathlib.Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _broken(path, f"describes tensor {name[:100]!r} incompletely")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in PLAIN:
        raise UnsupportedModel(f"Tensor {name[:100]!r} of {path.name} has the unknown type {str(kind)[:40]!r}.")
    if not _naturals(shape) or len(shape) > MAX_AXES or not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(path, f"gives tensor {name[:100]!r} an impossible shape or place")
    return kind, tuple(shape), offsets[0], offsets[1]


def _naturals(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)


def _check_overlap(path: pathlib.Path, spans: list[tuple[int, int, str]]) -> None:
    spans.sort()
    for (_, stop, first), (start, _, second) in itertools.pairwise(spans):
        if start < stop:
            raise _broken(path, f"lets the tensors {first} and {second} overlap")


def _broken(path: pathlib.Path, what: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} {what}.", _FETCH_AGAIN)
