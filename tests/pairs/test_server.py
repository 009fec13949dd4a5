"""One server is asked all at once for every pair of what requests may ask for, whole and in streams: the answers are plain ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.api.served import MODEL, Served

from .cover import Row
from .plain import EXACT, Bodies, sequences
from .runs import PROMPT, request_of
from .table import PLAINEST, rows, served, short

ROWS = rows(served())


@pytest.fixture(scope="module")
def answers(bodies: Callable[[str], Bodies], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict]]]:
    """By row: its choices."""
    model, folder = bodies("llama").forms.stored(""), tmp_path_factory.mktemp("srv")
    server = Served(folder, "--backend", "cpu", "--threads", "1", "--max-running", "16", "--pack-cache", "off", model=str(model))
    try:
        server.wait()
        with server.client() as client, ThreadPoolExecutor(len(ROWS)) as threads:
            found = threads.map(lambda row: ask(client, row), ROWS)
            yield {short(row): choices for row, choices in zip(ROWS, found, strict=True)}
    finally:
        server.end()


def ask(client: httpx.Client, row: Row) -> list[dict[str, Any]]:
    """The row's request in the API's words; its choices, those of a stream put together."""
    s = request_of(row)
    names = ("max_tokens", "seed", "temperature", "top_k", "top_p", "min_p", "n", "best_of", "stop", "stop_token_ids", "min_tokens")
    names += ("allowed_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs")
    body = {name: getattr(s, name) for name in names} | {"no_repeat_ngram_size": s.no_repeat_ngram}
    body |= {"include_stop_str_in_output": s.include_stop}
    body |= {"model": MODEL, "prompt": PROMPT, "return_token_ids": True, "logit_bias": {str(t): b for t, b in s.logit_bias.items()}}
    body |= {"structured_outputs": {"grammar": s.grammar}} if s.grammar else {}
    if row["way"] == "server":
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    whole: dict[int, dict[str, Any]] = {}
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for part in json.loads(line[6:])["choices"]:
                    add(whole.setdefault(part["index"], part), part)
    return [whole[index] for index in sorted(whole)]


def add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Puts what came later to a choice of a stream."""
    if whole is part:
        return
    whole["text"] += part["text"]
    whole["token_ids"] += part["token_ids"]
    whole["finish_reason"] = part["finish_reason"] or whole["finish_reason"]
    if part["logprobs"]:
        whole["logprobs"]["token_logprobs"] += part["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("row", ROWS, ids=short)
def test_answers_are_the_plain_ones(row: Row, answers: dict[str, list[dict]], bodies: Callable[[str], Bodies]) -> None:
    plain, choices = bodies("llama").of(PLAINEST), answers[short(row)]
    asked = request_of(row)
    first = plain.answer(PROMPT, sequences(asked)[0])
    for choice, plainly in zip(choices, plain.answers(PROMPT, asked), strict=True):
        assert (choice["token_ids"], choice["text"]) == (plainly.token_ids, plainly.text)
        assert choice["finish_reason"] == str(plainly.finish_reason)
        if asked.logprobs is not None:
            found = choice["logprobs"]["token_logprobs"]
            assert found == pytest.approx([entry.logprob for entry in plainly.logprobs or []], abs=EXACT)
    if asked.prompt_logprobs is not None:
        for told, entry in zip(choices[0]["prompt_logprobs"][1:], (first.prompt_logprobs or [])[1:], strict=True):
            assert entry and told[str(entry.token)]["logprob"] == pytest.approx(entry.logprob, abs=EXACT)
