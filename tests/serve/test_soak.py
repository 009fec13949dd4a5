"""The long versions: many requests, many disconnects, many faults, a minute of overload. Run by `make soak`."""

from __future__ import annotations

import asyncio
import os
import pathlib
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600), pytest.mark.xdist_group("serve-soak")]

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "50000"))
SETTLED = 0.2  # of the requests, after which memory is compared with the end


@pytest.fixture(scope="module")
def server(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> Iterator[RunningServer]:
    limits: dict[str, Any] = {"kv_tokens": 1 << 14, "max_running": 64, "max_waiting": 64, "max_model_len": 4096}
    running = RunningServer(tiny_path, short_folder / "soak", http_workers=2, heartbeat_timeout=5, backend="cpu", **limits)
    try:
        asyncio.run(running.until("ready"))
        yield running
    finally:
        running.end()


class Connection:
    """One keep-alive connection that asks and counts lines, with as little work as possible."""

    def __init__(self, server: RunningServer):
        self._server = server
        self._streams: Any = None

    async def send(self, tokens: list[int], **sampling: Any) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._server.uds)
        body = msgspec.json.encode({"tokens": tokens, "sampling": {"ignore_eos": True, **sampling}})
        self._streams[1].write(b"POST /open HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def ask(self, tokens: list[int], **sampling: Any) -> bytes:
        """The last bytes of the answer."""
        await self.send(tokens, **sampling)
        reader, end = self._streams[0], b""
        while not end.endswith(b"0\r\n\r\n") and b'"kind"' not in end:
            piece = await reader.read(1 << 16)
            if not piece:
                break
            end = (end + piece)[-400:]
        return end

    def cut(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


def _memory(server: RunningServer) -> dict[str, float]:
    """Resident MiB of every process."""
    found = {}
    for role, pid in server.processes().items():
        pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[role] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return found


def _descriptors(server: RunningServer) -> dict[str, int]:
    return {role: len(os.listdir(f"/proc/{pid}/fd")) for role, pid in server.processes().items()}


def test_requests_without_end_grow_nothing(server: RunningServer) -> None:
    async def work() -> None:
        left, settled = iter(range(NUM_REQUESTS)), asyncio.Event()
        before: dict[str, Any] = {}

        async def worker(seed: int) -> None:
            dice, connection = random.Random(seed), Connection(server)
            for number in left:
                tokens = [dice.randrange(1, 250) for _ in range(dice.randrange(1, 40))]
                if dice.random() < 0.1:
                    await connection.send(tokens, max_tokens=20)
                    connection.cut()
                    continue
                end = await connection.ask(tokens, max_tokens=dice.randrange(1, 8), n=1 + (dice.random() < 0.1))
                assert b'"finish_reason":"length"' in end or b"Overloaded" in end, end
                if number >= SETTLED * NUM_REQUESTS and not settled.is_set():
                    settled.set()
                    before.update(memory=_memory(server), descriptors=_descriptors(server))
            connection.cut()

        await asyncio.gather(*(worker(seed) for seed in range(32)))
        await server.until_idle()
        grown = {role: now - before["memory"][role] for role, now in _memory(server).items()}
        print("MiB grown:", {role: round(value, 2) for role, value in grown.items()})
        allowed = 1.0 * (1 - SETTLED) * NUM_REQUESTS / 10_000 + 2.0  # 1 MiB per 10,000, and the allocator's mood
        assert all(value < allowed for value in grown.values()), grown
        assert all(now <= before["descriptors"][role] for role, now in _descriptors(server).items())

    asyncio.run(work())


def test_a_thousand_disconnects(server: RunningServer) -> None:
    async def storm() -> None:
        dice = random.Random(3)
        for _ in range(20):
            connections = [Connection(server) for _ in range(50)]
            for connection in connections:
                await connection.send([dice.randrange(1, 250)], max_tokens=500)
            await asyncio.sleep(dice.random() * 0.2)
            for connection in connections:
                connection.cut()
        stats = await server.until_idle()
        await asyncio.sleep(0.3)
        assert (await server.stats())["tokens_generated"] == stats["tokens_generated"]

    asyncio.run(storm())


def test_slow_readers_slow_nobody(server: RunningServer) -> None:
    async def gaps(seconds: float) -> list[float]:
        found, last = [], time.monotonic()
        async for _ in server.lines([1, 2], max_tokens=int(seconds * 50), ignore_eos=True):
            found.append(time.monotonic() - last)
            last = time.monotonic()
        return sorted(found)

    async def crawl() -> None:
        connections = [Connection(server) for _ in range(40)]
        reading = [asyncio.create_task(connection.ask([3], max_tokens=3000)) for connection in connections]
        beside_readers = await gaps(4)
        for task, connection in zip(reading, connections, strict=True):
            task.cancel()
            connection.cut()
        for connection in connections:
            await connection.send([3], max_tokens=3000)  # and nobody reads
        beside_sleepers = await gaps(4)
        ratio = beside_sleepers[len(beside_sleepers) // 2] / beside_readers[len(beside_readers) // 2]
        print(f"p50 gap beside 40 slow readers: {ratio:.0%} of that beside 40 quick ones")
        assert ratio < 1.5, ratio
        for connection in connections:
            connection.cut()
        await server.until_idle()

    asyncio.run(crawl())


def test_a_minute_of_ten_times_too_much(server: RunningServer) -> None:
    async def measure(workers: int, seconds: float) -> tuple[float, list[float]]:
        """Answers a second, and how long refusals took."""
        done, refusals, until = 0, [], time.monotonic() + seconds

        async def worker(seed: int) -> None:
            nonlocal done
            dice, connection = random.Random(seed), Connection(server)
            while time.monotonic() < until:
                begun = time.monotonic()
                end = await connection.ask([dice.randrange(1, 250) for _ in range(8)], max_tokens=64)
                if b"Overloaded" in end:
                    refusals.append(time.monotonic() - begun)
                    connection.cut()
                    await asyncio.sleep(2.0)  # as a client told to come back later does
                else:
                    done += 1
            connection.cut()

        await asyncio.gather(*(worker(seed) for seed in range(workers)))
        return done / seconds, sorted(refusals)

    async def overload() -> None:
        peak, _ = await measure(64, 10)
        loaded, refusals = await measure(640, 60)
        assert refusals, "nothing was refused"
        middle, late = refusals[len(refusals) // 2], refusals[int(0.99 * len(refusals))]
        print(
            f"goodput {loaded / peak:.0%} of the peak; {len(refusals)} refusals, p50 {1e3 * middle:.0f} ms, p99 {1e3 * late:.0f} ms"
        )
        assert loaded > 0.9 * peak, (loaded, peak)
        await server.until_idle()
        again, _ = await measure(64, 5)
        assert again > 0.8 * peak, (again, peak)

    asyncio.run(overload())


def test_twenty_dead_workers_under_streams(server: RunningServer) -> None:
    async def strike() -> None:
        await server.until("ready")
        tasks = [asyncio.create_task(Connection(server).ask([i + 1], max_tokens=3000)) for i in range(32)]
        while (await server.stats())["running"] < 4:
            await asyncio.sleep(0.05)
        os.kill(server.processes()["rank"], signal.SIGKILL)
        for end in await asyncio.gather(*tasks):
            assert b"WorkerDied" in end, end
        await server.until("ready")
        assert b"length" in await Connection(server).ask([5], max_tokens=3)
        await server.until_idle()

    for _ in range(20):
        asyncio.run(strike())
