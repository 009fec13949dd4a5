"""How a server starts in vain and how it ends: drained, at once, and with the reason as its last line."""

from __future__ import annotations

import asyncio
import pathlib
import signal
import socket
import stat
import subprocess
import sys

import pytest
from running_server import PATIENCE, ROOT, RunningServer, assert_gone, descendants
from tiny_server_model import write_tiny

from trireme.errors import BadCheckpoint, BadConfig
from trireme.serve.runtime import birth_of

pytestmark = pytest.mark.xdist_group("serve-ending")

TOKENS = 80


async def _running(server: RunningServer, count: int, max_tokens: int) -> list[asyncio.Task]:
    """Requests that all run at once, every second with three sequences; long enough that none ends before the last has come."""
    tasks = [
        asyncio.create_task(server.answer([i + 1, 9], max_tokens=max_tokens, ignore_eos=True, n=3 if i % 2 else 1))
        for i in range(count)
    ]
    while (await server.stats())["requests"] < 2 * count:
        await asyncio.sleep(0.01)
    return tasks


def test_sigterm_finishes_what_runs_and_refuses_what_comes(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> None:
    server = RunningServer(tiny_path, short_folder / "drain", kv_tokens=1 << 16, http_workers=2, drain_timeout=60)

    async def drain() -> None:
        await server.until("ready")
        sockets = list((short_folder / "drain" / "trireme").glob("*/*.sock"))
        assert len(sockets) == 2 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in sockets)
        family = {pid: birth_of(pid) for pid in descendants(server.process.pid)}
        tasks = await _running(server, 64, max_tokens=TOKENS)
        server.process.send_signal(signal.SIGTERM)
        await server.until("draining")
        refused = await server.answer([1, 2, 3], max_tokens=1)
        assert refused["status"] == 503 and refused["kind"] == "Unavailable", refused
        for number, answer in enumerate(await asyncio.gather(*tasks)):
            assert answer["error"] is None and answer["finish"] == "length", answer
            assert len(answer["token_ids"]) == TOKENS * (3 if number % 2 else 1)
        assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0
        assert_gone(family)

    try:
        asyncio.run(drain())
        assert not list((short_folder / "drain" / "trireme").iterdir()), "the runtime folder is left"
        assert not pathlib.Path(server.uds).exists()
    finally:
        server.end()


def test_a_second_signal_ends_at_once(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> None:
    server = RunningServer(tiny_path, short_folder / "twice", kv_tokens=1 << 16)

    async def end_twice() -> None:
        await server.until("ready")
        family = {pid: birth_of(pid) for pid in descendants(server.process.pid)}
        tasks = await _running(server, 4, max_tokens=5000)
        for _ in range(3):  # echoes of the first
            server.process.send_signal(signal.SIGTERM)
        await server.until("draining")
        await asyncio.sleep(1.0)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.process.wait, PATIENCE) == 128 + signal.SIGINT
        assert all(answer["error"] for answer in await asyncio.gather(*tasks))
        assert_gone(family)

    try:
        asyncio.run(end_twice())
    finally:
        server.end()


def _last_line(*arguments: str, folder: pathlib.Path) -> tuple[int, str]:
    environ = {"XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-m", "tests.serve.start_server", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_start_in_vain_says_why_in_its_last_line(short_folder: pathlib.Path) -> None:
    broken = write_tiny(short_folder / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, line = _last_line(str(broken), f"uds={short_folder}/broken.sock", "backend=reference", folder=short_folder)
    assert code == BadCheckpoint.exit_code and "Fix:" in line, (code, line)
    assert not list((short_folder / "trireme").iterdir())


def test_a_port_in_use_is_named(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = _last_line(str(tiny_path), f"port={port}", folder=short_folder)
    assert code == BadConfig.exit_code and f"127.0.0.1:{port}" in line and "--port" in line, (code, line)
