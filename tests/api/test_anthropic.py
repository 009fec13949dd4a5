"""Anthropic's own SDK drives /v1/messages: whole, streamed, stop sequences, counting, errors in its shape."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from .served import MODEL

QUESTION: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]


def test_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        model=MODEL, max_tokens=12, extra_body={"temperature": 0}, system="Be brief.", messages=QUESTION
    )
    (block,) = message.content
    assert block.type == "text" and "Paris" in block.text
    assert message.stop_reason in ("end_turn", "max_tokens")
    counted = claude.messages.count_tokens(model=MODEL, system="Be brief.", messages=QUESTION)
    assert counted.input_tokens == message.usage.input_tokens


def test_streamed_message_is_the_whole_one(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "extra_body": {"temperature": 0}, "messages": QUESTION}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens


def test_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "extra_body": {"temperature": 0}, "messages": QUESTION}
    word = claude.messages.create(**asked).content[0].text.split()[3]  # type: ignore[union-attr]
    message = claude.messages.create(**asked, stop_sequences=["zebra", word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert word not in message.content[0].text  # type: ignore[union-attr]


def test_more_tokens_than_the_context_has_end_with_max_tokens(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL, max_tokens=100_000, extra_body={"temperature": 0}, messages=QUESTION) as stream:
        assert next(iter(stream.text_stream))  # taken, not refused; leaving ends it


def test_tool_results_are_messages(claude: anthropic.Anthropic) -> None:
    talk: list[Any] = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "It is sunny."}]},
    ]
    tools: list[Any] = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
    message = claude.messages.create(model=MODEL, max_tokens=16, extra_body={"temperature": 0}, messages=talk, tools=tools)
    assert message.content


def test_errors_have_their_shape(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=MODEL, max_tokens=0, messages=QUESTION)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=1, messages=QUESTION)
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=1, messages=QUESTION)
