"""The real server with the real SmolLM2 or another model, in processes of its own, on a port of loopback; two API keys."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import httpx

KEYS = ("key-of-alice", "key-of-bob")
MODEL = "smollm2"
PATIENCE = 120.0  # a loaded machine imports torch slowly


class Served:
    def __init__(self, folder: pathlib.Path, *arguments: str, model: str = MODEL, keys: tuple[str, ...] = KEYS):
        self.folder, self.log_file = folder, folder / "log"
        command = [sys.executable, "-m", "trireme.cli.main", "serve", model, "--port", "0", "--served-model-name", MODEL]
        command += ["--kv-tokens", "16384", "--data-dir", str(folder / "data"), "--log-format", "json", *arguments]
        environ = dict(os.environ, XDG_RUNTIME_DIR=str(folder), OMP_NUM_THREADS="1", TRIREME_API_KEY=",".join(keys))
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @functools.cached_property
    def url(self) -> str:
        """Where it listens, as it says itself: a port chosen here might be another's by then."""
        record = self.folder / "trireme" / str(self.process.pid) / "server.json"
        deadline = time.monotonic() + PATIENCE
        while not record.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, f"the server never listened:\n{self.log}"
            time.sleep(0.05)
        return json.loads(record.read_text())["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def logged(self, text: str) -> str:
        """The last line of the log with `text` in it. A line is written after its answer is sent, so it may still be on its way."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            lines = [line for line in self.log.splitlines(keepends=True) if text in line and line.endswith("\n")]
            if lines:
                return lines[-1]
            time.sleep(0.02)
        raise AssertionError(f"never logged: {text}\n{self.log}")

    def client(self, key: str | None = KEYS[0], **more: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, **more)

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        with self.client(None) as client:
            while time.monotonic() < deadline:
                assert self.process.poll() is None, f"the server ended:\n{self.log}"
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/ready").status_code == 200:
                        return
                time.sleep(0.1)
        raise AssertionError(f"never ready:\n{self.log}")

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            return client.get("/load").json()["stats"]

    def until_idle(self) -> dict[str, Any]:
        """Waits until nothing runs; every page is then free or cached."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            stats = self.stats()
            if not (stats["running"] or stats["waiting"]):
                assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"], stats
                return stats
            time.sleep(0.02)
        raise AssertionError(f"never idle: {stats}")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
