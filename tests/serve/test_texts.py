"""A sequence's tokens as they become text: what belongs to it, however many tokens come at once."""

from __future__ import annotations

from typing import Any

import pytest

from trireme.serve.answers import SequenceText
from trireme.types import FinishReason, Progress, SamplingParams, TokenLogprobs


class Letters:
    """A token is a letter."""

    special_ids: set[int] = set()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def progress(text: str, finish: FinishReason | None = None) -> Progress:
    tokens = list(text.encode())
    return Progress(id="a/0", tokens=tokens, logprobs=[TokenLogprobs(token, -0.5, 1) for token in tokens], finish=finish)


def taken(parts: list[str], **sampling: Any) -> tuple[str, bytes, FinishReason | None]:
    """What a sequence makes of these parts: its text, its tokens, its end. The last part is the last that the scheduler sends."""
    sequence = SequenceText(SamplingParams(**sampling).text, Letters())  # type: ignore[arg-type]
    text, tokens, finish = "", b"", None
    for i, part in enumerate(parts):
        gain = sequence.take(progress(part, FinishReason.LENGTH if i == len(parts) - 1 else None))
        assert [score.token for score in gain.logprobs or []] == gain.tokens
        text, tokens, finish = text + gain.text, tokens + bytes(gain.tokens), gain.finish
        if finish is not None:
            break
    return text, tokens, finish


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_a_stop_string_cuts_tokens_and_log_probabilities_too(size: int, include: bool) -> None:
    whole = "one two, three. and more"
    parts = [whole[i : i + size] for i in range(0, len(whole), size)]
    text, tokens, finish = taken(parts, stop=["three", "zebra"], include_stop=include)
    assert text == ("one two, three" if include else "one two, ")
    assert tokens == b"one two, three" and finish is FinishReason.STOP


@pytest.mark.parametrize("size", [1, 4, 100])
def test_without_a_stop_string_everything_is_taken(size: int) -> None:
    whole = "one two, three. and more"
    parts = [whole[i : i + size] for i in range(0, len(whole), size)]
    assert taken(parts, stop=["zebra"]) == (whole, whole.encode(), FinishReason.LENGTH)
    assert taken(parts) == (whole, whole.encode(), FinishReason.LENGTH)
