"""Grammars over a tokenizer's tokens: what the grammar engine must know of a vocabulary, and whether a grammar is one.

Knows tokens as bytes; nothing of requests or logits. Every grammar is compiled under the same bounds, here and in the workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from trireme.errors import BadRequest
from trireme.hub.tokenizer import Tokenizer

# What one grammar may cost: about 0.1 s to compile and 10 ms a token at the very worst; common ones cost a hundredth of that.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=400_000, step_lexer_fuel=100_000, max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False
)


class GrammarTokens:
    """A vocabulary as the grammar engine wants it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], width: int = 0):
        """`width`: how many logits the model gives; ids beyond the tokenizer's own are never allowed."""
        self.width = width or tokenizer.vocab_size
        ends = [token for token in eos_token_ids if token < self.width] or [tokenizer.eos_token_id or 0]
        wrapped = _Wrapped(tokenizer, self.width, ends[0])
        self._inner = LLTokenizer(wrapped, n_vocab=self.width, eos_token=ends)  # type: ignore[arg-type]

    def matcher(self, grammar: str) -> LLMatcher:
        """Follows one text through the grammar; refuses a grammar that is none."""
        matcher = LLMatcher(self._inner, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise BadRequest(f"The grammar cannot be used: {_first_line(matcher.get_error())}.", "check the schema or grammar")
        return matcher


class _Wrapped:
    """The attributes that llguidance reads from a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, width: int, eos_token_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        known = min(width, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (width - known)
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < width)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special=False, allow_special=False)


def _first_line(error: str) -> str:
    return (error.strip().splitlines() or ["no reason given"])[0][:300].rstrip(".")
