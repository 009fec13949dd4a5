"""A server in processes of its own, and what a test asks of it: streams, states, and who is still alive."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec

from trireme.serve.runtime import birth_of

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 60.0  # a loaded machine imports torch slowly


@contextlib.contextmanager
def serving(model: pathlib.Path, folder: pathlib.Path, **settings: Any) -> Iterator[RunningServer]:
    """A server that is ready, ended with the block."""
    running = RunningServer(model, folder, **settings)
    try:
        asyncio.run(running.until("ready"))
        yield running
    finally:
        running.end()


class RunningServer:
    def __init__(self, model: pathlib.Path, folder: pathlib.Path, **settings: Any):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.uds, self.log_file = folder, str(folder / "api.sock"), folder / "log"
        arguments = [f"{name}={value}" for name, value in {"uds": self.uds, "backend": "reference", **settings}.items()]
        environ = dict(os.environ, XDG_RUNTIME_DIR=str(folder), OMP_NUM_THREADS="1")
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.serve.start_server", str(model), *arguments],
                cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def processes(self) -> dict[str, int]:
        """Role -> pid, of everything the server has started that is alive."""
        found = {}
        for pid in descendants(self.process.pid):
            words = command_of(pid)
            if "trireme.worker.rank" in words:
                found["rank"] = pid
            elif len(words) > 5:
                found[words[-1]] = pid
        return found

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=self.uds, limits=limits, verify=False)  # no certificates to load
        return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=PATIENCE)

    async def state(self) -> dict[str, Any]:
        async with self.client() as client:
            return (await client.get("/state")).json()

    async def stats(self) -> dict[str, Any]:
        async with self.client() as client:
            return (await client.get("/stats")).json()

    async def until(self, *names: str) -> dict[str, Any]:
        """Waits for one of these states."""
        deadline = time.monotonic() + PATIENCE
        state: dict[str, Any] = {}
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            with contextlib.suppress(httpx.HTTPError):
                state = await self.state()
                if state["name"] in names:
                    return state
            await asyncio.sleep(0.05)
        raise AssertionError(f"never {names}; last {state}:\n{self.log}")

    async def lines(self, tokens: list[int], **sampling: Any) -> AsyncIterator[dict[str, Any]]:
        """The pieces of one answer; an error is a piece with "error" and, if the connection broke, kind "connection"."""
        body = msgspec.json.encode({"tokens": tokens, "sampling": sampling})
        try:
            async with self.client() as client, client.stream("POST", "/open", content=body) as response:
                if response.status_code != 200:
                    yield msgspec.json.decode(await response.aread()) | {"status": response.status_code}
                    return
                async for line in response.aiter_lines():
                    yield msgspec.json.decode(line)
        except httpx.HTTPError as error:
            yield {"error": str(error), "kind": "connection"}

    async def answer(self, tokens: list[int], **sampling: Any) -> dict[str, Any]:
        """The whole answer: token_ids, text, finish, error, kind."""
        whole: dict[str, Any] = {"token_ids": [], "text": "", "finish": None, "error": None, "kind": None, "status": 200}
        async for line in self.lines(tokens, **sampling):
            whole["token_ids"] += line.get("token_ids", [])
            whole["text"] += line.get("text", "")
            whole["finish"] = line.get("finish_reason") or whole["finish"]
            whole |= {name: line[name] for name in ("error", "kind", "status") if line.get(name)}
        return whole

    async def until_idle(self) -> dict[str, Any]:
        """Waits until nothing runs, then checks the books: every page free or cached."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            stats = await self.stats()
            if not (stats.get("running", 1) or stats["waiting"] or stats["requests"] or stats["in_flight"]):
                assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"], stats
                assert stats["pages_owned"] == stats["pages_locked"] == 0, stats
                return stats
            await asyncio.sleep(0.05)
        raise AssertionError(f"never idle: {stats}")

    def end(self) -> None:
        """Ends the server, whatever state it is in, and checks that nothing is left of it."""
        family = {pid: birth_of(pid) for pid in descendants(self.process.pid)}
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            finally:
                self.process.kill()
        assert_gone(family)


def descendants(pid: int) -> list[int]:
    """All processes below this one."""
    parents: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(words[1]), []).append(int(entry.name))
    found, open_ends = [], [pid]
    while open_ends:
        children = parents.get(open_ends.pop(), [])
        found += children
        open_ends += children
    return found


def command_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    return []


def listening(pid: int) -> set[tuple[str, int]]:
    """The addresses at which a process takes TCP connections or UDP packets: (address, port)."""
    inodes = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(link)
            if name.startswith("socket:["):
                inodes.add(name[8:-1])
    found = set()
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == state and words[9] in inodes:
                address, port = words[1].split(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """An address of /proc/net: hexadecimal, in words of the machine's own byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def assert_gone(family: dict[int, int | None], seconds: float = 5.0) -> None:
    """None of these processes is alive any more (a zombie that nobody reaps does not count)."""
    deadline = time.monotonic() + seconds
    left = family
    while left and time.monotonic() < deadline:
        left = {pid: birth for pid, birth in left.items() if birth_of(pid) == birth and command_of(pid)}
        time.sleep(0.05)
    assert not left, {pid: command_of(pid) for pid in left}
