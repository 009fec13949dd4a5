"""What serving costs: the same requests to the offline engine and through a server's processes and HTTP, in turns.

Knows both doors of the engine; prints ratios, because the machine's own speed varies, and the CPU time of each process, which other
programs disturb least. The client that asks the server runs on the same cores, so its share is told too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import random
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import msgspec

from trireme.command.flags import config_from
from trireme.config import Config
from trireme.errors import WorkerDied
from trireme.hub.resolve import resolve_model
from trireme.llm import LLM
from trireme.types import SamplingParams

READY_SECONDS = 300.0
QUIET_SECONDS = 30.0  # the longest wait for a server to become idle


@dataclass
class Run:
    """One round of requests to the offline engine or to the server."""

    tokens_per_second: float
    first_token: float  # seconds, the median over the streams
    cpu: dict[str, float]  # process -> CPU milliseconds per token


@dataclass
class Overhead:
    """Compares serving with the offline engine, with the same number of streams."""

    streams: int
    offline: Run
    served: Run

    @property
    def throughput(self) -> float:
        return self.served.tokens_per_second / self.offline.tokens_per_second

    @property
    def throughput_by_cpu(self) -> float:
        """The ratio by CPU time only, which other programs on the machine disturb little."""
        return sum(self.offline.cpu.values()) / sum(self.served.cpu.values())

    @property
    def added_first_token(self) -> float:
        return self.served.first_token - self.offline.first_token


def run(args: argparse.Namespace) -> int:
    results = measure(config_from(args), args.streams, args.prompt_tokens, args.max_tokens, args.rounds)
    if args.json:
        print(msgspec.json.encode(results).decode())
        return 0
    print("streams  offline tok/s  served tok/s   ratio   TTFT ms  served ms   added")
    for result in results:
        offline, served = result.offline, result.served
        print(
            f"{result.streams:>7}  {offline.tokens_per_second:>13.1f}  {served.tokens_per_second:>12.1f}  {result.throughput:>6.1%}"
            f"  {1e3 * offline.first_token:>8.1f}  {1e3 * served.first_token:>9.1f}  {1e3 * result.added_first_token:>6.1f}"
        )
    print("\nstreams   ratio  CPU ms per token")
    for result in results:
        shares = "  ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in result.served.cpu.items())
        print(
            f"{result.streams:>7}  {result.throughput_by_cpu:>6.1%}  offline {result.offline.cpu['engine']:.2f}  served: {shares}"
        )
    return 0


def measure(config: Config, streams: list[int], prompt_tokens: int, max_tokens: int, rounds: int) -> list[Overhead]:
    """Both the engine and the server run all the time, but only one of them is used at a time."""
    with tempfile.TemporaryDirectory(prefix="trireme-") as folder, LLM(config=config) as llm, Served(config, folder) as server:
        return [_compare(llm, server, count, prompt_tokens, max_tokens, rounds) for count in streams]


def _compare(llm: LLM, server: Served, streams: int, prompt_tokens: int, max_tokens: int, rounds: int) -> Overhead:
    offline, served = [], []
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(rounds + 1):
        prompts = _prompts(streams, prompt_tokens, llm.worker.ready.vocab_size, seed=1000 * streams + number)
        runs = asyncio.run(_offline(llm, prompts, sampling)), server.ask(prompts, [sampling] * streams)
        if number:  # the first round only warms both up
            offline.append(runs[0])
            served.append(runs[1])
    return Overhead(streams, _median(offline), _median(served))


def _prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """New prompts for every round, so that no cached prefix helps."""
    dice = random.Random(seed)
    return [[dice.randrange(100, min(vocab, 40_000)) for _ in range(length)] for _ in range(count)]


def _median(runs: list[Run]) -> Run:
    cpu = {name: statistics.median(r.cpu[name] for r in runs) for name in runs[0].cpu}
    return Run(statistics.median(r.tokens_per_second for r in runs), statistics.median(r.first_token for r in runs), cpu)


async def _offline(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> Run:
    begun, spent = time.perf_counter(), time.process_time()

    async def one(prompt: list[int]) -> float:
        first = 0.0
        async for _ in llm.astream(prompt, sampling):
            first = first or time.perf_counter() - begun
        return first

    firsts = await asyncio.gather(*(one(prompt) for prompt in prompts))
    tokens, seconds = len(prompts) * (sampling.max_tokens or 0), time.perf_counter() - begun
    return Run(tokens / seconds, statistics.median(firsts), {"engine": 1e3 * (time.process_time() - spent) / tokens})


class _Reader:
    """Reads one stream and notes when its first token came and how it ended. It does little, to disturb the measurement least."""

    def __init__(self, path: str):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.first, self.last, self.over = 0.0, b"", False

    def read(self) -> None:
        data = self.socket.recv(1 << 16)
        if not self.first and b'data: {"' in data:
            self.first = time.perf_counter()
        self.last = data if len(data) >= 64 else (self.last + data)[-64:]
        self.over = not data


def _read_all(readers: list[_Reader]) -> None:
    """Reads all streams to the end."""
    poll = select.poll()
    at = {reader.socket.fileno(): reader for reader in readers}
    for descriptor in at:
        poll.register(descriptor, select.POLLIN)
    while at:
        for descriptor, _ in poll.poll():
            at[descriptor].read()
            if at[descriptor].over:
                poll.unregister(descriptor)
                at.pop(descriptor).socket.close()


def _cpu_seconds(pid: int) -> dict[str, float]:
    """The CPU time of a process and of those it has started, by name."""
    found: dict[str, float] = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            for name, seconds in _cpu_seconds(int(child)).items():
                found[name] = found.get(name, 0.0) + seconds
    words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    module = next((word for word in words if word.startswith("trireme.")), "")
    own = {"trireme.worker.rank": "rank", "trireme.api.process": "http", "trireme.cli.main": "supervisor"}.get(module, words[-2])
    # In nanoseconds: a clock tick, in which /proc/PID/stat counts, is more than most processes spend in a round.
    spent = sum(int((task / "schedstat").read_text().split()[0]) for task in pathlib.Path(f"/proc/{pid}/task").iterdir())
    found[own] = found.get(own, 0.0) + spent / 1e9
    return found


class Served:
    """Runs `trireme serve` as a process and sends requests over its Unix socket with as little work as possible."""

    def __init__(self, config: Config, folder: str, *flags: str):
        """`flags` are more flags for the server only."""
        self._uds, self._folder = os.path.join(folder, "api.sock"), pathlib.Path(folder)
        self._flags = [*_flags(config), *flags]

    def __enter__(self) -> Served:
        with (self._folder / "log").open("wb") as log:
            command = [sys.executable, "-m", "trireme.cli.main", "serve", *self._flags, "--uds", self._uds]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        asyncio.run(self._until_ready())
        self._until_quiet()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise WorkerDied(f"The server did not start: {self._last_line()}", "start it by hand to see why")
            try:
                reader, writer = await asyncio.open_unix_connection(self._uds)
            except OSError:
                await asyncio.sleep(0.2)
                continue
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if b" 200 " in answer[:20]:
                return
            await asyncio.sleep(0.2)
        raise WorkerDied("The server was not ready in time.", "start it by hand to see why")

    def _until_quiet(self) -> None:
        """Waits until the server has done its work at idle times, such as recording steps."""
        deadline, before = time.monotonic() + QUIET_SECONDS, -1.0
        while time.monotonic() < deadline:
            spent = sum(_cpu_seconds(self._process.pid).values())
            if before >= 0 and spent - before < 0.1:
                return
            before = spent
            time.sleep(1.5)

    def _last_line(self) -> str:
        return (self._folder / "log").read_text(errors="replace").strip().rpartition("\n")[2]

    def ask(self, prompts: list[list[int]], sampling: list[SamplingParams]) -> Run:
        try:
            readers = [_Reader(self._uds) for _ in prompts]
        except OSError as error:
            raise WorkerDied(f"The server is gone ({error}): {self._last_line()}", "start it by hand to see why") from None
        before = _cpu_seconds(self._process.pid)
        begun, spent = time.perf_counter(), time.process_time()
        for prompt, params, reader in zip(prompts, sampling, readers, strict=True):
            reader.socket.sendall(_request(prompt, params))
        _read_all(readers)
        tokens, seconds = sum(params.max_tokens or 0 for params in sampling), time.perf_counter() - begun
        client, after = time.process_time() - spent, _cpu_seconds(self._process.pid)
        broken = next((reader.last for reader in readers if b"[DONE]" not in reader.last), None)
        if broken is not None:
            raise WorkerDied(f"A stream broke off: {broken!r}.", "see the server's log")
        cpu = {name: 1e3 * (after[name] - before.get(name, 0.0)) / tokens for name in after} | {"client": 1e3 * client / tokens}
        return Run(tokens / seconds, statistics.median(reader.first - begun for reader in readers), cpu)


def _request(prompt: list[int], sampling: SamplingParams) -> bytes:
    wanted = {"max_tokens": sampling.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = msgspec.json.encode({"prompt": prompt, **wanted})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _flags(config: Config) -> list[str]:
    """The engine's settings as flags of `trireme serve`."""
    flags = [str(resolve_model(config.model.model)), "--served-model-name", "model"]
    default = Config()
    for group in ("model", "device", "cache", "schedule"):
        chosen, usual = getattr(config, group), getattr(default, group)
        for name, value in vars(chosen).items():
            if value != getattr(usual, name) and name != "model":
                flag = "--" + name.replace("_", "-")
                flags += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return flags
