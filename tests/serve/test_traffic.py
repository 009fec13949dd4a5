"""Requests through all processes: the same tokens as offline, aborts, overload, exhaustion, slow readers, sleep and waking."""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from running_server import RunningServer, serving

from trireme import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("serve-traffic")

GREEDY = {"temperature": 0.0, "ignore_eos": True}
KV_TOKENS, MAX_RUNNING, MAX_WAITING, BACKLOG = 1024, 16, 24, 1 << 14


@pytest.fixture(scope="module")
def server(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> Iterator[RunningServer]:
    limits: dict[str, Any] = {"kv_tokens": KV_TOKENS, "max_running": MAX_RUNNING, "max_waiting": MAX_WAITING}
    limits |= {"http_workers": 2, "stream_backlog": BACKLOG, "idle_unload": 4}
    with serving(tiny_path, short_folder / "traffic", **limits) as running:
        yield running


@pytest.fixture(scope="module")
def offline(tiny_path: pathlib.Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), backend="reference", kv_tokens=8192, max_model_len=4096) as llm:
        yield llm


def test_the_same_tokens_and_text_as_offline(server: RunningServer, offline: LLM) -> None:
    prompts = [[i + 1, 3 * i + 5, 7] for i in range(12)]
    expected = offline.generate(prompts, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))

    async def ask() -> list[dict]:
        return await asyncio.gather(*(server.answer(prompt, max_tokens=30, **GREEDY) for prompt in prompts))

    answers = asyncio.run(ask())
    assert [a["token_ids"] for a in answers] == [o.token_ids for o in expected]
    assert [a["text"] for a in answers] == [o.text for o in expected]


def test_a_stop_string_across_tokens_ends_the_request(server: RunningServer, offline: LLM) -> None:
    prompt = [11, 12, 13]
    whole = offline.generate(prompt, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))[0].text
    at = next(i for i in range(8, 50) if whole[i : i + 3].isascii() and whole.find(whole[i : i + 3]) == i)
    stop = whole[at : at + 3]  # three tokens: the tokenizer's are single bytes

    async def ask() -> None:
        answer = await server.answer(prompt, max_tokens=60, stop=[stop], **GREEDY)
        assert answer["text"] == whole[:at] and answer["finish"] == "stop"
        await server.until_idle()

    asyncio.run(ask())


def test_several_sequences_have_seeds_of_their_own(server: RunningServer, offline: LLM) -> None:
    sampling: dict[str, Any] = {"n": 3, "max_tokens": 10, "seed": 5, "ignore_eos": True, "logprobs": 2}
    expected = offline.generate([9, 8, 7], SamplingParams(**sampling))[0]

    async def ask() -> list[list[int]]:
        sequences: list[list[int]] = [[], [], []]
        async for line in server.lines([9, 8, 7], **sampling):
            sequences[line["index"]] += line["token_ids"]
            assert len(line["logprobs"]) == len(line["token_ids"]) and len(line["logprobs"][0][3]) == 2, line
        return sequences

    assert asyncio.run(ask()) == [completion.token_ids for completion in expected.completions]


def test_two_http_processes_share_the_router(server: RunningServer) -> None:
    async def ask() -> set[int]:
        pids: set[int] = set()
        for _ in range(20):
            states = await asyncio.gather(*(server.state() for _ in range(20)))
            pids |= {state["pid"] for state in states}
            if len(pids) == 2:
                break
        return pids

    http = {pid for role, pid in server.processes().items() if role.startswith("http")}
    assert asyncio.run(ask()) == http


def test_what_cannot_be_served_is_refused_with_the_field(server: RunningServer) -> None:
    async def ask() -> None:
        too_long = await server.answer([1] * (KV_TOKENS + 1))
        assert too_long["status"] == 400 and str(KV_TOKENS + 1) in too_long["error"], too_long
        assert (await server.answer([]))["status"] == 400
        assert (await server.answer([1, 100_000]))["status"] == 400
        assert (await server.answer([1], temperature=-1.0))["status"] == 400

    asyncio.run(ask())


def test_a_hundred_disconnects_free_everything(server: RunningServer) -> None:
    async def cut(seed: int) -> None:
        dice = random.Random(seed)
        _, writer = await asyncio.open_unix_connection(server.uds)
        body = msgspec.json.encode({"tokens": [seed % 250 + 1, 2], "sampling": {"max_tokens": 300, "ignore_eos": True}})
        writer.write(b"POST /open HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await asyncio.sleep(dice.random() * 0.3)
        writer.transport.abort() if dice.random() < 0.5 else writer.close()

    async def storm() -> None:
        for batch in range(5):
            await asyncio.gather(*(cut(20 * batch + i) for i in range(20)))
        before = (await server.until_idle())["tokens_generated"]
        await asyncio.sleep(0.2)
        assert (await server.stats())["tokens_generated"] == before

    asyncio.run(storm())


def test_beyond_the_queue_requests_are_refused_at_once(server: RunningServer) -> None:
    async def flood() -> None:
        running = [asyncio.create_task(server.answer([i % 250 + 1], max_tokens=60, **GREEDY)) for i in range(120)]
        answers = await asyncio.gather(*running)
        refused = [a for a in answers if a["status"] == 503]
        assert refused and all(a["kind"] == "Overloaded" for a in refused)
        served = [a for a in answers if a["status"] == 200]
        assert len(served) >= MAX_WAITING and all(len(a["token_ids"]) == 60 and a["error"] is None for a in served)
        await server.until_idle()

    asyncio.run(flood())


def test_memory_too_small_for_all_gives_the_same_answers(server: RunningServer, offline: LLM) -> None:
    prompts = [[i + 1, 77] for i in range(12)]  # 12 x 120 tokens where there is room for 1024
    sampling = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    expected = [output.token_ids for output in offline.generate(prompts, sampling)]

    async def exhaust() -> None:
        answers = await asyncio.gather(*(server.answer(prompt, max_tokens=120, **GREEDY) for prompt in prompts))
        assert [a["token_ids"] for a in answers] == expected
        await server.until_idle()

    asyncio.run(exhaust())


def test_a_slow_reader_is_cut_and_slows_nobody(server: RunningServer) -> None:
    async def crawl() -> None:
        reader, writer = await asyncio.open_unix_connection(server.uds, limit=1024)
        sampling = {"max_tokens": 900, "ignore_eos": True, "logprobs": 20}  # about 1 MB of answer, which nobody reads
        body = msgspec.json.encode({"tokens": [3], "sampling": sampling})
        writer.write(b"POST /open HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        quick = await server.answer([4, 5], max_tokens=20, **GREEDY)
        assert len(quick["token_ids"]) == 20
        stats = await server.until_idle()
        assert stats["tokens_generated"] > 0
        answer = await asyncio.wait_for(reader.read(1 << 24), 30)
        while b"fell more than" not in answer and (more := await asyncio.wait_for(reader.read(1 << 24), 30)):
            answer += more
        assert f"fell more than {BACKLOG} bytes behind".encode() in answer
        writer.close()

    asyncio.run(crawl())


def test_an_idle_server_sleeps_and_wakes(server: RunningServer, offline: LLM) -> None:
    expected = offline.generate([21, 22], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))[0].token_ids

    async def doze() -> None:
        await server.until("sleeping")
        assert "rank" not in server.processes()
        answers = await asyncio.gather(*(server.answer([21, 22], max_tokens=5, **GREEDY) for _ in range(3)))
        assert [a["token_ids"] for a in answers] == [expected] * 3, answers
        assert (await server.state())["name"] in ("ready", "sleeping")  # a slow machine may let it doze off again
        stats = await server.stats()
        assert stats["worker_starts"] >= 2 and stats["tokens_generated"] > 15, stats  # counted over the sleep

    asyncio.run(doze())


def test_nothing_grew(server: RunningServer) -> None:
    """After all the tests above: descriptors as few as at the start, give or take a keep-alive."""
    for role, pid in server.processes().items():
        assert len(os.listdir(f"/proc/{pid}/fd")) < 40, role
