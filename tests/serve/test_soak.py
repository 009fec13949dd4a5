"""The long versions: many requests, many disconnects, many faults, a minute of overload. Run by `make soak`."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from running_server import RunningServer, serving

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600), pytest.mark.xdist_group("serve-soak")]

PROBER = pathlib.Path(__file__).with_name("refusal_prober.py")
NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "50000"))
SETTLED = 0.2  # of the requests, after which memory is compared with the end


@pytest.fixture(scope="module")
def server(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> Iterator[RunningServer]:
    limits: dict[str, Any] = {"kv_tokens": 1 << 14, "max_running": 64, "max_waiting": 64, "max_model_len": 4096}
    more = {"http_workers": 2, "heartbeat_timeout": 5, "backend": "cpu", "data_dir": short_folder / "data"}
    with serving(tiny_path, short_folder / "soak", http_module="tests.serve.poisoned_process", **more, **limits) as running:
        yield running


class Connection:
    """One keep-alive connection that asks and counts lines, with as little work as possible."""

    def __init__(self, server: RunningServer):
        self._server = server
        self._streams: Any = None

    async def send(self, tokens: list[int], **sampling: Any) -> None:
        await self.post("/open", {"tokens": tokens, "sampling": {"ignore_eos": True, **sampling}})

    async def post(self, path: str, document: dict[str, Any]) -> None:
        body = msgspec.json.encode(document)
        await self.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))

    async def write(self, data: bytes) -> None:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._server.uds)
        self._streams[1].write(data)

    async def read(self, size: int = 1 << 16) -> bytes:
        return await self._streams[0].read(size)

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


def _threads(server: RunningServer) -> dict[str, int]:
    return {role: len(os.listdir(f"/proc/{pid}/task")) for role, pid in server.processes().items()}


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
                    before.update(memory=_memory(server), descriptors=_descriptors(server), threads=_threads(server))
            connection.cut()

        await asyncio.gather(*(worker(seed) for seed in range(32)))
        await server.until_idle()
        grown = {role: now - before["memory"][role] for role, now in _memory(server).items()}
        print("MiB grown:", {role: round(value, 2) for role, value in grown.items()})
        allowed = 1.0 * (1 - SETTLED) * NUM_REQUESTS / 10_000  # MiB: one for ten thousand
        assert all(value < allowed for value in grown.values()), grown
        assert all(now <= before["descriptors"][role] for role, now in _descriptors(server).items())
        assert _threads(server) == before["threads"]

    asyncio.run(work())


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_a_thousand_disconnects(server: RunningServer, stream: bool) -> None:
    async def storm() -> None:
        dice, steps = random.Random(3), []
        for _ in range(20):
            connections = [Connection(server) for _ in range(50)]
            for connection in connections:
                long = {"prompt": [dice.randrange(1, 250)], "max_tokens": 200, "ignore_eos": True, "stream": stream}
                await connection.post("/v1/completions", long)
            await asyncio.sleep(dice.random() * 0.2)
            for connection in connections:
                connection.cut()
            before = (await server.stats())["steps"]
            steps.append((await server.until_idle())["steps"] - before)
        print(f"steps between 50 disconnects and nothing running: median {sorted(steps)[10]}, most {max(steps)}")
        assert sorted(steps)[10] < 20, steps  # 200 would have been needed for the answers
        stats = await server.until_idle()
        await asyncio.sleep(0.3)
        assert (await server.stats())["tokens_generated"] == stats["tokens_generated"]

    asyncio.run(storm())


def test_five_hundred_idle_connections_and_a_thousand_half_heads(server: RunningServer) -> None:
    async def crowd() -> None:
        before, descriptors = _memory(server), _descriptors(server)
        idle = [Connection(server) for _ in range(500)]
        for connection in idle:
            await connection.ask([1], max_tokens=1)
        halves = [Connection(server) for _ in range(1000)]
        for number, connection in enumerate(halves):
            await connection.write([b"", b"POST /op", b"POST /open HTTP/1.1\r\nhost: x\r\nx-a: b"][number % 3])
        assert b"length" in await Connection(server).ask([2], max_tokens=5)
        answers = await asyncio.gather(*(asyncio.wait_for(connection.read(), 60) for connection in halves))
        assert {answer[:12] for answer in answers} == {b"HTTP/1.1 408"}
        grown = {role: now - before[role] for role, now in _memory(server).items()}
        assert all(value < 50 for value in grown.values()), grown
        assert b"length" in await idle[0].ask([2], max_tokens=5), "an idle connection was lost"
        for connection in idle + halves:
            connection.cut()
        await server.until_idle()
        while any(now > descriptors[role] + 2 for role, now in _descriptors(server).items()):
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(crowd(), 300))


def test_lies_about_lengths(server: RunningServer) -> None:
    async def lie() -> None:
        for head, status in [
            (b"Content-Length: 1073741824\r\n\r\n", b"413"),
            (b"Transfer-Encoding: chunked\r\n\r\n7fffffffffff\r\n" + b"a" * 1000, None),
            (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
            (b"X-A: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
        ]:
            connection = Connection(server)
            await connection.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head)
            if status is not None:
                answer = await asyncio.wait_for(connection.read(), 60)
                assert answer.startswith(b"HTTP/1.1 " + status), answer[:100]
            connection.cut()
        assert b"length" in await Connection(server).ask([2], max_tokens=5)
        await server.until_idle()

    asyncio.run(lie())


def test_two_hundred_requests_in_little_memory(server: RunningServer) -> None:
    """They need four times the memory there is: some are paused, all end, and none differs from what it is alone."""

    async def exhaust() -> None:
        prompts = [[number % 250 + 1, number // 250 + 7, 9] for number in range(200)]
        sampling: dict[str, Any] = {"max_tokens": 300, "temperature": 0.0, "ignore_eos": True}

        async def ask(prompt: list[int]) -> list[int]:
            while (answer := await server.answer(prompt, **sampling))["status"] == 503:
                await asyncio.sleep(0.2)
            assert answer["finish"] == "length", answer
            return answer["token_ids"]

        together = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        for number in range(0, 200, 20):
            assert await ask(prompts[number]) == together[number], number
        print("preemptions:", (await server.until_idle())["preemptions"])

    asyncio.run(exhaust())


def test_slow_readers_slow_nobody(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> None:
    """Another stream goes on beside 200 that read ten bytes a second as it does beside 200 that read at once."""
    limits: dict[str, Any] = {"kv_tokens": 1 << 18, "max_running": 256, "max_model_len": 4096}
    server = RunningServer(tiny_path, short_folder / "slow", backend="cpu", **limits)

    async def gaps(tokens: int) -> list[float]:
        found, last = [], time.monotonic()
        async for _ in server.lines([1, 2], max_tokens=tokens, ignore_eos=True):
            found.append(time.monotonic() - last)
            last = time.monotonic()
        return sorted(found[1:])

    async def sip(connection: Connection) -> None:
        await connection.send([3], max_tokens=1000)
        while await connection.read(10):
            await asyncio.sleep(1.0)

    async def beside(reading: Any) -> list[float]:
        connections = [Connection(server) for _ in range(200)]
        tasks = [asyncio.create_task(reading(connection)) for connection in connections]
        while (await server.stats())["running"] < 200:
            await asyncio.sleep(0.05)
        found = await gaps(100)
        for task, connection in zip(tasks, connections, strict=True):
            task.cancel()
            connection.cut()
        await server.until_idle()
        return found

    async def compare() -> None:
        await server.until("ready")
        quick = await beside(lambda connection: connection.ask([3], max_tokens=1000))
        slow = await beside(sip)
        ratio, late = slow[len(slow) // 2] / quick[len(quick) // 2], slow[-2] / quick[-2]
        print(f"gaps beside 200 slow readers, of those beside 200 quick ones: p50 {ratio:.0%}, p98 {late:.0%}")
        assert ratio < 1.1, ratio

    try:
        asyncio.run(compare())
    finally:
        server.end()


def test_a_minute_of_ten_times_too_much(server: RunningServer) -> None:
    async def measure(workers: int, seconds: float) -> tuple[float, list[float], list[float]]:
        """Answers a second, and how long refusals took: the first of each client (they begin at once), and the others."""
        first: list[float] = []
        later: list[float] = []
        done, until = 0, time.monotonic() + seconds

        async def worker(seed: int) -> None:
            nonlocal done
            dice, connection, refusals = random.Random(seed), Connection(server), first
            while time.monotonic() < until:
                begun = time.monotonic()
                end = await connection.ask([dice.randrange(1, 250) for _ in range(8)], max_tokens=64)
                if b"Overloaded" in end:
                    refusals.append(time.monotonic() - begun)
                    refusals = later
                    connection.cut()
                    await asyncio.sleep(int(end.partition(b"retry-after-ms: ")[2].split()[0]) / 1000)  # as it was told
                else:
                    done += 1
            connection.cut()

        await asyncio.gather(*(worker(seed) for seed in range(workers)))
        return done / seconds, first, later

    async def overload() -> None:
        peak, *_ = await measure(64, 10)
        prober = await asyncio.create_subprocess_exec(
            sys.executable, str(PROBER), server.uds, "62", stdout=asyncio.subprocess.PIPE
        )  # fmt: skip
        loaded, first, later = await measure(640, 60)
        probed = json.loads((await prober.communicate())[0])
        print(f"goodput {loaded / peak:.0%} of the peak")
        for who, times in (
            ("the 640 clients of one process, the first of each", first),
            ("those clients when they come back", later),
            ("one request at a time in another process", probed),
        ):
            assert times, f"nothing was refused to {who}"
            middle, late, last = (1e3 * sorted(times)[int(part * (len(times) - 1))] for part in (0.5, 0.99, 1.0))
            print(f"{len(times)} refusals to {who}: p50 {middle:.1f} ms, p99 {late:.1f} ms, at most {last:.0f} ms")
        assert loaded > 0.9 * peak, (loaded, peak)
        await server.until_idle()
        again, *_ = await measure(64, 5)
        assert again > 0.8 * peak, (again, peak)

    asyncio.run(overload())


def test_twenty_dead_workers_under_streams(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> None:
    server = RunningServer(tiny_path, short_folder / "dead", backend="cpu", kv_tokens=1 << 17, max_model_len=4096)
    told, unready, back = [], [], []

    async def strike() -> None:
        await server.until("ready")
        tasks = [asyncio.create_task(Connection(server).ask([i + 1], max_tokens=3000)) for i in range(32)]
        while (await server.stats())["running"] < 32:
            await asyncio.sleep(0.01)
        struck = time.monotonic()
        os.kill(server.processes()["rank"], signal.SIGKILL)
        for end in await asyncio.gather(*tasks):
            assert b"WorkerDied" in end, end
        told.append(time.monotonic() - struck)
        await server.until("starting", "failed")
        unready.append(time.monotonic() - struck)
        await server.until("ready")
        back.append(time.monotonic() - struck)
        assert b"length" in await Connection(server).ask([5], max_tokens=3)
        await server.until_idle()

    try:
        for _ in range(20):
            asyncio.run(asyncio.wait_for(strike(), 120))
    finally:
        server.end()
    for what, seconds in (("all 32 streams told", told), ("not ready any more", unready), ("ready again", back)):
        print(f"{what} after {sorted(seconds)[10]:.2f} s (median), {max(seconds):.2f} s at most")
    assert sorted(told)[10] < 1.0 and sorted(unready)[10] < 1.0, (told, unready)
