"""Grammars over vocabularies of every make: whatever the engine allows it also takes, and what comes out is what was asked for."""

from __future__ import annotations

import pathlib
import random
import re
import unicodedata
from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import decoders, models, normalizers, pre_tokenizers

from trireme.api.parameters.grammars import choice_grammar
from trireme.errors import BadRequest
from trireme.hub.grammar import GrammarTokens
from trireme.hub.tokenizer import Tokenizer

QUICK = settings(max_examples=60, deadline=None)
END = 0
WORDS = ["he", "el", "lo", "wor", "ld", "ye", "no", "tru", "als"]


def byte_level() -> Tokenizer:
    """Byte-level merges that compose characters first, without tokens for some bytes: as Qwen's and SmolLM2's are."""
    missing = {"\x04", "\x1d", bytes([0xF1]).decode("latin-1")}
    alphabet = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if _byte(letter) not in missing]
    tokens = ["<end>", *alphabet, *_grown()]
    inner = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=_merges()))
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, eos_token_id=END)


def sentencepiece() -> Tokenizer:
    """A space before every text and a token for every byte besides those for characters: as Llama's is."""
    letters = sorted({letter for word in WORDS for letter in word} | set("▁abcxyz0123456789{}[]:,\"'"))
    tokens = ["<end>", *(f"<0x{value:02X}>" for value in range(256)), *letters, *_grown(), "▁h", "▁y"]
    merges = [*_merges(), ("▁", "h"), ("▁", "y")]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, eos_token_id=END)


def _byte(letter: str) -> str:
    """The character of a byte, which byte-level vocabularies spell as a visible one."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in visible]
    return letter if ord(letter) < 256 else chr(hidden[ord(letter) - 256])


def _grown() -> list[str]:
    return [word[:length] for word in WORDS for length in range(2, len(word) + 1)]


def _merges() -> list[tuple[str, str]]:
    return [(word[: length - 1], word[length - 1]) for word in WORDS for length in range(2, len(word) + 1)]


class Walk:
    """Random ways through grammars, by one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: list[int]):
        self.tokenizer, self.ends = tokenizer, eos_token_ids
        self.tokens = GrammarTokens(tokenizer, eos_token_ids)

    def text(self, grammar: str, chance: random.Random, longest: int = 60) -> bytes | None:
        """The bytes of tokens that were allowed, each chosen at random; None where no token of this model goes on."""
        matcher, spelled = self.tokens.matcher(grammar), b""
        for _ in range(longest):
            if matcher.is_stopped():
                return spelled
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            assert not matcher.is_error(), matcher.get_error()
            ids = np.flatnonzero(allowed[: self.tokens.width])
            if not len(ids):
                return None
            short = [token for token in ids[:300].tolist() if len(self.tokenizer.token_bytes(token)) == 1]
            token = chance.choice(short) if short and chance.random() < 0.3 else int(chance.choice(ids))
            if token in self.ends:
                return spelled
            assert matcher.consume_token(token), (token, spelled, matcher.get_error())
            spelled += self.tokenizer.token_bytes(token)
        return spelled


@pytest.fixture(scope="module", params=["byte level", "sentencepiece", "smollm2"])
def walk(request: pytest.FixtureRequest, smollm2_path: pathlib.Path) -> Walk:
    made: dict[str, Callable[[], Tokenizer]] = {"byte level": byte_level, "sentencepiece": sentencepiece}
    if request.param in made:
        return Walk(made[request.param](), [END])
    return Walk(Tokenizer.open(smollm2_path), [2, 0])


_LETTERS = st.characters(exclude_categories=["Cs"])
_TEXTS = st.lists(
    st.text(_LETTERS | st.sampled_from("he lo\x04\x1d\U00040000e\u0301"), min_size=1, max_size=8), min_size=1, max_size=4
)


def test_choices_of_any_text(walk: Walk) -> None:
    @QUICK
    @given(texts=_TEXTS, seed=st.integers(0, 1000))
    def attempt(texts: list[str], seed: int) -> None:
        found = walk.text(choice_grammar(texts, ""), random.Random(seed), longest=200)
        assert found is None or found.decode() in texts

    attempt()


def test_texts_that_tokenizers_would_change(walk: Walk) -> None:
    for text in [
        " he",
        "hello",
        "e\u0301",
        "\u212b",
        "\r\n",
        "▁he",
        "  ye",
        "\u00a0",
        "a\ufb01b",
        "<end>",
        unicodedata.lookup("SNOWMAN"),
    ]:
        for seed in range(4):
            assert walk.text(choice_grammar([text], ""), random.Random(seed)) == text.encode(), text


PATTERNS = [
    r"[0-9]{1,9}-[a-c]*",
    r"(hello|world)+ ?!",
    r"(?s:.){0,12}",
    r"[^a]{1,9}",
    r"[é-ü]{1,4}",
    r"(🎉|🧙|x)*",
    r"[a-z]+\r\n",
    r"\s+",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(walk: Walk, pattern: str) -> None:
    for seed in range(6):
        found = walk.text(LLMatcher.grammar_from_regex(pattern), random.Random(seed), longest=400)
        whole = found is not None and len(found) < 300 and re.fullmatch(pattern, found.decode())
        assert found is None or len(found) >= 300 or whole, found


def test_schemas(walk: Walk) -> None:
    texts = {"enum": ["é", "🎉x", "a\nb", "hello", None, 1.5]}
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string"}, "e": texts, "n": {"type": "number"}},
        "required": ["e", "s"],
    }
    for seed in range(12):
        walk.text(LLMatcher.grammar_from_json_schema(schema), random.Random(seed))


def test_what_a_model_cannot_write_is_refused() -> None:
    tokens = GrammarTokens(byte_level(), [END])
    for text in ("\x1d", "\U00040000", "\x04hello"):
        with pytest.raises(BadRequest, match="no tokens"):
            tokens.check(choice_grammar([text], ""))
        tokens.check(choice_grammar([text, "hello"], ""))
    assert Walk(byte_level(), [END]).text(choice_grammar(["he\x1d"], ""), random.Random(0)) is None
