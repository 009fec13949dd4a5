"""Fields that a shape does not have: misspelt ones and those that change the answer are refused, any other is named."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import msgspec
import pytest

from trireme.api.anthropic.protocol import MessagesRequest
from trireme.api.native.generate import GenerateRequest
from trireme.api.ollama.protocol import OllamaChatRequest, Options
from trireme.api.openai.protocol import ChatRequest, CompletionRequest
from trireme.api.openai.responses_protocol import ResponsesRequest
from trireme.api.transport import fields
from trireme.api.transport.failures import Failure, Shape, failure_document
from trireme.api.transport.fields import check_fields
from trireme.errors import BadRequest

from .served import MODEL

MESSAGES = [{"role": "user", "content": "Hi"}]
KINDS: dict[type, dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "Hi"},
    MessagesRequest: {"messages": MESSAGES, "max_tokens": 1},
    ResponsesRequest: {"input": "Hi"},
    OllamaChatRequest: {"model": MODEL, "messages": MESSAGES},
    GenerateRequest: {"inputs": "Hi"},
}
INSIDE = [(OllamaChatRequest, "options"), (GenerateRequest, "parameters")]


def _checked(kind: type, **more: Any) -> list[str]:
    return check_fields(json.dumps({**KINDS[kind], **more}).encode(), kind)


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        (ChatRequest, "temprature", "temperature"),
        (ChatRequest, "max_token", "max_tokens"),
        (CompletionRequest, "stops", "stop"),
        (MessagesRequest, "stop_sequence", "stop_sequences"),
        (ResponsesRequest, "instruction", "instructions"),
        (OllamaChatRequest, "option", "options"),
    ],
)
def test_a_misspelt_field_is_told_its_right_name(kind: type, wrong: str, right: str) -> None:
    with pytest.raises(Failure, match=f"no field '{wrong}'. Fix: write '{right}'") as caught:
        _checked(kind, **{wrong: 1})
    assert caught.value.status == 400 and caught.value.param == wrong


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (ChatRequest, "functions", [{"name": "f"}]),
        (ChatRequest, "function_call", {"name": "f"}),
        (ChatRequest, "modalities", ["text", "audio"]),
        (ChatRequest, "audio", {"voice": "alloy", "format": "wav"}),
        (ChatRequest, "web_search_options", {"search_context_size": "low"}),
        (ChatRequest, "lora", [{"id": 0, "scale": 1.0}]),
        (CompletionRequest, "mirostat", 2),
        (MessagesRequest, "mcp_servers", [{"type": "url", "url": "http://127.0.0.1", "name": "m"}]),
        (MessagesRequest, "container", "container_1"),
        (ResponsesRequest, "conversation", "conv_1"),
        (ResponsesRequest, "prompt", {"id": "pmpt_1"}),
        (OllamaChatRequest, "template", "{{ .Prompt }}"),
        (GenerateRequest, "multimodal_params", {"images": [{"type": "url", "data": "http://127.0.0.1/cat.png"}]}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(kind: type, name: str, value: Any) -> None:
    with pytest.raises(Failure, match=f"^{name} is not supported here. Fix: ") as caught:
        _checked(kind, **{name: value})
    assert caught.value.status == 400 and caught.value.param == name
    assert _checked(kind, **{name: None}) == []


@pytest.mark.parametrize(("kind", "place"), INSIDE)
def test_objects_that_hold_parameters_are_looked_into(kind: type, place: str) -> None:
    with pytest.raises(Failure, match=f"no field '{place}.temprature'. Fix: write '{place}.temperature'") as caught:
        _checked(kind, **{place: {"temprature": 1}})
    assert caught.value.status == 400 and caught.value.param == f"{place}.temprature"
    assert _checked(kind, **{place: {"temperature": 1, "own_flag": 1}}, other=2) == ["other", f"{place}.own_flag"]
    assert _checked(kind, **{place: None}) == _checked(kind, **{place: {}}) == []


@pytest.mark.parametrize(
    ("kind", "place", "name", "value", "neutral"),
    [
        (OllamaChatRequest, "options", "mirostat", 2, 0),
        (OllamaChatRequest, "options", "tfs_z", 0.5, 1.0),
        (OllamaChatRequest, "options", "typical_p", 0.7, 1),
        (OllamaChatRequest, "options", "rope_frequency_base", 1e6, 0),
        (GenerateRequest, "parameters", "adapter_id", "mine", None),
        (GenerateRequest, "parameters", "image_max_patch_num", 9, -1),
    ],
)
def test_parameters_that_would_change_the_answer_are_refused(kind: type, place: str, name: str, value: Any, neutral: Any) -> None:
    with pytest.raises(Failure, match=f"^{place}.{name} is not supported here. Fix: ") as caught:
        _checked(kind, **{place: {name: value}})
    assert caught.value.status == 400 and caught.value.param == f"{place}.{name}"
    assert _checked(kind, **{place: {name: neutral}}) == []


def test_how_ollama_loads_a_model_is_not_asked_of_a_request() -> None:
    assert _checked(OllamaChatRequest, options={"num_gpu": 99, "use_mmap": True, "num_thread": 8, "mirostat_tau": 5.0}) == []


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "options.repeat_last_n"),
        ({"presence_penalty": 0.5, "repeat_last_n": 0}, "options.repeat_last_n"),
        ({"frequency_penalty": 0.5, "penalize_newline": False}, "options.penalize_newline"),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1, "penalize_newline": True}, None),
        ({"repeat_penalty": 1.0, "repeat_last_n": 64, "penalize_newline": False}, None),
    ],
)
def test_ollamas_penalties_count_every_token(given: dict[str, Any], refused: str | None) -> None:
    try:
        msgspec.convert(given, Options).check_penalties()
    except BadRequest as error:
        assert error.param == refused
    else:
        assert refused is None


def test_what_asks_for_nothing_is_taken() -> None:
    assert _checked(ChatRequest, modalities=["text"], functions=[], web_search_options={}, typical_p=1.0, metadata={"a": "b"}) == []


def test_threads_are_refused_as_anthropics_clients_expect() -> None:
    """Its SDKs know by the details that they have to send the whole conversation."""
    with pytest.raises(Failure) as caught:
        _checked(MessagesRequest, thread={"id": "t"})
    error = failure_document(caught.value, Shape.ANTHROPIC)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_other_fields_are_named_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    monkeypatch.setattr(fields, "_logged_at", -fields.LOG_SECONDS)
    for _ in range(3):
        assert _checked(ChatRequest, own_flag=1, **{"bad\r\nname": 1}) == ["own_flag"]
    (record,) = caplog.records
    assert record.fields == "own_flag"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"n_predict": 7}, "max_tokens", 7),
        ({"n_predict": -1}, "max_tokens", None),
        ({"n_probs": 3}, "top_logprobs", 3),
        ({"json_schema": {"type": "object"}}, "structured_outputs.json", {"type": "object"}),
        ({"grammar": 'root ::= "a"'}, "structured_outputs.grammar", 'root ::= "a"'),
        ({"guided_regex": "a+"}, "structured_outputs.regex", "a+"),
        ({"guided_choice": ["a"]}, "structured_outputs.choice", ["a"]),
    ],
)
def test_other_servers_names_mean_the_same(given: dict[str, Any], name: str, value: Any) -> None:
    found: Any = msgspec.json.decode(json.dumps({**KINDS[ChatRequest], **given}), type=ChatRequest)
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value


def test_two_forms_of_the_answer_exclude_each_other(http: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "grammar": 'root ::= "a"', "json_schema": {"type": "object"}}
    error = http.post("/v1/chat/completions", json=asked).json()["error"]
    assert "only one field may say what form" in error["message"]


def test_the_header_names_what_was_passed_over(http: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    assert fields.IGNORED_HEADER not in http.post("/v1/chat/completions", json=asked).headers
    for stream in (False, True):
        answer = http.post("/v1/chat/completions", json={**asked, "own_flag": 1, "other": None, "stream": stream})
        assert answer.status_code == 200 and answer.headers[fields.IGNORED_HEADER] == "own_flag, other"
    asked_ollama = {"model": MODEL, "prompt": "Hi", "stream": False, "options": {"num_predict": 1, "own_flag": 1}}
    assert http.post("/api/generate", json=asked_ollama).headers[fields.IGNORED_HEADER] == "options.own_flag"
    refused = http.post("/v1/chat/completions", json={**asked, "temprature": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temprature"
