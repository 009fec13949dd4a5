"""Reasoning is told from the answer, however the text is cut and whoever opened its tag."""

from __future__ import annotations

import pytest

from trireme.api.chat.parsing import parser_for
from trireme.api.chat.reasoning import TAGS, opened_by, tags_for

from .recorded import THOUGHTS
from .test_tools import parsed


@pytest.mark.parametrize(("opened", "text", "reasoning", "content"), THOUGHTS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_recorded_thoughts(opened: bool, text: str, reasoning: str, content: str, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    result = parsed("tagged", pieces, "<|im_start|>assistant\n<think>\n" if opened else "<|im_start|>assistant\n")
    assert (result.reasoning, result.content) == (reasoning, content)


def test_a_call_after_reasoning() -> None:
    text = '<think>\nI need the time.\n</think>\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    for size in (1, 4, len(text)):
        result = parsed("tagged", [text[i : i + size] for i in range(0, len(text), size)])
        assert (result.reasoning, result.content, result.calls) == ("I need the time.", "", [("get_time", "{}")])


def test_channels_of_gpt_oss() -> None:
    text = "<|channel|>analysis<|message|>User greets.<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>"
    for size in (1, 3, len(text)):
        result = parsed("gpt-oss", [text[i : i + size] for i in range(0, len(text), size)])
        assert (result.reasoning, result.content) == ("User greets.", "Hello!")


def test_a_prompt_that_closed_its_tag_has_not_opened_it() -> None:
    think = TAGS[0]
    assert opened_by("<|im_start|>assistant\n<think>\n", think)
    assert not opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n", think)


def test_tags_come_from_the_template() -> None:
    assert tags_for("{{ '[THINK]' }} {{ '[/THINK]' }}").opening == "[THINK]"
    assert tags_for(None).opening == "<think>"


def test_reasoning_may_stay_in_the_text() -> None:
    parser = parser_for(None, "", tools=False, reasoning=False)()
    assert parser.push("<think>a</think>b").content + parser.finish().content == "<think>a</think>b"
