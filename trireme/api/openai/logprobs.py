"""Log-probabilities in the two shapes of OpenAI's APIs. Knows tokens and their bytes; nothing of requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from trireme.api.openai.protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from trireme.hub.tokenizer import Tokenizer
from trireme.types import TokenLogprobs

LOWEST = -9999.0  # JSON cannot express minus infinity


class LogprobWriter:
    """Writes the log-probabilities of one answer."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False, skip_special_tokens: bool = True):
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()

    def spelling(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_bytes(token).decode("utf-8", "replace")

    def chat(self, entries: Iterable[TokenLogprobs], top: int) -> ChatLogprobs:
        return ChatLogprobs(
            [
                TokenLogprob(
                    self.spelling(entry.token),
                    finite(entry.logprob),
                    list(self._tokenizer.token_bytes(entry.token)),
                    [
                        TopLogprob(self.spelling(token), finite(logprob), list(self._tokenizer.token_bytes(token)))
                        for token, logprob in entry.top[:top]
                    ],
                )
                for entry in entries
            ]
        )

    def completion(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], top: int, offset: int = 0
    ) -> CompletionLogprobs:
        """Writes the shape of text completions. An entry is None for a token without context. The text begins at `offset`."""
        found = CompletionLogprobs([], [], [], [])
        for token, entry in zip(tokens, entries, strict=True):
            found.tokens.append(self.spelling(token))
            found.token_logprobs.append(None if entry is None else finite(entry.logprob))
            found.top_logprobs.append(None if entry is None else self._top(entry, top))
            found.text_offset.append(offset)
            offset += self.length(token)
        return found

    def length(self, token: int) -> int:
        """The number of characters that the token adds to the text, estimated from this token alone."""
        return 0 if token in self._hidden else len(self._tokenizer.token_bytes(token).decode("utf-8", "ignore"))

    def _top(self, entry: TokenLogprobs, top: int) -> dict[str, float]:
        """The alternatives and the chosen token. Among tokens with the same spelling, only the likeliest is kept."""
        found: dict[str, float] = {}
        for token, logprob in [*entry.top[:top], (entry.token, entry.logprob)]:
            name = self.spelling(token)
            found[name] = max(found.get(name, LOWEST), finite(logprob))
        return found


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LOWEST else LOWEST
