"""Anthropic's own SDK drives /v1/messages: whole, streamed, stop sequences, counting, errors in its shape."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import pytest

from trireme.api.anthropic import messages
from trireme.api.chat import turn
from trireme.api.transport.http import Call
from trireme.errors import Overloaded
from trireme.serve.client import ModelInfo
from trireme.types import SamplingParams

from .served import MODEL

QUESTION: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of Japan?"}]}]


def test_message(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(
        model=MODEL, max_tokens=12, extra_body={"temperature": 0}, system="Be brief.", messages=QUESTION
    )
    (block,) = message.content
    assert block.type == "text" and "Tokyo" in block.text
    assert message.stop_reason in ("end_turn", "max_tokens")
    counted = claude.messages.count_tokens(model=MODEL, system="Be brief.", messages=QUESTION)
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


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


def test_cached_tokens_count_once(claude: anthropic.Anthropic) -> None:
    words = [{"role": "user", "content": "Count the words of this sentence, which nobody else here has sent before, twice."}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "messages": words}
    first, second = claude.messages.create(**asked).usage, claude.messages.create(**asked).usage
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message().usage
    counted = claude.messages.count_tokens(model=MODEL, messages=words).input_tokens  # type: ignore[arg-type]
    for usage in (first, second, streamed):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    assert second.cache_read_input_tokens and streamed.cache_read_input_tokens == second.cache_read_input_tokens


def test_an_assistants_turn_at_the_end_is_gone_on_with(claude: anthropic.Anthropic) -> None:
    talk: list[Any] = [{"role": "user", "content": "Recite the alphabet."}, {"role": "assistant", "content": "A, B, C, D,"}]
    message = claude.messages.create(model=MODEL, max_tokens=8, extra_body={"temperature": 0}, messages=talk)
    assert message.content[0].text.startswith(" E, F")  # type: ignore[union-attr]


def test_the_answer_has_the_form_that_was_asked_for(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        message = claude.messages.create(model=MODEL, max_tokens=64, messages=QUESTION, extra_body={**body, "temperature": 0})
        assert json.loads(message.content[0].text)["city"] in ("Paris", "Rome")  # type: ignore[union-attr]


def test_what_sdks_look_for(claude: anthropic.Anthropic) -> None:
    """The header by which a request is found again, the models in their shape, and the refusal after which they send everything."""
    answer = claude.messages.with_raw_response.create(model=MODEL, max_tokens=1, messages=QUESTION)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    (model,) = claude.models.list().data
    assert (model.id, model.type) == (MODEL, "model") and model.created_at.year > 2000
    assert claude.models.retrieve(MODEL).id == MODEL
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=MODEL, max_tokens=1, messages=QUESTION, extra_body={"thread": {"id": "t"}})
    details = caught.value.body["error"]["details"]  # type: ignore[index]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_a_conversation_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large max_tokens is: what fits is known from the prompt that is sent."""
    seen: list[int] = []

    class OneRendering:
        info = ModelInfo("tiny", "/nowhere", 0, max_model_len=64, vocab_size=100)

        def check_model(self, name: str | None, call: Call) -> str:
            return "tiny"

        async def open(self, call: Call, tokens: list[int], sampling: SamplingParams, **how: Any) -> Any:
            seen.append(sampling.max_tokens or 0)
            raise Overloaded("full", "wait")

    async def tokens(service: Any, job: Any) -> list[int]:
        seen.append(-1)
        return [1] * 20

    parser = SimpleNamespace(needs_special=False)
    monkeypatch.setattr(turn, "chat_tokens", tokens)
    monkeypatch.setattr(messages, "chat_tokens", tokens)
    monkeypatch.setattr(turn, "parser_of", lambda service, job, tokens: parser)

    async def unbound(service: Any, sampling: SamplingParams, *_: Any, **__: Any) -> SamplingParams:
        return sampling

    monkeypatch.setattr(turn, "constrained_turn", unbound)
    body = json.dumps({"model": "tiny", "max_tokens": 60, "messages": QUESTION}).encode()
    with pytest.raises(Overloaded):
        asyncio.run(messages.Anthropic(OneRendering()).messages(Call("/", {}, body, {}, {}, "r")))  # type: ignore[arg-type]
    assert seen == [-1, 44]


def test_documents_of_text_are_read(http: httpx.Client) -> None:
    def counted(*blocks: dict) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": "Which colour?"}]}]}
        return http.post("/v1/messages/count_tokens", json=body)

    def document(source: dict, **more: str) -> dict:
        return {"type": "document", "source": source, **more}

    plain = {"type": "text", "media_type": "text/plain", "data": "The sky is blue."}
    as_text = counted({"type": "text", "text": "The sky is blue."}).json()
    assert counted(document(plain)).json() == as_text
    assert counted(document({"type": "content", "content": "The sky is blue."})).json() == as_text
    assert counted(document({"type": "content", "content": [{"type": "text", "text": "The sky is blue."}]})).json() == as_text
    titled = counted({"type": "text", "text": "[Colours]\nThe sky is blue."}).json()
    assert counted(document(plain, title="Colours")).json() == titled != as_text

    def answer(block: dict) -> str:
        content = [block, {"type": "text", "text": "Which colour has the sky?"}]
        asked = {"model": MODEL, "max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": content}]}
        return http.post("/v1/messages", json=asked).json()["content"][0]["text"]

    green = "The sky is green today."
    said = answer(document({"type": "text", "media_type": "text/plain", "data": green}))
    assert said == answer({"type": "text", "text": green}) and "green" in said
    refused = counted(document({"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}))
    assert refused.status_code == 400 and "source is of type 'base64'" in refused.json()["error"]["message"]
