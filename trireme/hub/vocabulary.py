"""Tokenizers that come as tables of tokens (GGUF, SentencePiece, llama2.c), rewritten as a tokenizer.json.

Knows tokens, scores and merges; running them is the `tokenizers` library's, through `tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.hub.gguf import GgufFile
from trireme.hub.pretokenizers import ADDS_BOS, COMPOSES, WHOLE_WORDS, pre_tokenizer

MAX_VOCABULARY = 4_000_000
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"


@dataclass
class Vocabulary:
    """Tokens by id with their kinds, and what else makes a tokenizer of them."""

    tokens: list[str]
    kinds: Sequence[int]
    scores: Sequence[float] | None = None  # SentencePiece: the better a piece, the sooner it is merged
    merges: list[str] | None = None  # byte-level BPE
    words: str = "default"  # its kind of pre-tokenizer
    add_space_prefix: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    templates: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        """The tokenizer.json that behaves as this vocabulary does."""
        spec = self._byte_level() if self.merges is not None else self._sentencepiece()
        return json.dumps({"version": "1.0", "truncation": None, "padding": None, **spec}, ensure_ascii=False)

    def _byte_level(self) -> dict[str, Any]:
        assert self.merges is not None
        merges = []
        for line in self.merges:
            cut = line.find(" ", 1)
            if cut > 0:
                merges.append((line[:cut], line[cut + 1 :]))
        vocab = {token: i for i, token in enumerate(self.tokens) if self.kinds[i] != UNUSED}
        merges = [(left, right) for left, right in merges if left in vocab and right in vocab and left + right in vocab]
        return {
            "added_tokens": self._added(normalized=False),
            "normalizer": {"type": "NFC"} if self.words in COMPOSES else None,
            "pre_tokenizer": pre_tokenizer(self.words),
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": self.words in WHOLE_WORDS},
        }

    def _sentencepiece(self) -> dict[str, Any]:
        to_marks: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        to_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        steps: list[dict[str, Any]] = [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
        if self.add_space_prefix:
            to_marks = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, to_marks]}
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self.tokens[self.unknown_token_id] if self.unknown_token_id is not None else None
        return {
            "added_tokens": self._added(normalized=not self.add_space_prefix),
            "normalizer": to_marks,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": {
                "type": "BPE",
                "vocab": {token: i for i, token in enumerate(self.tokens)},
                "merges": self._merges_from_scores(),
                "byte_fallback": True,
                "fuse_unk": True,
                "unk_token": unknown,
            },
        }

    def _merges_from_scores(self) -> list[tuple[str, str]]:
        """Every way to join two pieces into a third, the best third first. Only plain pieces are ever joined."""
        assert self.scores is not None
        ids = {token: i for i, token in enumerate(self.tokens) if self.kinds[i] in (NORMAL, USER_DEFINED)}
        found: list[tuple[float, int, int, str, str]] = []
        for token, i in ids.items():
            score = -float(self.scores[i])
            for cut in range(1, len(token)):
                left = token[:cut]
                if left in ids:
                    right = token[cut:]
                    if right in ids:
                        found.append((score, ids[left], ids[right], left, right))
        found.sort()
        return [(left, right) for _, _, _, left, right in found]

    def _added(self, normalized: bool) -> list[dict[str, Any]]:
        """Tokens found in the text before anything else: control tokens as such, user-defined ones as plain text."""
        entries = []
        for i in np.flatnonzero(np.isin(np.asarray(self.kinds), (UNKNOWN, CONTROL, USER_DEFINED))).tolist():
            content, special = self.tokens[i], self.kinds[i] != USER_DEFINED
            if not content or (not special and not normalized and _SPACE in content and self.merges is None):
                continue
            entries.append(
                {
                    "id": i,
                    "content": content,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": normalized and not special,
                    "special": special,
                }
            )
        return entries


def vocabulary_of(file: GgufFile) -> Vocabulary:
    """The tokenizer that a GGUF file carries."""
    found = {key.removeprefix("tokenizer."): value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    model = found.get("ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(f"{file.path} has a tokenizer of kind {str(model)[:40]!r}.", "use one of: gpt2, llama")
    tokens = found.get("ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_VOCABULARY or not all(isinstance(t, str) for t in tokens):
        raise BadCheckpoint(f"{file.path} has no usable list of tokens.", "fetch the file again")
    words = str(found.get("ggml.pre", "default"))
    vocabulary = Vocabulary(
        tokens,
        _per_token(file, found, "token_type", len(tokens)),
        words=words,
        add_space_prefix=bool(found.get("ggml.add_space_prefix", True)),
        add_bos=bool(found.get("ggml.add_bos_token", model == "llama" or words in ADDS_BOS)),
        add_eos=bool(found.get("ggml.add_eos_token", False)),
    )
    for name in ("bos", "eos", "unknown"):
        value = found.get(f"ggml.{name}_token_id")
        if type(value) is int and 0 <= value < len(tokens):
            setattr(vocabulary, f"{name}_token_id", value)
    for key, value in found.items():
        if key.startswith("chat_template") and isinstance(value, str):
            vocabulary.templates[key.partition(".")[2] or "default"] = value
    if model == "llama":
        vocabulary.scores = _per_token(file, found, "scores", len(tokens))
    else:
        merges = found.get("ggml.merges")
        if not isinstance(merges, list) or not all(isinstance(m, str) for m in merges):
            raise BadCheckpoint(f"{file.path} has a BPE tokenizer and no merges.", "fetch the file again")
        vocabulary.merges = merges
    return vocabulary


def _per_token(file: GgufFile, found: dict[str, Any], name: str, count: int) -> Any:
    values = found.get(f"ggml.{name}")
    if not isinstance(values, np.ndarray) or len(values) != count:
        raise BadCheckpoint(f"{file.path} does not give {name} for each of its {count} tokens.", "fetch the file again")
    return values.tolist()
