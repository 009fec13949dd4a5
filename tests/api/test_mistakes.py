"""Bad bodies and what is told of them: the field, what it is, what it must be, the fix; to each API's clients in their shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.api.anthropic.protocol import CountRequest, MessagesRequest
from trireme.api.native.generate import GenerateRequest
from trireme.api.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from trireme.api.openai.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from trireme.api.openai.responses_protocol import ResponsesRequest
from trireme.api.stored.batches import BatchLine
from trireme.api.transport.failures import Failure, failure_of
from trireme.api.transport.http import decode
from trireme.api.transport.mistakes import EXAMPLES, MAX_SHOWN, body_mistake, expected_at, field_mistake, field_of
from trireme.api.transport.nowhere import nothing_at
from trireme.errors import BadRequest
from trireme.types import SamplingParams

USER = {"role": "user", "content": "Hi"}
ROLES = "one of 'assistant', 'developer', 'function', 'system', 'tool', 'user'"
MESSAGES = '[{"role": "user", "content": "..."}]'
TOOL_CHOICES = "'auto', 'none', 'required' or an object"


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


# body, type, the field, the text
FIELDS: list[tuple[Any, Any, str | None, str]] = [
    ({"messages": "hi"}, ChatRequest, "messages", f"messages is a string; it must be a list of objects. Fix: send {MESSAGES}"),
    ({"messages": None}, ChatRequest, "messages", f"messages is null; it must be a list of objects. Fix: send {MESSAGES}"),
    ({}, ChatRequest, "messages", f'messages is missing; it must be a list of objects. Fix: send "messages": {MESSAGES}'),
    (
        {"messages": ["hi"]},
        ChatRequest,
        "messages[0]",
        f"messages[0] is a string; it must be an object. Fix: send {MESSAGES[1:-1]}",
    ),
    ({"messages": [USER, {"role": "usr"}]}, ChatRequest, "messages[1].role", f"messages[1].role is 'usr'; it must be {ROLES}."),
    (
        {"messages": [{"role": 5}]},
        ChatRequest,
        "messages[0].role",
        f'messages[0].role is a whole number; it must be {ROLES}. Fix: send "user"',
    ),
    (
        {"messages": [{"content": "Hi"}]},
        ChatRequest,
        "messages[0]",
        f'messages[0].role is missing; it must be {ROLES}. Fix: send "role": "user"',
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        ChatRequest,
        "messages[0].content",
        "messages[0].content is a whole number; it must be a string or a list of objects.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]},
        ChatRequest,
        "messages[0].content[0]",
        'messages[0].content[0].type is missing; it must be a string. Fix: send "type": "text"',
    ),
    ([], ChatRequest, None, 'The body is a list; it must be an object. Fix: send {"messages": ...}'),
    ("hi", ResponsesRequest, None, 'The body is a string; it must be an object. Fix: send {"input": ...}'),
    (
        _chat(temperature="hot"),
        ChatRequest,
        "temperature",
        "temperature is a string; it must be a number. Fix: send a number without quotes",
    ),
    (_chat(n=1.5), ChatRequest, "n", "n is a decimal number; it must be a whole number. Fix: send it without a decimal point"),
    (_chat(n=True), ChatRequest, "n", "n is a boolean; it must be a whole number."),
    (
        _chat(stream="true"),
        ChatRequest,
        "stream",
        "stream is a string; it must be true or false. Fix: send true or false without quotes",
    ),
    (_chat(stop=5), ChatRequest, "stop", "stop is a whole number; it must be a string or a list of strings."),
    (_chat(stop=["a", 5]), ChatRequest, "stop[1]", "stop[1] is a whole number; it must be a string."),
    (
        _chat(logit_bias={"1": "x"}),
        ChatRequest,
        "logit_bias[...]",
        "logit_bias[...] is a string; it must be a number. Fix: send a number without quotes",
    ),
    (_chat(tool_choice="maybe"), ChatRequest, "tool_choice", f"tool_choice is 'maybe'; it must be {TOOL_CHOICES}."),
    (
        _chat(tool_choice={"function": {}}),
        ChatRequest,
        "tool_choice.function",
        'tool_choice.function.name is missing; it must be a string. Fix: send "name": "..."',
    ),
    (
        _chat(tools=[{"type": "retrieval", "function": {"name": "f"}}]),
        ChatRequest,
        "tools[0].type",
        "tools[0].type is 'retrieval'; it must be 'function'.",
    ),
    (
        _chat(response_format="json"),
        ChatRequest,
        "response_format",
        'response_format is a string; it must be an object. Fix: send {"type": "json_object"}',
    ),
    (
        _chat(response_format={"type": "xml"}),
        ChatRequest,
        "response_format.type",
        "response_format.type is 'xml'; it must be one of 'json_object', 'json_schema', 'text'.",
    ),
    (
        {"prompt": {}},
        CompletionRequest,
        "prompt",
        "prompt is an object; it must be a string or a list of strings, whole numbers or lists of whole numbers.",
    ),
    (
        {},
        CompletionRequest,
        "prompt",
        "prompt is missing; it must be a string or a list of strings, whole numbers or lists of whole numbers. "
        'Fix: send "prompt": "..."',
    ),
    (_chat(), MessagesRequest, "max_tokens", 'max_tokens is missing; it must be a whole number. Fix: send "max_tokens": 256'),
    (
        {"messages": [{"role": "human", "content": "Hi"}], "max_tokens": 1},
        MessagesRequest,
        "messages[0].role",
        "messages[0].role is 'human'; it must be one of 'assistant', 'system', 'user'.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "content": [{"type": 5}]}]}], "max_tokens": 1},
        MessagesRequest,
        "messages[0].content[0].content[0].type",
        "messages[0].content[0].content[0].type is a whole number; it must be a string.",
    ),
    ({"input": 5}, ResponsesRequest, "input", "input is a whole number; it must be a string or a list of objects."),
    (
        {"input": "Hi", "metadata": {"a": 5}},
        ResponsesRequest,
        "metadata[...]",
        "metadata[...] is a whole number; it must be a string.",
    ),
    ({"inputs": ["Hi"]}, GenerateRequest, "inputs", "inputs is a list; it must be a string."),
    (
        {"inputs": "Hi", "parameters": {"stop": "x"}},
        GenerateRequest,
        "parameters.stop",
        'parameters.stop is a string; it must be a list of strings. Fix: send ["..."]',
    ),
    ({"messages": []}, OllamaChatRequest, "model", 'model is missing; it must be a string. Fix: send "model": "..."'),
    ({"model": "x", "think": 5}, OllamaChatRequest, "think", "think is a whole number; it must be true, false or a string."),
    ({"custom_id": "a", "url": "/x"}, BatchLine, "body", "body is missing."),
]
OUT_OF_RANGE = "temperature is too large a number. Fix: send one nearer to 0"


def _failure(body: bytes, kind: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        decode(body, kind)
    assert caught.value.status == 400 and "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(("body", "kind", "field", "text"), FIELDS)
def test_fields(body: Any, kind: Any, field: str | None, text: str) -> None:
    failure = _failure(json.dumps(body).encode(), kind)
    assert (failure.message, failure.param) == (text, field)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"9" * 4301])
def test_numbers_out_of_range(number: bytes) -> None:
    failure = _failure(b'{"messages": [], "temperature": %b}' % number, ChatRequest)
    assert (failure.message, failure.param) == (OUT_OF_RANGE, "temperature")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "The body is empty; it must be a JSON object. Fix: send one (with curl: -d '{...}')"),
        (
            b'{"messages": [',
            "The body is not valid JSON: it breaks off after '{\"messages\": ['. Fix: close what was opened, and send all of it",
        ),
        (b'{"messages": [}', "The body is not valid JSON: invalid character at byte 14, near '{\"messages\": [}'."),
        (
            b'{"messages": [],}',
            "The body is not valid JSON: trailing comma in object at byte 16, near '{\"messages\": [],}'. "
            "Fix: leave out the last comma",
        ),
        (
            b"{'a': 1}",
            'The body is not valid JSON: a name without double quotes at byte 1, near "{\'a\': 1}". Fix: write names as "name"',
        ),
        (
            b'{"stream": True}',
            "The body is not valid JSON: invalid character at byte 11, near '{\"stream\": True}'. "
            "Fix: write true, false, null or a number",
        ),
        (
            b"{\"model\": 'x'}",
            "The body is not valid JSON: invalid character at byte 10, near '{\"model\": \\'x\\'}'. Fix: use double quotes",
        ),
        (
            b'{"model": "a\nb"}',
            "The body is not valid JSON: a line break or another control character in a string at byte 12, "
            'near \'{"model": "a\\nb"}\'. Fix: write a line break as \\n',
        ),
        (
            b"model=x",
            "The body is not valid JSON: invalid character at byte 0, near 'model=x'. Fix: begin with { and send JSON alone",
        ),
        (b'{"messages": []}x', "The body is not valid JSON: trailing characters at byte 17, near '{\"messages\": []}x'."),
        (b'{"messages": [{"role": "\xff"}]}', "The body is not valid JSON: it has bytes that are not UTF-8. Fix: send it as UTF-8"),
        (
            b'{"messages": [{"role": "\\ud800"}]}',
            "The body is not valid JSON: it has a \\u escape that is not whole. Fix: write four digits, and both halves of a pair",
        ),
    ],
)
def test_no_json(body: bytes, text: str) -> None:
    failure = _failure(body, ChatRequest)
    assert (failure.message, failure.param) == (text, None)


def test_little_of_a_value_is_shown() -> None:
    failure = _failure(json.dumps({"messages": [{"role": "x" * 100_000}]}).encode(), ChatRequest)
    assert f"'{'x' * (MAX_SHOWN - 1)}...; it must be one of" in failure.message and len(failure.message) < 200
    assert len(_failure(b'{"messages": "' + b"x" * 100_000, ChatRequest).message) < 200
    assert len(_failure(b'{"messages": "' + b"x" * 100_000 + b'"]', ChatRequest).message) < 200
    long = failure_of(BadRequest(f"n is {'7' * 300}; it must lie between 1 and 128.", param="n"))
    assert long.message == f"n is {'7' * 40}...; it must lie between 1 and 128."


def test_a_value_that_looks_like_a_path_is_a_value() -> None:
    failure = _failure(json.dumps({"messages": [{"role": "x - at `$.model`"}]}).encode(), ChatRequest)
    assert failure.message.startswith("messages[0].role is 'x - at `$.model`'; it must be one of")
    assert failure.param == "messages[0].role"


@pytest.mark.parametrize(
    "text",
    ["", "something else", "Expected `str` of length >= 3 - at `$.model`", "Expected `int`, got `str` - at `key` in `$[...]`"],
)
def test_texts_that_are_not_known_stay_as_they_are(text: str) -> None:
    assert field_mistake(msgspec.ValidationError(text), ChatRequest) == f"{text}."
    assert body_mistake(msgspec.DecodeError(text), b"{") == f"The body is not valid JSON: {text}."


_PIECES = [
    "Expected `",
    "`, got `",
    "Invalid enum value ",
    "Object missing required field `",
    " - at `$",
    ".messages",
    "[0]",
    "[...]",
]
_PIECES += [".role", "`", "JSON is malformed: ", " (byte 99)", "Number out of range", "Input data was truncated", "'", "\n", "."]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_PIECES) | st.text(max_size=5), max_size=8).map("".join), st.binary(max_size=8))
def test_no_text_is_too_odd(text: str, body: bytes) -> None:
    error = msgspec.ValidationError(text)
    for kind in (ChatRequest, dict, list[int], int):
        assert isinstance(field_mistake(error, kind), str) and isinstance(field_of(error), str | None)
    assert body_mistake(error, body) and isinstance(expected_at(ChatRequest, text), str)


def _with(body: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """`body` with `value` at `place`, such as messages[].role."""
    name, _, rest = place.partition(".")
    key = name.removesuffix("[]")
    if rest:
        inner = {"role": "user", "content": "Hi"} if key == "messages" else {"type": "text", "text": "Hi"}
        value = _with(inner, rest, value)
    return {**body, key: [value] if name != key else value}


@pytest.mark.parametrize("place", EXAMPLES)
def test_examples_are_taken_by_all_that_have_the_field(place: str) -> None:
    kinds: list[Any] = [ChatRequest, CompletionRequest, MessagesRequest, CountRequest, ResponsesRequest, GenerateRequest]
    kinds += [OllamaChatRequest, OllamaGenerateRequest, TokenizeRequest]
    bases = {ChatRequest: _chat(), CompletionRequest: {"prompt": ""}, MessagesRequest: _chat(max_tokens=1), CountRequest: _chat()}
    having = [kind for kind in kinds if expected_at(kind, place.replace("[]", "[0]"))]
    assert having
    for kind in having:
        decode(json.dumps(_with(bases.get(kind, {"model": "x"}), place, json.loads(EXAMPLES[place]))).encode(), kind)


def test_what_is_expected_of_sampling() -> None:
    told = {name: expected_at(SamplingParams, name) for name in ("temperature", "n", "stop", "ignore_eos", "logit_bias", "nothing")}
    assert list(told.values()) == ["a number", "a whole number", "a list of strings", "true or false", "an object", ""]


KNOWN = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/generate", "/"}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "/v1/embeddings",
            "/v1/embeddings is an OpenAI endpoint that is not supported here. Fix: GET /openapi.json lists those that are",
        ),
        ("/api/pull", "/api/pull is an Ollama endpoint that is not supported here. Fix: GET /openapi.json lists those that are"),
        ("/v1/embeddingsx", "There is nothing at /v1/embeddingsx. Fix: GET /openapi.json lists what there is"),
        ("/chat/completions", "There is nothing at /chat/completions. Fix: use /v1/chat/completions"),
        ("/v1/v1/chat/completions", "There is nothing at /v1/v1/chat/completions. Fix: use /v1/chat/completions"),
        ("/v1/models/", "There is nothing at /v1/models/. Fix: use /v1/models"),
        ("/v1", "There is nothing at /v1. Fix: use /v1/chat/completions"),
        (
            "/v1/rerank",
            "/v1/rerank is for reranking, which this server does not have. Fix: GET /openapi.json lists what there is",
        ),
        ("//", "There is nothing at //. Fix: GET /openapi.json lists what there is"),
    ],
)
def test_nowhere(path: str, text: str) -> None:
    assert nothing_at(path, KNOWN) == text


# --- through the server ---------------------------------------------------------------------------------------------------------


def _openai(text: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error", "param": param, "code": 400}}


def _anthropic(text: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": "invalid_request_error", "message": text}}


def test_every_api_in_its_own_shape(http: httpx.Client) -> None:
    text = f"messages is a string; it must be a list of objects. Fix: send {MESSAGES}"
    ask = {"model": "smollm2", "messages": "hi"}
    number = "it must be a number. Fix: send a number without quotes"
    told = [
        ("/v1/chat/completions", ask, _openai(text, "messages")),
        ("/v1/messages", {**ask, "max_tokens": 1}, _anthropic(text)),
        ("/api/chat", ask, {"error": text}),
        (
            "/v1/completions",
            {"prompt": "x", "temperature": "hot"},
            _openai(f"temperature is a string; {number}", "temperature"),
        ),
        ("/v1/responses", {"input": "x", "top_p": "a"}, _openai(f"top_p is a string; {number}", "top_p")),
        (
            "/generate",
            {"inputs": "x", "parameters": {"top_p": "a"}},
            {"error": f"parameters.top_p is a string; {number}", "error_type": "validation"},
        ),
        ("/", {"inputs": 5}, {"error": "inputs is a whole number; it must be a string.", "error_type": "validation"}),
        ("/tokenize", {"prompt": 5}, _openai("prompt is a whole number; it must be a string.", "prompt")),
    ]
    for path, body, document in told:
        response = http.post(path, json=body)
        assert (response.status_code, response.json()) == (400, document), path


def test_mistakes_beyond_types(http: httpx.Client) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url"}]}]
    parts = 'Fix: send parts such as {"type": "text", "text": "..."}'
    template = {"enable_thinking": "yes"}
    told = [
        (
            "/v1/chat/completions",
            {"messages": picture},
            f"messages[0].content has a part of type 'image_url'; this model reads text alone. {parts}",
        ),
        (
            "/v1/chat/completions",
            _chat(response_format={"type": "json_schema"}),
            'response_format.json_schema is missing; the format json_schema needs it. Fix: send "json_schema": {"schema": {...}}',
        ),
        (
            "/v1/chat/completions",
            _chat(chat_template_kwargs=template),
            "chat_template_kwargs.enable_thinking must be true or false.",
        ),
        (
            "/v1/chat/completions",
            _chat(structured_outputs={"json": "{"}),
            "The schema is not valid JSON: it breaks off after '{'. Fix: close what was opened, and send all of it",
        ),
        (
            "/v1/chat/completions",
            _chat(tools=[{"type": "function", "function": {"name": "a b"}}]),
            "tools[0].function.name is 'a b'; it must have 1 to 64 letters, digits, dots, _ or -.",
        ),
        (
            "/v1/responses",
            {"input": [{"content": "Hi"}]},
            "input[0].role is missing; it must be one of 'assistant', 'developer', 'system', 'user'. Fix: send \"role\": \"user\"",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "computer_call"}]},
            "input[0].type is 'computer_call'; it must be one of 'message', 'function_call', 'function_call_output', 'reasoning'. "
            "Fix: send messages and function calls",
        ),
        (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "web_search"}]},
            "tools[0].type is 'web_search'; this server runs no tools of its own. Fix: send tools of type 'function'",
        ),
        *(
            (
                "/v1/messages",
                {**_chat(tools=[{"type": kind, "name": "tool"}]), "max_tokens": 1},
                f"tools[0].input_schema is missing, and this server has no tool of type '{kind}'. "
                'Fix: send "input_schema": {"type": "object", ...}',
            )
            for kind in ("web_search_20250305", "code_execution_20250825", "bash_20250124")
        ),
    ]
    for path, body, text in told:
        response = http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["message"]) == (400, text), path


def test_paths_and_methods(http: httpx.Client) -> None:
    for path in ("/v1/images/generations", "/v1/audio/speech", "/v1/moderations", "/v1/assistants", "/v1/fine_tuning/jobs"):
        response = http.post(path, json={})
        text = f"{path} is an OpenAI endpoint that is not supported here. Fix: GET /openapi.json lists those that are"
        error = {"message": text, "type": "invalid_request_error", "param": None, "code": "not_found"}
        assert (response.status_code, response.json()) == (404, {"error": error})
    response = http.post("/messages", json={})
    assert response.json()["error"]["message"] == "There is nothing at /messages. Fix: use /v1/messages"
    response = http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "/v1/chat/completions does not take GET. Fix: use POST"
