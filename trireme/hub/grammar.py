"""Grammars over a tokenizer's tokens: describes a vocabulary to the grammar engine, and checks that a grammar is valid.

Knows tokens as bytes; nothing of requests or logits. Every grammar is compiled under the same bounds, here and in the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trireme.errors import BadRequest
from trireme.hub.tokenizer import Tokenizer

# What one grammar may cost: about 0.1 s to compile and 10 ms a token at the very worst; common ones cost a hundredth of that.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=400_000, step_lexer_fuel=100_000, max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
)
_LEAD = "\x02"  # no token joins this byte with what follows, so the text behind it is tokenized as in the middle of a text


class GrammarTokens:
    """A vocabulary as the grammar engine wants it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], width: int = 0):
        """`width`: how many logits the model gives; ids beyond the tokenizer's own are never allowed."""
        self.width = width or tokenizer.vocab_size
        ends = [token for token in eos_token_ids if token < self.width] or [tokenizer.eos_token_id or 0]
        wrapped = _Wrapped(tokenizer, self.width, ends[0])
        self._inner = LLTokenizer(wrapped, eos_token=ends)  # type: ignore[arg-type]
        wrapped.greedy = self._inner.greedy_tokenize

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher that follows one text through the grammar. Refuses a grammar that is not valid."""
        matcher = LLMatcher(self._inner, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadRequest(f"The grammar cannot be used: {first_line(matcher.get_error())}.", "check the schema or grammar")
        return matcher

    def check(self, grammar: str) -> None:
        """Refuses a grammar that is not valid, is too costly at its start, or starts with text that this model cannot write."""
        matcher = self.matcher(grammar)
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise BadRequest(f"The grammar cannot be used: {first_line(matcher.get_error())}.", "make it simpler")
        if not np.unpackbits(mask, bitorder="little")[: self.width].any() and not matcher.is_stopped():
            raise BadRequest("The grammar begins with characters for which this model has no tokens.", "change it")


class _Wrapped:
    """The attributes that llguidance reads from a tokenizer.

    Text that a grammar leaves no choice about is allowed only as the tokens that the tokenizer would write it in, so those
    tokens must spell that very text: a space put before it, a character normalized, a byte dropped would lead the engine astray.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, width: int, eos_token_id: int):
        self._tokenizer, self._width = tokenizer, width
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        known = min(width, tokenizer.vocab_size)
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < width)
        tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (width - known)
        self.tokens = tokens + _missing_bytes(tokens, set(self.special_token_ids))
        self.greedy: Callable[[str], list[int]] = tokenizer.encode  # the engine's own, once there is one

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        for lead in ("", _LEAD):
            ids = self._tokenizer.encode(lead + text, add_special=False, allow_special=False)
            found = self._ending(ids, text.encode())
            if found is not None:
                return found
        return self.greedy(text)

    def _ending(self, ids: list[int], text: bytes) -> list[int] | None:
        """The shortest run of tokens at the end that spells the text; None if there is none."""
        if any(token >= self._width for token in ids):
            return None
        spelled = b"".join(self.tokens[token] for token in ids)
        extra = len(spelled) - len(text)
        if extra < 0 or spelled[extra:] != text:
            return None
        begin = 0
        while extra > 0:
            extra -= len(self.tokens[ids[begin]])
            begin += 1
        return ids[begin:] if extra == 0 else None


def _missing_bytes(tokens: list[bytes], special: set[int]) -> list[bytes]:
    """Bytes that no token spells. The engine gets an extra token for each, which a model can never choose, so that it can tokenize
    any text."""
    single = {spelled for token, spelled in enumerate(tokens) if len(spelled) == 1 and token not in special}
    return [byte for byte in (bytes([value]) for value in range(256)) if byte not in single]


def first_line(error: str) -> str:
    """The first line of the engine's error message."""
    return (error.strip().splitlines() or ["no reason given"])[0][:300].rstrip(".")
