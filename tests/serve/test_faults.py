"""Every process is killed, and stopped, under streams: each stream ends with an error, the states tell it, service comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator

import httpx
import pytest
from running_server import RunningServer, assert_gone, descendants, serving

from trireme.serve.runtime import birth_of

pytestmark = pytest.mark.xdist_group("serve-faults")

STREAMS = 32
SILENCE = 3.0
LONG = {"max_tokens": 3_500, "ignore_eos": True}  # all of them fit into memory together: none has to wait for another's end
QUESTION, SHORT = [5, 6, 7, 8], {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> Iterator[RunningServer]:
    with serving(tiny_path, short_folder / "faults", kv_tokens=1 << 17, heartbeat_timeout=SILENCE) as running:
        yield running


async def _begun(server: RunningServer) -> tuple[list[asyncio.Task], float]:
    """Streams that have all begun to speak."""
    tasks, spoken = [], asyncio.Semaphore(0)

    async def listen(number: int) -> tuple[dict, float]:
        last: dict = {}
        async for line in server.lines([number + 1, 2, 3], **LONG):
            if not last:
                spoken.release()
            last = line
        return last, time.monotonic()

    for number in range(STREAMS):
        tasks.append(asyncio.create_task(listen(number)))
    for _ in range(STREAMS):
        await spoken.acquire()
    return tasks, time.monotonic()


@pytest.mark.parametrize("role", ["detokenizer", "http-0", "rank", "router"])
@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.wide)], ids=["killed", "stopped"])
def test_a_process_lost_under_streams(server: RunningServer, role: str, blow: signal.Signals) -> None:
    asyncio.run(_lose(server, role, blow))


async def _lose(server: RunningServer, role: str, blow: signal.Signals) -> None:
    await server.until("ready")
    before = await server.answer(QUESTION, **SHORT)
    assert before["finish"] == "length", before
    restarts = (await server.stats())["worker_restarts"]
    victim = server.processes()[role]
    log_length = len(server.log)
    tasks, _ = await _begun(server)
    struck = time.monotonic()
    os.kill(victim, blow)
    states = asyncio.create_task(_states(server))
    for last, ended in await asyncio.gather(*tasks):
        assert last.get("error"), last
        assert last["kind"] == ("connection" if role == "http-0" else "WorkerDied"), last
        allowed = 5.0 if blow is signal.SIGKILL else SILENCE + 10.0  # generous: the machine may be loaded; `make soak` is not
        assert ended - struck < allowed, f"a stream heard of it after {ended - struck:.1f} s"
    if role != "http-0":
        assert "starting" in await states or "failed" in states.result(), states.result()
    await server.until("ready")
    states.cancel()
    assert server.processes()[role] != victim
    after = await server.answer(QUESTION, **SHORT)
    assert after["token_ids"] == before["token_ids"]
    await server.until_idle()
    if role == "rank":
        assert (await server.stats())["worker_restarts"] == restarts + 1
    if blow is signal.SIGSTOP:
        assert "Current thread" in server.log[log_length:], "no stacks in the log"


async def _states(server: RunningServer) -> set[str]:
    """The names of the states from now on, until one is not ready."""
    seen: set[str] = set()
    while not seen - {"ready"}:
        with contextlib.suppress(httpx.HTTPError):
            seen.add((await server.state())["name"])
        await asyncio.sleep(0.01)
    return seen


def test_nothing_survives_the_supervisor(server: RunningServer) -> None:
    """The last of this file: it takes the server from the others."""
    asyncio.run(server.until("ready"))
    family = {pid: birth_of(pid) for pid in descendants(server.process.pid)}
    assert len(family) >= 4, family
    os.kill(server.processes()["rank"], signal.SIGSTOP)  # even one that cannot notice anything
    server.process.kill()
    server.process.wait()
    assert_gone(family)
