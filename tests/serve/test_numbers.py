"""Promises with a number of seconds in them: they depend on the machine, so `make soak` measures them and prints what it saw."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from running_server import RunningServer, serving
from tiny_server_model import write_tiny

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800), pytest.mark.xdist_group("serve-numbers")]

KEYS = ("key-of-alice", "key-of-bob")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LOOP_SECONDS = 0.050
REFUSAL_SECONDS = 0.010
BOMB_SECONDS = 2.0
GAP_SECONDS = 1.0
ISOLATED = (0.45, 0.55)  # the share of pairs in which a guesser by time is right: a half is none
PAIRS = 800


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, short_folder: pathlib.Path) -> Iterator[RunningServer]:
    model = write_tiny(tmp_path_factory.mktemp("numbers") / "model", chat_template=TEMPLATE)
    limits: dict[str, Any] = {"kv_tokens": 1 << 16, "max_running": 64, "max_model_len": 4096, "api_key": ",".join(KEYS)}
    more = {"backend": "cpu", "http_module": "tests.serve.lag_process", "data_dir": short_folder / "data"}
    with serving(model, short_folder / "numbers", **limits, **more) as running:
        yield running


def client(server: RunningServer, key: str = KEYS[0]) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=server.uds, verify=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60, headers={"authorization": f"Bearer {key}"})


async def worst_lag(server: RunningServer, work: Callable[[], Awaitable[object]]) -> float:
    async with client(server) as asking:
        await asking.get("/lag")
        await work()
        return (await asking.get("/lag")).json()


async def gaps_beside(server: RunningServer, work: Callable[[], Awaitable[object]]) -> list[float]:
    """The times between the tokens of a stream that runs while the work is done."""
    found: list[float] = []

    async def stream() -> None:
        last = time.monotonic()
        async for _ in server.lines([1, 2, 3], max_tokens=4000, ignore_eos=True):
            found.append(time.monotonic() - last)
            last = time.monotonic()

    reading = asyncio.create_task(stream())
    while len(found) < 5:
        await asyncio.sleep(0.01)
    del found[:]
    await work()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await server.until_idle()
    return sorted(found)


def test_the_event_loop_is_never_held_up(server: RunningServer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 25_000

    async def tokenize() -> None:
        async with client(server) as asking:
            assert (await asking.post("/tokenize", json={"prompt": text[: 1 << 20]})).status_code == 200

    async def streams() -> None:
        await asyncio.gather(*(server.answer([i + 1, 2], max_tokens=200, ignore_eos=True) for i in range(32)))

    async def work() -> None:
        await tokenize()  # the tokenizer for long texts is opened once
        long, load = await worst_lag(server, tokenize), await worst_lag(server, streams)
        print(f"the loop was held up {1e3 * long:.0f} ms by a text of a megabyte, {1e3 * load:.0f} ms by 32 streams")
        assert max(long, load) <= LOOP_SECONDS

    asyncio.run(work())


def test_broken_json_is_refused_in_milliseconds(server: RunningServer) -> None:
    deep, doubled = b"[" * 100_000, b'{"prompt":"a","prompt":' + b'{"a":' * 100_000
    bodies = [deep, doubled, b'{"prompt":"\\ud800"}', b'{"prompt":"\xff"}', b'{"prompt":"a\x00"}', b"{" * 100_000]

    async def work() -> None:
        async with client(server) as asking:
            for body in bodies:
                seconds = []
                for _ in range(30):
                    begun = time.monotonic()
                    answer = await asking.post("/v1/completions", content=body)
                    seconds.append(time.monotonic() - begun)
                    assert answer.status_code == 400, answer.text
                print(f"{body[:24]!r}: refused after {1e3 * statistics.median(seconds):.1f} ms")
                assert statistics.median(seconds) <= REFUSAL_SECONDS

    asyncio.run(work())


def test_grammar_bombs_slow_nobody(server: RunningServer) -> None:
    bombs: list[dict[str, Any]] = [
        {"regex": r"^([a-z]{0,10}){0,10}$"},
        {"regex": r"^([a-z]{0,50}){0,50}$"},
        {"json": {"enum": [f"value {i}" for i in range(50_000)]}},
        {"grammar": 'start: a\na: a a | "x" |'},
        {"json": {"$ref": "#"}},
        {"json": {"type": "array", "minItems": 5000, "maxItems": 100_000, "items": {"type": "integer"}}},
    ]
    bodies = [json.dumps({"prompt": "a", "max_tokens": 4, "structured_outputs": bomb}) for bomb in bombs]
    nested = '{"type":"array","items":' * 5000 + "{}" + "}" * 5000
    bodies.append('{"prompt":"a","max_tokens":4,"structured_outputs":{"json":' + nested + "}}")
    slowest: dict[str, float] = {}

    async def throw() -> None:
        async with client(server) as asking:
            for body in bodies * 3:
                begun = time.monotonic()
                answer = await asking.post("/v1/completions", content=body)
                slowest[body[40:80]] = max(slowest.get(body[40:80], 0.0), time.monotonic() - begun)
                assert answer.status_code in (200, 400), answer.text

    async def work() -> None:
        quiet = await gaps_beside(server, lambda: asyncio.sleep(3.0))
        beside = await gaps_beside(server, throw)
        late = [found[int(0.99 * len(found))] for found in (quiet, beside)]
        middle = statistics.median(beside) / statistics.median(quiet)
        print(f"slowest bomb {max(slowest.values()):.2f} s; another stream's gaps beside them: p50 {middle:.0%} of the quiet ones,")
        print(f"p99 {1e3 * late[1]:.0f} ms for {1e3 * late[0]:.0f}, longest {1e3 * beside[-1]:.0f} ms for {1e3 * quiet[-1]:.0f}")
        assert max(slowest.values()) <= BOMB_SECONDS, slowest
        assert beside[-1] < GAP_SECONDS

    asyncio.run(work())


def test_nobody_can_tell_by_time_what_another_key_has_cached(server: RunningServer) -> None:
    dice = random.Random(11)

    async def first_token(asking: httpx.AsyncClient, prompt: list[int]) -> float:
        begun = time.perf_counter()
        answer = await asking.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        return time.perf_counter() - begun

    def draw() -> list[int]:
        return [dice.randrange(1, 250) for _ in range(512)]

    async def guess(asked_by: str, pairs: int) -> float:
        """How often the cached one of two prompts is the quicker."""
        cached, fresh = [], []
        async with client(server, KEYS[0]) as alice, client(server, asked_by) as other:
            for _ in range(pairs):
                known, unknown = draw(), draw()
                await first_token(alice, known)
                for kind, prompt in dice.sample([(cached, known), (fresh, unknown)], 2):
                    kind.append(await first_token(other, prompt))
        wins = sum((c < f) + 0.5 * (c == f) for c in cached for f in fresh)
        return wins / (len(cached) * len(fresh))

    async def work() -> None:
        same, other = await guess(KEYS[0], 100), await guess(KEYS[1], PAIRS)
        print(f"a guesser by time is right in {same:.0%} of pairs with the same key, {other:.1%} with another")
        assert same > 0.8, "the guesser is too dull to show anything"
        assert ISOLATED[0] <= other <= ISOLATED[1]

    asyncio.run(work())
