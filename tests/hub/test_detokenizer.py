"""Incremental text: any split of the ids gives the same text, and stop strings cut where a whole search would cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.hub.detokenizer import Detokenizer

PIECES = ["a", "b", "ab", "ba", " ", "é", "漢", "\n"]
BROKEN = [b"\xe6", b"\xbc", b"\xa2", b"\xf0\x9f", b"\x98\x80", b"\xff"]


class Bytes:
    """Tokens 0 to 7 are text, 8 to 13 are parts of characters, 14 is special."""

    special_ids = {14}
    table = [piece.encode() for piece in PIECES] + BROKEN + [b"<end>"]

    def token_bytes(self, token: int) -> bytes:
        return self.table[token]


def joined(ids: list[int], splits: list[int], **options: object) -> tuple[str, bool]:
    detokenizer = Detokenizer(Bytes(), **options)  # type: ignore[arg-type]
    text, place = "", 0
    for size in [*splits, len(ids)]:
        text += detokenizer.push(ids[place : place + size])
        place += size
    return text + detokenizer.flush(), detokenizer.stopped


def expected(ids: list[int], stop: list[str], include_stop: bool) -> tuple[str, bool]:
    """By a search in the whole text: the match that ends first, and of those the longest."""
    text = b"".join(Bytes.table[i] for i in ids if i != 14).decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        met = [s for s in stop if text[:end].endswith(s)]
        if met:
            return text[: end if include_stop else end - max(map(len, met))], True
    return text, False


@given(
    st.lists(st.integers(0, 14), max_size=30),
    st.lists(st.integers(0, 4), max_size=12),
    st.lists(st.text("abé漢 \n", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
@settings(max_examples=800, deadline=None)
def test_any_split_gives_the_same_text(ids: list[int], splits: list[int], stop: list[str], include: bool) -> None:
    assert joined(ids, splits, stop=stop, include_stop=include) == expected(ids, stop, include)


def test_characters_wait_for_their_bytes() -> None:
    detokenizer = Detokenizer(Bytes())
    assert [detokenizer.push([i]) for i in (0, 8, 9, 10, 1)] == ["a", "", "", "漢", "b"]
    assert detokenizer.push([8]) == "" and detokenizer.flush() == "�"


def test_text_is_held_only_while_it_may_be_a_stop_string() -> None:
    detokenizer = Detokenizer(Bytes(), stop=["ab\n"])
    assert [detokenizer.push([i]) for i in (1, 0, 1, 0, 1)] == ["b", "", "", "ab", ""]
    assert detokenizer.push([7, 0]) == "" and detokenizer.stopped
    assert detokenizer.push([0]) == "" and detokenizer.flush() == ""


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
    assert joined([0, 14, 1], [], skip_special_tokens=skip)[0] == ("ab" if skip else "a<end>b")


def test_long_answers_cost_the_same_per_token() -> None:
    """With the worst of stop strings, work per character stays bounded: comparisons are counted, not timed."""
    count = 0

    class Counting(str):
        def __ne__(self, other: object) -> bool:
            nonlocal count
            count += 1
            return not str.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = str.__hash__

    detokenizer = Detokenizer(Bytes(), stop=["a" * 1000 + "b"])
    detokenizer._stops[0].text = type("Text", (str,), {"__getitem__": lambda s, i: Counting(str.__getitem__(s, i))})(
        "a" * 1000 + "b"
    )
    for _ in range(5000):
        detokenizer.push([0])
    assert count < 3 * 5000
