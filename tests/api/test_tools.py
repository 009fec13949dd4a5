"""Tool calls are found in every format, however the text is cut; what is no call stays content."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.api.chat.parsing import CallDelta, parser_for
from trireme.api.chat.tools import BY_NAME, format_for
from trireme.errors import BadConfig

from . import outputs
from .recorded import RECORDED, SOUP, TOOLS


class Result:
    def __init__(self) -> None:
        self.content, self.reasoning = "", ""
        self.calls: list[tuple[str, str]] = []

    def take(self, content: str, reasoning: str, calls: Sequence[CallDelta]) -> None:
        self.content += content
        self.reasoning += reasoning
        for call in calls:
            if call.index == len(self.calls):
                assert call.name, "a call begins with its name"
                self.calls.append((call.name, ""))
            else:
                assert call.index == len(self.calls) - 1 and call.name is None
            name, arguments = self.calls[call.index]
            self.calls[call.index] = (name, arguments + call.arguments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def parsed(format: str, pieces: Sequence[str], prompt_end: str = "", tools: list = TOOLS) -> Result:
    parser = parser_for(None, "", tools=tools, override=format, prompt_end=prompt_end)()
    result = Result()
    for delta in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        result.take(delta.content, delta.reasoning, delta.calls)
    assert parser.has_calls == bool(result.calls)
    return result


def is_json_so_far(text: str) -> bool:
    """Whether the text is the beginning of JSON, by another reader than ours."""
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        return "truncated" in str(error) or (
            text[-1:] in tuple("+-.eE") and is_json_so_far(text + "0")
        )  # in the middle of a number
    return True


@pytest.mark.parametrize(("format", "text", "content", "calls"), RECORDED)
def test_recorded_outputs(format: str, text: str, content: str, calls: list) -> None:
    result = parsed(format, [text])
    assert result.content == content
    assert [name for name, _ in result.calls] == [name for name, _ in calls]
    for (_, arguments), (_, expected) in zip(result.calls, calls, strict=True):
        if expected is None:
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
        else:
            assert json.loads(arguments) == expected


@pytest.mark.parametrize(("format", "text", "content", "calls"), RECORDED)
def test_every_cut_gives_the_same(format: str, text: str, content: str, calls: list) -> None:
    whole = parsed(format, [text])
    for size in (1, 2, 3, 5, 7):
        assert parsed(format, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    for cut in range(1, len(text)):
        assert parsed(format, [text[:cut], text[cut:]]) == whole


def test_arguments_stream_as_they_come() -> None:
    parser = parser_for(None, "", tools=TOOLS, override="tagged")()
    seen = [parser.push(piece) for piece in ('<tool_call>{"name": "get_weather", ', '"arguments": {"ci', 'ty": "Par', 'is"}}')]
    assert [[call.arguments for call in delta.calls] for delta in seen] == [[], ['{"ci'], ['ty": "Par'], ['is"}']]
    assert seen[1].calls[0].name == "get_weather"


NUM_OUTPUTS = 2000


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.wide) for part in (1, 2, 3))])
def test_two_thousand_outputs_in_any_cut(part: int) -> None:
    """Every spelling of every format: the calls that were written, whole or in pieces of any size; of broken ones a beginning."""
    dice = random.Random(part)
    for output in outputs.outputs(NUM_OUTPUTS)[part::4]:
        text = output.text
        whole = parsed(output.format, [text], tools=outputs.TOOLS)
        for _, arguments in whole.calls:
            assert is_json_so_far(arguments), (text, arguments)
        if not output.broken:
            found = [(name, json.loads(arguments)) for name, arguments in whole.calls]
            assert (found, whole.content, whole.reasoning) == (output.calls, output.content, output.reasoning), text
        for size in (1, 2, 3, 5, 8, 13):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert parsed(output.format, pieces, tools=outputs.TOOLS) == whole, (size, text)
        cuts = sorted(dice.randrange(len(text) + 1) for _ in range(6))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(output.format, pieces, tools=outputs.TOOLS) == whole, (cuts, text)


_CHARACTERS = st.characters(exclude_categories=("Cs",))


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(BY_NAME)),
    st.lists(st.sampled_from(SOUP) | st.text(max_size=4), max_size=24),
    st.randoms(use_true_random=False),
)
def test_no_text_breaks_a_parser(format: str, parts: list[str], random) -> None:  # type: ignore[no-untyped-def]
    text = "".join(parts)
    whole = parsed(format, [text])
    for _, arguments in whole.calls:
        assert is_json_so_far(arguments), arguments
    pieces, at = [], 0
    while at < len(text):
        size = random.randint(1, 6)
        pieces.append(text[at : at + size])
        at += size
    assert parsed(format, pieces) == whole


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(_CHARACTERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(_CHARACTERS, max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.text(_CHARACTERS, max_size=8), _VALUES, max_size=4),
    st.booleans(),
    st.integers(1, 9),
)
def test_any_arguments_come_through(arguments: dict, ascii: bool, size: int) -> None:
    text = f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': arguments}, ensure_ascii=ascii)}\n</tool_call>"
    result = parsed("tagged", [text[i : i + size] for i in range(0, len(text), size)])
    assert result.content == "" and result.calls[0][0] == "f"
    assert json.loads(result.calls[0][1]) == arguments


def test_formats_are_found_from_templates() -> None:
    templates = {
        "tagged": "...{{ '<tool_call>' }}...",
        "llama3": "<|start_header_id|>system<|end_header_id|>",
        "mistral": "{{ '[TOOL_CALLS]' }}",
        "deepseek": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'",
        "gpt-oss": "<|start|>assistant<|channel|>final<|message|>",
        "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>",
        "generic": "<|im_start|>",
    }
    found = {name: format_for(template + "{% if tools %}", "").name for name, template in templates.items()}
    assert found == {name: name for name in templates}
    assert format_for(templates["llama3"], "").name == "generic", "a template without tools is told of the generic format"
    assert format_for(None, "gpt_oss").name == "gpt-oss"
    assert format_for(None, "llama").name == "generic"


def test_unknown_override_is_refused() -> None:
    with pytest.raises(BadConfig, match="no tool format"):
        parser_for(None, "", tools=True, override="nonsense")


def test_without_tools_nothing_is_a_call() -> None:
    parser = parser_for("<tool_call>", "", tools=False)()
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parser.push(text).content + parser.finish().content == text
    assert not parser.has_calls
