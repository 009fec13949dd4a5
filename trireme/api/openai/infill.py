"""Fill in the middle: prefix and suffix become one prompt by the model's own FIM tokens. Knows spellings of those tokens."""

from __future__ import annotations

from collections.abc import Sequence

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


# The tokens before a repository's name and before a file's, for models that know several files.
_FILES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"), ("<reponame>", "<filename>"))


def infill_tokens(tokenizer: Tokenizer, prefix: str, suffix: str, extra: Sequence[tuple[str, str]] = ()) -> list[int]:
    """The prompt whose continuation belongs between prefix and suffix, after other files (name, text).

    No text of the client's is read as special tokens.
    """
    files, before = _files(tokenizer, extra)
    first = _plain(tokenizer, before + prefix)
    last = _plain(tokenizer, suffix)
    begin = [tokenizer.bos_token_id] if tokenizer.add_bos and tokenizer.bos_token_id is not None else []
    begin += files
    for spellings in _SPELLINGS:
        ids = [_id_of(tokenizer, spelling) for spelling in spellings]
        if None not in ids:
            return [*begin, ids[0], *first, ids[1], *last, ids[2]]  # type: ignore[list-item]
    ids = [_id_of(tokenizer, spelling) for spelling in _SUFFIX_FIRST]
    if None not in ids:
        return [*begin, ids[0], *last, ids[1], *first]  # type: ignore[list-item]
    raise BadRequest(
        "This model has no fill-in-the-middle tokens.", "leave the suffix out, or serve a model that has them", "suffix"
    )


def _files(tokenizer: Tokenizer, extra: Sequence[tuple[str, str]]) -> tuple[list[int], str]:
    """Other files as the model's own tokens, or, for a model without such tokens, as text before the prefix."""
    if not extra:
        return [], ""
    for repository, file in _FILES:
        marks = _id_of(tokenizer, repository), _id_of(tokenizer, file)
        if marks[0] is not None and marks[1] is not None:
            tokens = [marks[0], *_plain(tokenizer, "project\n")]
            for name, text in extra:
                tokens += [marks[1], *_plain(tokenizer, f"{name}\n{text}\n")]
            return [*tokens, marks[1]], ""
    return [], "".join(f"{name}\n{text}\n\n" for name, text in extra)


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, allow_special=False)


def _id_of(tokenizer: Tokenizer, spelling: str) -> int | None:
    ids = tokenizer.encode(spelling, add_special=False)
    return ids[0] if len(ids) == 1 and tokenizer.token_text(ids[0]) == spelling else None
