"""A server with narrow bounds: whole answers are whole however much piles up behind them, and a drain that ends in time says so."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.tiny_server_model import write_tiny

from .served import KEYS, MODEL, Served

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


LONG: dict[str, Any] = {"model": MODEL, "max_tokens": 12_000, "temperature": 0, "ignore_eos": True}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Go on."}]}
# Path, body, and how the stream of each API ends when the server has to cut it.
CUT: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("/v1/chat/completions", {**LONG, **MESSAGES}, ('"code":"unavailable"', "data: [DONE]")),
    ("/v1/completions", {**LONG, "prompt": ["a", "b"]}, ('"code":"unavailable"', "data: [DONE]")),
    (
        "/v1/messages",
        {"model": MODEL, "max_tokens": 12_000, "temperature": 0, **MESSAGES},
        ("event: error", '"type":"overloaded_error"'),
    ),
    ("/v1/responses", {"model": MODEL, "input": "Go on.", "temperature": 0}, ("event: response.failed", "event: error")),
    ("/generate_stream", {"inputs": "Go on.", "parameters": {"max_new_tokens": 12_000}}, ('"error_type":"overloaded"',)),
    ("/api/chat", {"model": MODEL, "options": {"temperature": 0}, **MESSAGES}, ('{"error":"The server is shutting down',)),
]


def test_a_drain_that_runs_out_of_time_tells_every_client(tiny_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    room = ("--kv-tokens", "200k", "--policy", "aggressive")
    server = Served(tmp_path, "--drain-timeout", "1", *room, model=str(tiny_path))

    async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool) -> tuple[int, str]:
        answer = await client.post(path, json={**body, "stream": stream})
        return answer.status_code, answer.text

    async def drain() -> list[tuple[int, str]]:
        headers = {"authorization": f"Bearer {KEYS[0]}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
            whole = [(path, body) for path, body, _ in CUT if path != "/generate_stream"]
            tasks = [asyncio.create_task(ask(client, path, body, True)) for path, body, _ in CUT]
            tasks += [asyncio.create_task(ask(client, path, body, False)) for path, body in whole]
            async with asyncio.timeout(30):
                while (await asyncio.to_thread(server.stats))["running"] < len(tasks) + 2:  # two have two prompts
                    await asyncio.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            return list(await asyncio.gather(*tasks))

    try:
        server.wait()
        answers = asyncio.run(drain())
        assert server.process.wait(30) == 0
    finally:
        server.end()
    for (path, _, ending), (status, text) in zip(CUT, answers, strict=False):
        assert status == 200 and all(mark in text[-2000:] for mark in ending), (path, text[-2000:])
        assert text.count("shutting down") == (2 if path == "/v1/responses" else 1), path
    for status, text in answers[len(CUT) :]:
        assert status == 503 and "shutting down" in str(json.loads(text)["error"]), text
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    cut = [line for line in lines if line.get("failure") == "unavailable"]
    assert len(cut) == len(answers) and len({line["request_id"] for line in cut}) == len(answers)
    assert not [line for line in lines if line["level"] not in ("INFO", "DEBUG")]
    assert "Traceback" not in server.log and "Error" not in server.log, server.log


@pytest.mark.wide
def test_a_drain_does_not_wait_for_a_client_that_does_not_read(tiny_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    server = Served(tmp_path, "--drain-timeout", "0.5", model=str(tiny_path))
    body = json.dumps({**LONG, **MESSAGES, "stream": True, "n": 8, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[0]}\r\n"
    try:
        server.wait()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(2)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
    finally:
        server.end()
    assert "Traceback" not in server.log, server.log
