"""SentencePiece's tokenizer.model: a protobuf of pieces with scores and kinds. Reads those fields and skips the rest."""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Iterator

from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.hub.vocabulary import MAX_VOCABULARY, NORMAL, Vocabulary
from trireme.hub.weights import map_file

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of the model
_TEXT, _SCORE, _KIND = 1, 2, 3  # fields of a piece
_MODEL_TYPE, _UNKNOWN_ID, _BOS_ID, _EOS_ID = 3, 40, 41, 42  # fields of the trainer's settings
_ADD_DUMMY_PREFIX = 3  # field of the normalizer's settings
_BPE = 2
MAX_FILE = 64 << 20

Field = tuple[int, int | bytes]


def read_sentencepiece(path: pathlib.Path) -> Vocabulary:
    """The vocabulary of a BPE model."""
    data = map_file(path)
    if len(data) > MAX_FILE:
        raise BadCheckpoint(f"{path} is larger than {MAX_FILE} bytes.", "fetch the file again")
    tokens: list[str] = []
    kinds: list[int] = []
    scores: list[float] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(data.tobytes()):
            if number == _PIECES and isinstance(value, bytes):
                piece = dict(_fields(value))
                tokens.append(_bytes(piece, _TEXT, b"").decode("utf-8", "replace"))
                scores.append(struct.unpack("<f", _bytes(piece, _SCORE, bytes(4)))[0])
                kinds.append(int(piece.get(_KIND, NORMAL)))
            elif number == _TRAINER and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == _NORMALIZER and isinstance(value, bytes):
                normalizer = dict(_fields(value))
    except (IndexError, struct.error, TypeError, ValueError):
        raise BadCheckpoint(f"{path} is no SentencePiece model, or is broken.", "fetch the file again") from None
    if not 0 < len(tokens) <= MAX_VOCABULARY:
        raise BadCheckpoint(f"{path} has {len(tokens)} pieces.", "fetch the file again")
    if trainer.get(_MODEL_TYPE, 1) != _BPE:
        raise UnsupportedModel(f"{path} is a SentencePiece model that is not BPE.", "use a model with a tokenizer.json")
    vocabulary = Vocabulary(tokens, kinds, scores, add_space_prefix=bool(normalizer.get(_ADD_DUMMY_PREFIX, 1)))
    for name, field, default in (("unknown", _UNKNOWN_ID, 0), ("bos", _BOS_ID, 1), ("eos", _EOS_ID, 2)):
        place = trainer.get(field, default)
        if isinstance(place, int) and 0 <= place < len(tokens):
            setattr(vocabulary, f"{name}_token_id", place)
    return vocabulary


def _bytes(fields: dict[int, int | bytes], number: int, default: bytes) -> bytes:
    value = fields.get(number, default)
    if not isinstance(value, bytes):
        raise ValueError(number)
    return value


def _fields(data: bytes) -> Iterator[Field]:
    """(field number, value) in order. Raises IndexError or ValueError where the bytes make no sense."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value - (1 << 64) if value >> 63 else value
            continue
        if kind == 2:
            length, place = _varint(data, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(kind)
        if place + length > len(data):
            raise IndexError(place)
        yield key >> 3, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, place
    raise ValueError(place)
