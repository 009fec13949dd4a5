"""What no client should send: extremes of numbers, deep and broken JSON, bad text. Always a 4xx with a reason, never a 5xx.

`make test` tries a few hundred; `make soak` lets schemathesis try fifty thousand from the OpenAPI document.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from tests.serve.tiny_server_model import write_tiny

from .served import KEYS, MODEL, Served

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
TEXT = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
CLAUDE = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
NATIVE = {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}
OLLAMA = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": False, "options": {"num_predict": 1}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/messages": CLAUDE,
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 1, "store": False},
    "/generate": NATIVE,
    "/api/chat": OLLAMA,
}
NUMBERS = ["1e309", "-1e309", "NaN", "Infinity", "-Infinity", "9" * 4301, "-" + "9" * 4301, "true", "1e308", "-1e308"]
NUMBERS += ["18446744073709551616", "9223372036854775808", "-9223372036854775809", "0.5", '"1"', "[]", "{}", "-1", "-0.0", "null"]
CHAT_NUMBERS = ["temperature", "top_p", "top_k", "min_p", "n", "seed", "presence_penalty", "frequency_penalty", "max_tokens"]
CHAT_NUMBERS += ["max_completion_tokens", "repetition_penalty", "min_tokens", "top_logprobs", "priority", "no_repeat_ngram_size"]
SOAK_ROUND = 100  # cases of a route before the next one has its turn
HANG_SECONDS = 5.0
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def answered(response: httpx.Response) -> dict[str, Any]:
    """Whatever it says, it is no failure of the server's, and an error says what is wrong."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        document = response.json()
        assert document["error"]
        return document
    return {}


@pytest.mark.parametrize("field", CHAT_NUMBERS)
def test_extreme_numbers(http: httpx.Client, field: str) -> None:
    for number in NUMBERS:
        # greedy, so that what is accepted without a limit of tokens ends by itself, and the same way each time
        rest = json.dumps({**CHAT, "logprobs": True, "temperature": 0} | {field: "HERE"})
        response = http.post("/v1/chat/completions", content=rest.replace('"HERE"', number))
        document = answered(response)
        if document and "not valid JSON" not in document["error"]["message"]:
            assert document["error"]["param"] in (field, "max_tokens"), (number, document)


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_broken_json(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    whole = json.dumps(body).encode()
    deep = b'{"model":' + b'[{"a":' * 50_000 + b"1" + b"}]" * 50_000 + b"}"
    broken = [b"", b"{", b"[]", b"null", b"1", b'"x"', whole[:-1], whole + b"x", b"\xff\xfe" + whole, b"\x00", deep]
    broken += [whole.replace(b"Hi", b"\xc3\x28"), whole.replace(b"Hi", b"\\ud800"), whole.replace(b"Hi", b"\\u12"), b"{" * 1000]
    broken += [b'{"model": "x", "messages": {}}', b'{"a":' * 70 + b"1" + b"}" * 70]
    for content in broken:
        assert http.post(path, content=content).status_code in (400, 404), content[:60]


def test_odd_but_valid_text_is_served(http: httpx.Client) -> None:
    for text in [
        "\x00",
        "\u202e\u0000abc",
        "\U0010ffff",
        "a\r\n" * 4,
        "🧙‍♂️" * 2,
        "<|im_end|>" * 3,
        "{{ 7 * 7 }}{% for %}",
        "\ufdd0\ufdd1",
    ]:
        message = {**CHAT, "messages": [{"role": "user", "content": text}]}
        assert http.post("/v1/chat/completions", json=message).status_code == 200, text
        assert http.post("/v1/completions", json={**TEXT, "prompt": text}).status_code == 200, text


def test_duplicate_keys_and_empty_prompts(http: httpx.Client) -> None:
    assert http.post("/v1/completions", content=b'{"prompt":"a","prompt":"b","max_tokens":1}').status_code == 200
    for prompt in ["", [], [[]], [""], [1, "a"], ["a", [1]], [True], [[1.5]], [-1], [49152], {}, None, 5]:
        assert http.post("/v1/completions", json={**TEXT, "prompt": prompt}).status_code == 400, prompt
    for messages in [[], {}, None, [{}], [{"role": "x", "content": "y"}], [{"role": "user", "content": 5}], ["hi"]]:
        assert http.post("/v1/chat/completions", json={**CHAT, "messages": messages}).status_code == 400, messages


def test_lists_and_counts_are_bounded(http: httpx.Client) -> None:
    for more in [
        {"n": 1000},
        {"best_of": 1000},
        {"logprobs": 21},
        {"stop": ["a"] * 65},
        {"stop": ["a" * 2000]},
        {"prompt": ["a"] * 1025},
        {"prompt": ["a"] * 300, "n": 4},
        {"logit_bias": {str(i): 1 for i in range(5000)}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"49152": 1}},
        {"logit_bias": {"1": 101}},
        {"stop_token_ids": [-1]},
        {"allowed_token_ids": []},
        {"best_of": 1, "n": 2},
        {"max_tokens": 10**6},
    ]:
        assert http.post("/v1/completions", json={**TEXT, **more}).status_code == 400, more
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]
    assert http.post("/v1/chat/completions", json={**CHAT, "tools": tools}).status_code == 400
    bad_name = [{"type": "function", "function": {"name": "a b<script>"}}]
    assert http.post("/v1/chat/completions", json={**CHAT, "tools": bad_name}).status_code == 400
    for variables in [{"tokenize": True}, {"messages": []}, {"chat_template": "x"}, {"enable_thinking": "x" * 9}]:
        assert http.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": variables}).status_code == 400


def test_rules_that_leave_nothing_to_choose_are_the_clients_own(http: httpx.Client) -> None:
    for more in [
        {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [218]},
        {"structured_outputs": {"regex": ""}, "min_tokens": 1},
    ]:
        response = http.post("/v1/completions", json={**TEXT, **more})
        assert response.status_code == 400 and "no token to choose" in response.text, response.text


@pytest.mark.parametrize("path", BODIES)
def test_texts_that_cannot_fit_are_not_even_tokenized(http: httpx.Client, path: str) -> None:
    whole = json.dumps(BODIES[path]).replace("Hi", "a b c " * 1_000_000)  # a minute of tokenizing
    response = http.post(path, content=whole, timeout=20)
    assert response.status_code == 400 and "a text of 60000" in response.text, response.text[:300]


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_any_value_in_any_field(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    document = http.get("/openapi.json").json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = sorted(document["components"]["schemas"][reference.rpartition("/")[2]]["properties"])

    @QUICK
    @given(field=st.sampled_from(fields), value=_VALUES)
    def attempt(field: str, value: Any) -> None:
        if field in ("max_tokens", "max_output_tokens", "max_completion_tokens", "parameters", "options", "background"):
            return  # a valid value would mean a long answer
        answered(http.post(path, json={**body, field: value}))

    attempt()


@pytest.fixture
def short_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose answers are quick and cannot be long, for what is drawn may be valid."""
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{{ tools or '' }}"
    model = write_tiny(tmp_path_factory.mktemp("tiny") / "tiny", chat_template=template)
    server = Served(tmp_path_factory.mktemp("short"), "--max-model-len", "256", model=str(model))
    try:
        server.wait()
        yield server
    finally:
        server.end()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_schemathesis(short_served: Served) -> None:
    """Cases from the published document, valid and invalid, in rounds over all routes until there were enough."""
    schemathesis = pytest.importorskip("schemathesis")
    wanted, until = int(os.environ.get("SOAK_CASES", "50000")), time.monotonic() + float(os.environ.get("SOAK_SECONDS", "7000"))
    with short_served.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = list(schemathesis.GenerationMode)
    kinds = [(operation.label, mode, operation.as_strategy(generation_mode=mode)) for operation in operations for mode in modes]
    session = requests.Session()  # one connection: most of the time is the drawing of cases as it is
    session.headers["authorization"] = f"Bearer {KEYS[0]}"
    counts: dict[tuple[str, Any], int] = {}
    failures: list[str] = []
    slowest = 0.0
    for label, mode, cases in itertools.cycle(kinds):
        if sum(counts.values()) >= wanted or time.monotonic() > until or failures:
            break
        tried, failed, seconds = _draw(cases, session, short_served.url)
        counts[label, mode] = counts.get((label, mode), 0) + tried
        failures += failed
        slowest = max(slowest, seconds)
    print(f"{sum(counts.values())} cases over {len(operations)} routes, the slowest {slowest:.2f} s")
    assert not failures
    assert sum(counts.values()) >= wanted, counts
    short_served.until_idle()


def _draw(cases: Any, session: requests.Session, url: str) -> tuple[int, list[str], float]:
    """A few fresh cases of one route: how many, what went wrong, and the longest wait. More than HANG_SECONDS is a hang."""
    tried, slowest = 0, 0.0

    @settings(max_examples=SOAK_ROUND, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck), database=None)
    @given(case=cases)
    def attempt(case: Any) -> None:
        nonlocal tried, slowest
        tried += 1
        begun = time.monotonic()
        response = case.call(base_url=url, session=session, timeout=60)
        slowest = max(slowest, time.monotonic() - begun)
        assert response.status_code < 500, (case.method, case.path, response.text[:300])
        assert slowest < HANG_SECONDS, (case.method, case.path, slowest)

    try:
        attempt()
    except Unsatisfiable:
        pass  # a route without parameters has nothing to get wrong
    except AssertionError as error:
        return tried, [str(error)], slowest
    return tried, [], slowest
