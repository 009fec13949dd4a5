"""Clients who leave: what they held is free before another step ends, and no step is planned for them, however they leave."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
from collections.abc import Iterator

import msgspec
import pytest
from running_server import PATIENCE, RunningServer, serving

pytestmark = pytest.mark.xdist_group("serve-leaving")

MOST_IN_FLIGHT = 2  # steps that had been planned when the client left


@pytest.fixture(scope="module")
def server(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> Iterator[RunningServer]:
    limits = {"kv_tokens": 8192, "max_model_len": 4096, "heartbeat_timeout": PATIENCE, "data_dir": short_folder / "data"}
    with serving(tiny_path, short_folder / "leaving", http_module="tests.serve.poisoned_process", **limits) as running:
        yield running


def _request(stream: bool) -> bytes:
    body = msgspec.json.encode({"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": stream})
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("how", ["stream", "whole", "pipelined", "reset"])
def test_a_disconnect_frees_its_memory_without_another_step(server: RunningServer, how: str) -> None:
    """The worker is stopped, so that no step can end: what becomes free is freed by the disconnect alone."""

    async def leave() -> None:
        begun = (await server.until_idle())["steps"]
        _, writer = await asyncio.open_unix_connection(server.uds)
        writer.write(_request(how != "whole") * (2 if how == "pipelined" else 1))
        while (await server.stats())["steps"] < begun + 5:
            await asyncio.sleep(0.001)
        rank = server.processes()["rank"]
        os.kill(rank, signal.SIGSTOP)
        try:
            before = await server.stats()
            assert before["running"] == 1 and before["pages_owned"] > 0, before
            writer.transport.abort() if how == "reset" else writer.close()
            while (stats := await server.stats())["requests"]:
                await asyncio.sleep(0.01)
            assert stats["running"] == stats["pages_owned"] == stats["pages_locked"] == 0, stats
            assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"], stats
            assert stats["steps"] - before["steps"] <= MOST_IN_FLIGHT
        finally:
            os.kill(rank, signal.SIGCONT)
        after = await server.until_idle()
        assert after["steps"] == stats["steps"], "a step was planned for a client who had left"
        assert after["tokens_generated"] == stats["tokens_generated"]

    asyncio.run(asyncio.wait_for(leave(), PATIENCE))


def test_too_many_requests_in_one_pipeline_end_the_connection(server: RunningServer) -> None:
    async def crowd() -> bytes:
        reader, writer = await asyncio.open_unix_connection(server.uds)
        writer.write(_request(True) * 40)
        said = await reader.read()
        writer.close()
        await server.until_idle()
        return said

    assert b"HTTP/1.1 429" in asyncio.run(asyncio.wait_for(crowd(), PATIENCE))
