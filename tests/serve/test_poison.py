"""One of 64 requests fails in sampler, grammar or parser: only that one does, and its 63 neighbours answer as they do alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from running_server import RunningServer, serving
from safetensors.numpy import load_file, save_file
from tiny_server_model import write_tiny

pytestmark = pytest.mark.xdist_group("serve-poison")

REQUESTS, POISONED = 64, 37
NAN_TOKEN, INFINITE_TOKEN = 200, 201
GAP_SECONDS = 1.0
SAMPLING = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
LETTERS = LLMatcher.grammar_from_lark("start: /[a-e]{40}/")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, short_folder: pathlib.Path) -> Iterator[RunningServer]:
    """Two tokens of its model have embeddings that no arithmetic survives; nothing ever chooses them."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = write_tiny(tmp_path_factory.mktemp("poison") / "model", chat_template=template)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN] = np.nan
    weights["model.embed_tokens.weight"][INFINITE_TOKEN] = np.inf
    weights["lm_head.weight"][[NAN_TOKEN, INFINITE_TOKEN]] = 0.0
    save_file(weights, model / "model.safetensors")
    limits: dict[str, Any] = {"kv_tokens": 3072, "max_running": REQUESTS, "max_waiting": REQUESTS, "max_model_len": 512}
    limits |= {"backend": "cpu", "http_module": "tests.serve.poisoned_process", "data_dir": short_folder}
    with serving(model, short_folder / "poison", **limits) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server: RunningServer) -> list[dict[str, Any]]:
    """The answers to all prompts, each asked when nothing else ran."""

    async def work() -> list[dict[str, Any]]:
        return [await server.answer(_prompt(number), **_sampling(number)) for number in range(REQUESTS)]

    return asyncio.run(work())


def _prompt(number: int) -> list[int]:
    return [number + 1, 2 * number + 3, 77, 5]


def _sampling(number: int) -> dict[str, Any]:
    return {**SAMPLING, "grammar": LETTERS if number % 4 == 0 else None}


async def _with_poison(
    server: RunningServer, alone: list[dict[str, Any]], tokens: list[int], grammar: str | None
) -> dict[str, Any]:
    """All prompts at once, one of them replaced; the others' answers are as they were. Returns the one's."""

    async def ask(number: int) -> dict[str, Any]:
        if number == POISONED:
            return await server.answer(tokens, **{**SAMPLING, "grammar": grammar})
        return await server.answer(_prompt(number), **_sampling(number))

    answers = await asyncio.gather(*(ask(number) for number in range(REQUESTS)))
    for number, answer in enumerate(answers):
        if number != POISONED:
            assert len(answer["token_ids"]) == SAMPLING["max_tokens"] and answer == alone[number], number
    return answers[POISONED]


@pytest.mark.parametrize("token", [NAN_TOKEN, INFINITE_TOKEN], ids=["nan", "infinite"])
def test_logits_that_are_no_numbers(server: RunningServer, alone: list[dict[str, Any]], token: int) -> None:
    async def work() -> None:
        for _ in range(2):  # the second round lies on pages the first has poisoned
            answer = await _with_poison(server, alone, [9] * 40 + [token], None)
            assert answer["finish"] == "error" and answer["error"] and not answer["token_ids"], answer
        await server.until_idle()

    asyncio.run(work())


def test_a_failed_row_is_counted(server: RunningServer) -> None:
    async def errors() -> float:
        async with server.client() as client:
            lines = (await client.get("/metrics")).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if "request_aborted_total" in line and 'cause="error"' in line), 0.0)

    async def work() -> None:
        before = await errors()
        async with server.client() as client:
            answer = await client.post("/v1/completions", json={"prompt": [9, NAN_TOKEN], "max_tokens": 4})
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error", answer.text
        assert await errors() == before + 1

    asyncio.run(work())


@pytest.mark.soak
@pytest.mark.parametrize("poison", ["logits", "grammar"])
def test_the_neighbours_of_a_poisoned_one_wait_no_second(server: RunningServer, poison: str) -> None:
    gaps: list[float] = []

    async def follow(number: int) -> None:
        times = [time.monotonic() async for _ in server.lines(_prompt(number), **SAMPLING)]
        gaps.extend(after - before for before, after in itertools.pairwise(times))

    async def work() -> None:
        how = {"grammar": "start: nothing like this"} if poison == "grammar" else {}
        tokens = [9] * 40 + ([NAN_TOKEN] if poison == "logits" else [])
        neighbours = (follow(number) for number in range(REQUESTS - 1))
        answer, *_ = await asyncio.wait_for(asyncio.gather(server.answer(tokens, **SAMPLING, **how), *neighbours), 120)
        assert answer["finish"] == "error" and len(gaps) == (REQUESTS - 1) * (SAMPLING["max_tokens"] - 1), answer
        await server.until_idle()
        print(f"longest gap of {REQUESTS - 1} streams beside poisoned {poison}: {1e3 * max(gaps):.0f} ms")
        assert max(gaps) < GAP_SECONDS

    asyncio.run(work())


def test_a_grammar_that_fails(server: RunningServer, alone: list[dict[str, Any]]) -> None:
    async def work() -> None:
        answer = await _with_poison(server, alone, [1, 2, 3], "start: nothing like this")
        assert answer["finish"] == "error" and "grammar" in answer["error"], answer
        assert all(set(text["text"]) <= set("abcde") for text in alone[::4])
        await server.until_idle()

    asyncio.run(work())


def test_a_parser_that_fails(server: RunningServer) -> None:
    async def ask(text: str, stream: bool = True) -> tuple[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        async with server.client() as client:
            answer = await client.post("/v1/chat/completions", json={**body, "stream": stream})
        if not stream:
            return "", answer.json().get("error")
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        said = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if "choices" in e)
        return said, next((e["error"] for e in events if "error" in e), None)

    async def work() -> None:
        texts = [f"question {number}" for number in range(REQUESTS - 2)]
        *answers, poisoned, whole = await asyncio.gather(*(ask(text) for text in texts), ask("poison"), ask("poison", stream=False))
        assert poisoned[1]["type"] == whole[1]["type"] == "server_error" and "ZeroDivision" not in str([poisoned, whole])
        assert "ZeroDivisionError" in server.log
        for text, answer in zip(texts, answers, strict=True):
            assert answer[0] and answer == await ask(text), text
        await server.until_idle()

    asyncio.run(work())
