"""A server with narrow bounds: whole answers are whole however much piles up behind them, and a drain that ends in time says so."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.tiny_server_model import write_tiny

from .served import MODEL, Served

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def narrow(tiny_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    server = Served(tmp_path_factory.mktemp("srv"), "--stream-backlog", "4096", model=str(tiny_path))
    try:
        server.wait()
        with server.client() as client:
            yield client
    finally:
        server.end()


def test_many_prompts_with_logprobs_are_answered_whole(narrow: httpx.Client) -> None:
    """As lm-eval asks: 64 prompts in one request. Each answer is larger than what a slow reader of a stream may leave unread."""
    prompts = [f"Question {number}:" for number in range(64)]
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 24, "logprobs": 5, "ignore_eos": True}
    answer = narrow.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(64))
    assert all(len(choice["logprobs"]["tokens"]) == 24 for choice in choices)
    scored = narrow.post("/v1/completions", json={**asked, "max_tokens": 0, "echo": True})
    assert scored.status_code == 200 and [choice["text"] for choice in scored.json()["choices"]] == prompts


def test_min_tokens_is_measured_against_the_max_tokens_that_was_asked_for(narrow: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "min_tokens": 257}
    for name in ("max_tokens", "max_completion_tokens"):
        answer = narrow.post("/v1/chat/completions", json={**asked, name: 258})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 257, answer.text
    assert narrow.post("/v1/chat/completions", json={**asked, "max_tokens": 256}).json()["error"]["param"] == "min_tokens"
