"""POST /admin/reload on a real server: every answer is wholly of one version, and nothing of the old weights is found."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from tiny_server_model import write_tiny

from trireme.hub.checkpoint import Checkpoint

ADMIN = {"authorization": "Bearer key-of-admin"}
PROMPTS = ["a common beginning of all prompts, long enough for pages " + letter for letter in "abcdefgh"]
LENGTH = 60
PATIENCE = 120.0  # a loaded machine imports torch slowly


@contextlib.contextmanager
def served(path: pathlib.Path, folder: pathlib.Path, backend: str) -> Iterator[httpx.Client]:
    uds = str(folder / f"{backend}.sock")
    command = [sys.executable, "-m", "trireme.cli.main", "serve", str(path), "--uds", uds, "--backend", backend]
    command += ["--served-model-name", "tiny", "--kv-tokens", "8192", "--max-model-len", "512", "--max-running", "4"]
    environ = dict(os.environ, XDG_RUNTIME_DIR=str(folder), OMP_NUM_THREADS="1", TRIREME_ADMIN_KEY="key-of-admin")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=uds), base_url="http://localhost", timeout=PATIENCE) as client:
            deadline = time.monotonic() + PATIENCE
            while not is_ready(client):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
            yield client
    finally:
        process.terminate()
        process.wait(timeout=30)


def is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get("/ready").status_code == 200
    return False


def answer(client: httpx.Client, prompt: str) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    reply = client.post("/v1/completions", json=body)
    return reply.json()["choices"][0]["text"] if reply.status_code == 200 else f"status {reply.status_code}"


def reload(client: httpx.Client, path: pathlib.Path, headers: dict[str, str] = ADMIN, **more: float) -> httpx.Response:
    return client.post("/admin/reload", json={"path": str(path), **more}, headers=headers)


def refusals(client: httpx.Client, tmp_path: pathlib.Path, tiny_path: pathlib.Path) -> None:
    """What cannot be loaded is refused in one line, and the old weights go on."""
    assert reload(client, tiny_path, {}).status_code == 401
    assert reload(client, tmp_path / "nowhere").status_code == 400
    longer = write_tiny(tmp_path / "longer", context=1 << 17)
    other = reload(client, longer)
    assert other.status_code == 400 and "max_positions differs" in other.json()["error"]["message"], other.text
    empty = write_tiny(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    assert reload(client, empty).status_code == 400


def ended(client: httpx.Client, newer: pathlib.Path) -> None:
    """Answers that have begun and do not end within the limit end with 503; those that have not begun wait for the new weights."""
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(8)]
        while not client.get("/load").json()["stats"]["running"]:
            assert not all(future.done() for future in running)
        assert reload(client, newer, timeout=0).status_code == 200
        replies = [future.result() for future in running]
    refused = [reply for reply in replies if reply.status_code != 200]
    assert 1 <= len(refused) <= 4, "four requests run at a time"
    for reply in refused:
        assert reply.status_code == 503 and "new weights" in reply.json()["error"]["message"], reply.text


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_answer_is_of_one_version(
    backend: str, tiny_path: pathlib.Path, tmp_path: pathlib.Path, short_folder: pathlib.Path
) -> None:
    newer = write_tiny(tmp_path / "newer", seed=8)
    assert Checkpoint.open(newer).config == Checkpoint.open(tiny_path).config
    with served(tiny_path, short_folder, backend) as client:
        old = {prompt: answer(client, prompt) for prompt in PROMPTS}
        refusals(client, tmp_path, tiny_path)
        assert {prompt: answer(client, prompt) for prompt in PROMPTS[:2]} == {prompt: old[prompt] for prompt in PROMPTS[:2]}
        stop = threading.Event()

        def ask(prompt: str) -> list[str]:
            given = []
            while not stop.is_set():
                given.append(answer(client, prompt))
            return [*given, answer(client, prompt)]

        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            running = [pool.submit(ask, prompt) for prompt in PROMPTS]
            time.sleep(0.5)
            done = reload(client, newer)
            assert done.status_code == 200 and done.json()["version"] == 1, done.text
            time.sleep(0.3)
            stop.set()
            given = {prompt: future.result() for prompt, future in zip(PROMPTS, running, strict=True)}
        new = {prompt: answer(client, prompt) for prompt in PROMPTS}
        stats = client.get("/load").json()["stats"]
        ended(client, newer)
    assert all(new[prompt] != old[prompt] for prompt in PROMPTS)
    for prompt, texts in given.items():
        assert set(texts) <= {old[prompt], new[prompt]}, "an answer of two versions"
        assert set(texts[texts.index(new[prompt]) :]) == {new[prompt]}
    assert any(texts[0] == old[prompt] for prompt, texts in given.items()), "the reload came before any answer"
    assert stats["cache_hits"] > 0 and stats["weights_version"] == 1
    with served(newer, short_folder, backend) as client:
        assert new == {prompt: answer(client, prompt) for prompt in PROMPTS}
