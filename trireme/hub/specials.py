"""Special tokens in a rendered conversation: tells those that the template wrote from those that a user typed.

Knows their spelling and their ids; nothing of templates or merging.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any


class Specials:
    """The special tokens of one tokenizer."""

    def __init__(self, ids: dict[str, int]) -> None:
        self._ids = ids
        spelled = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        self._beginnings = {special[:length] for special in spelled for length in range(1, len(special))}
        self._longest = len(spelled[0]) if spelled else 0

    @staticmethod
    def mark() -> str:
        """A random text that no user can guess. It is put inside every special token that the user sent, to break it up."""
        return f"\ufdd0{secrets.token_hex(8)}\ufdd1"

    def marked(self, value: Any, mark: str) -> Any:
        """`value` with every special token in its strings broken up, also one that only begins at the end of a string."""
        if isinstance(value, str):
            return self._broken_up(value, mark)
        if isinstance(value, list | tuple):
            return [self.marked(item, mark) for item in value]
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(item, mark) for key, item in value.items()}
        return value

    def parts(self, text: str) -> Iterator[str | int]:
        """The text between special tokens as text, and each special token as its id, in order."""
        place = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > place:
                yield text[place : match.start()]
            yield self._ids[match[0]]
            place = match.end()
        if place < len(text):
            yield text[place:]

    def _broken_up(self, text: str, mark: str) -> str:
        if self._pattern is None:
            return text
        text = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
        for length in range(min(len(text), self._longest), 0, -1):
            if text[-length:] in self._beginnings:
                return text[: len(text) - length + 1] + mark + text[len(text) - length + 1 :]
        return text
