"""Turns tokens into text as they arrive. Holds back incomplete characters, and text that may be the beginning of a stop string.

Knows the bytes of tokens through its tokenizer, and nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    special_ids: set[int]

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """One per request. The joined text does not depend on how the ids are split over `push` calls."""

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.stopped = False
        self._tokenizer, self._include_stop = tokenizer, include_stop
        self._hidden = tokenizer.special_ids if skip_special_tokens else set()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopString(text) for text in stop if text]
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text that is now final. After a stop string was found, it returns no more text."""
        if self.stopped:
            return ""
        data = b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._hidden)
        return self._emit(self._decoder.decode(data))

    def flush(self) -> str:
        """Ends the text and returns what was held back."""
        if self.stopped:
            return ""
        text = self._emit(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _emit(self, text: str) -> str:
        if not self._stops or not text:
            return text
        pending, start = self._held + text, len(self._held)
        longest = 0
        for i in range(start, len(pending)):
            longest, met = 0, 0
            for stop in self._stops:
                matched = stop.feed(pending[i])
                longest = max(longest, matched)
                if matched == len(stop.text):
                    met = max(met, matched)
            if met:
                self.stopped, self._held = True, ""
                return pending[: i + 1] if self._include_stop else pending[: i + 1 - met]
        self._held = pending[len(pending) - longest :]
        return pending[: len(pending) - longest]


class _StopString:
    """How much of a stop string the text ends with, kept up to date one character at a time (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._shorter = [0] * len(text)  # for text[: i + 1]: the length of its longest proper prefix that is also a suffix
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._shorter[length - 1]
            length += text[i] == text[length]
            self._shorter[i] = length

    def feed(self, character: str) -> int:
        """The number of characters matched so far. Must not be called after a full match, because the text ends there."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched
