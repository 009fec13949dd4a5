"""Fill in the middle: prefix and suffix become one prompt by the model's own FIM tokens. Knows spellings of those tokens."""

from __future__ import annotations

from trireme.errors import BadRequest
from trireme.hub.tokenizer import Tokenizer

# The tokens before the prefix, the suffix and the middle. An empty string means that there is no such token.
_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")


def infill_tokens(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """The prompt whose continuation belongs between prefix and suffix. The text of both is never read as special tokens."""
    first = tokenizer.encode(prefix, add_special=False, allow_special=False)
    last = tokenizer.encode(suffix, add_special=False, allow_special=False)
    begin = [tokenizer.bos_token_id] if tokenizer.add_bos and tokenizer.bos_token_id is not None else []
    for spellings in _SPELLINGS:
        ids = [_id_of(tokenizer, spelling) for spelling in spellings]
        if None not in ids:
            return [*begin, ids[0], *first, ids[1], *last, ids[2]]  # type: ignore[list-item]
    ids = [_id_of(tokenizer, spelling) for spelling in _SUFFIX_FIRST]
    if None not in ids:
        return [*begin, ids[0], *last, ids[1], *first]  # type: ignore[list-item]
    raise BadRequest("This model has no fill-in-the-middle tokens.", "leave suffix out", "suffix")


def _id_of(tokenizer: Tokenizer, spelling: str) -> int | None:
    ids = tokenizer.encode(spelling, add_special=False)
    return ids[0] if len(ids) == 1 and tokenizer.token_text(ids[0]) == spelling else None
