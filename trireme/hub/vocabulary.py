"""Builds working tokenizers from tables of tokens (GGUF, SentencePiece, llama2.c).

Knows tokens, scores and merges; running them is the `tokenizers` library's, through `tokenizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers

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
    scores: Sequence[float] | None = None  # SentencePiece: pieces with a higher score are merged first
    merges: list[str] | None = None  # byte-level BPE
    words: str = "default"  # its kind of pre-tokenizer
    add_space_prefix: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unknown_token_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    templates: dict[str, str] = field(default_factory=dict)

    def build(self, merge_ids: np.ndarray | None = None) -> tokenizers.Tokenizer:
        """The tokenizer that behaves as this vocabulary does. `merge_ids` spares computing `merges_from_scores` again."""
        if self.merges is not None:
            return self._byte_level()
        return self._sentencepiece(self.merges_from_scores() if merge_ids is None else merge_ids)

    def merges_from_scores(self) -> np.ndarray:
        """Every way to join two pieces into a third, as pairs of ids, the best third first. Only plain pieces are joined."""
        assert self.scores is not None
        ids = {token: i for i, token in enumerate(self.tokens) if self.kinds[i] in (NORMAL, USER_DEFINED)}
        found = [
            (i, ids[token[:cut]], ids[token[cut:]])
            for token, i in ids.items()
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        joined, left, right = np.array(found, dtype=np.int32).reshape(-1, 3).T
        order = np.lexsort((right, left, -np.asarray(self.scores)[joined]))
        return np.stack((left[order], right[order]), axis=1)

    def _byte_level(self) -> tokenizers.Tokenizer:
        assert self.merges is not None
        vocab = {token: i for i, token in enumerate(self.tokens) if self.kinds[i] != UNUSED}
        whole_words = self.words in WHOLE_WORDS
        try:
            pairs = [(left, right) for left, right in (line.split(" ", 1) for line in self.merges)]
            model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words)
        except Exception:  # the library refuses merges whose parts are not tokens; those merges are left out
            model = models.BPE(vocab=vocab, merges=_usable(self.merges, vocab), ignore_merges=whole_words)
        built = tokenizers.Tokenizer(model)
        if self.words in COMPOSES:
            built.normalizer = normalizers.NFC()
        built.pre_tokenizer = pre_tokenizer(self.words)
        built.decoder = decoders.ByteLevel()
        self._add_tokens(built, normalized=False)
        return built

    def _sentencepiece(self, merge_ids: np.ndarray) -> tokenizers.Tokenizer:
        tokens = self.tokens
        merges = [(tokens[left], tokens[right]) for left, right in merge_ids.tolist()]
        unknown = tokens[self.unknown_token_id] if self.unknown_token_id is not None else None
        vocab = {token: i for i, token in enumerate(tokens)}
        built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
        to_marks: Any = normalizers.Replace(" ", _SPACE)
        steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.add_space_prefix:
            to_marks = normalizers.Sequence([normalizers.Prepend(_SPACE), to_marks])
            steps.append(decoders.Strip(" ", 1, 0))
        built.normalizer = to_marks
        built.decoder = decoders.Sequence(steps)
        self._add_tokens(built, normalized=not self.add_space_prefix)
        return built

    def _add_tokens(self, built: tokenizers.Tokenizer, normalized: bool) -> None:
        """Tokens found in the text before anything else: control tokens as such, user-defined ones as plain text."""
        added = []
        for i in np.flatnonzero(np.isin(np.asarray(self.kinds), (UNKNOWN, CONTROL, USER_DEFINED))).tolist():
            content, special = self.tokens[i], self.kinds[i] != USER_DEFINED
            # Where every piece of text gets a space in front, a token that spells a space cannot be found before that.
            if content and (special or normalized or _SPACE not in content or self.merges is not None):
                added.append(tokenizers.AddedToken(content, normalized=normalized and not special, special=special))
        built.add_tokens(added)


def _usable(merges: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of two tokens into a third."""
    found = []
    for line in merges:
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut > 0 and left in vocab and right in vocab and left + right in vocab:
            found.append((left, right))
    return found


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
