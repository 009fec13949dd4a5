"""Pre-tokenizers for GGUF's named kinds of byte-level BPE, built with the `tokenizers` library: how text is split before merging.

Knows patterns, not vocabularies. The patterns are those that the models' own tokenizers publish.
"""

from __future__ import annotations

import tokenizers
from tokenizers import pre_tokenizers

from trireme.errors import UnsupportedModel

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS.replace("DIGITS", "{1,3}")
_QWEN2 = _WORDS.replace("DIGITS", "")
_QWEN35 = _QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]")
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_HAN = "[一-龥ࠀ-一가-퟿]+"
# Letters that have a case, of the scripts that existed when the model was made
_DEEPSEEK_LETTERS = (
    r"\s?[[\p{Lu}\p{Ll}\p{Lt}ʕ]&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A790}-\x{AB6F}"
    r"\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{16EDF}\x{1D400}-\x{1DFFF}]]+"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# kind: the patterns, each of which cuts the pieces that the one before it left
PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "jina-v2-en", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "chatglm-bpe", "glm4", "falcon3"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "default": (_PUNCTUATION.replace("`", ""), _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]"),
    "deepseek-llm": (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3),
    "bloom": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
    "gpt-4o": (_GPT4O,),
    "tekken": (_TEKKEN,),
}

# Kinds whose tokenizers take a whole word that is in the vocabulary before trying merges
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken"})
# Kinds that add a beginning-of-sequence token even if the file does not say so
ADDS_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
# Kinds whose tokenizers first normalize text to composed characters (NFC)
COMPOSES = frozenset({"qwen2", "deepseek-r1-qwen", "stablelm2"})


def pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text into words as `kind` does, then spells them in bytes."""
    if kind not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise UnsupportedModel(f"The tokenizer's pre-tokenizer {kind[:60]!r} is not known.", f"use one of: {known}")
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in PATTERNS[kind]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
