"""Fetched models and running servers, listed and ended by name."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from trireme.cli import main
from trireme.hub.catalogue import CATALOGUE
from trireme.serve.runtime import Record, birth_of, own_folder, write_record


@pytest.fixture
def fetched(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache in which the smallest model of the catalogue seems to lie."""
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "cache" / "models" / "smollm2"
    folder.mkdir(parents=True)
    for file in CATALOGUE["smollm2"].files:
        with (folder / file.name).open("wb") as stored:
            stored.truncate(file.size)
    return folder


def test_list_and_rm(fetched: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["list", "--json"]) == 0
    (model,) = (entry for entry in json.loads(capsys.readouterr().out) if entry["path"] == str(fetched))
    assert model["name"] == "smollm2" and model["size"] == CATALOGUE["smollm2"].size
    assert main.main(["rm", "tinyllama"]) == 4 and "smollm2" in capsys.readouterr().err
    pid = os.getpid()
    file = str(fetched / CATALOGUE["smollm2"].files[0].name)
    record = Record(pid=pid, born=birth_of(pid) or 0, url="http://127.0.0.1:1", model="m", path=file, started=1.0)
    write_record(own_folder(), record)
    assert main.main(["rm", "smollm2"]) == 3 and fetched.exists()
    assert f"trireme stop {pid}" in capsys.readouterr().err
    record.path = "/elsewhere"
    write_record(own_folder(), record)
    assert main.main(["rm", "smollm2"]) == 0 and not fetched.exists()
    assert main.main(["rm", "smollm2"]) == 4


def test_stop_ends_the_server_that_is_meant(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main.main(["stop"]) == 3 and "No server" in capsys.readouterr().err
    sleeper = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(flush=True); time.sleep(60)"
    servers = [subprocess.Popen([sys.executable, "-c", sleeper], stdout=subprocess.PIPE) for _ in range(2)]
    for number, server in enumerate(servers):
        assert server.stdout and server.stdout.readline()
        folder = own_folder().with_name(str(server.pid))
        folder.mkdir()
        record = Record(
            pid=server.pid, born=birth_of(server.pid) or 0, url=f"http://x:{number}", model=f"m{number}", path="/", started=1.0
        )
        write_record(folder, record)
    assert main.main(["stop"]) == 3 and "give the PID, or --all" in capsys.readouterr().err
    threading.Thread(target=servers[1].wait).start()  # a child of the test's own stays until it is waited for
    assert main.main(["stop", "m1"]) == 0 and capsys.readouterr().out == "m1 at http://x:1 has ended.\n"
    assert servers[0].poll() is None
    threading.Thread(target=servers[0].wait).start()
    assert main.main(["stop"]) == 0


def test_a_model_is_named_with_or_without_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "chat", "run", "generate x"):
        for words in (["/nowhere"], ["--model", "/nowhere"]):
            assert main.main([*command.split(), *words]) == 4
            assert "/nowhere" in capsys.readouterr().err
    assert main.main(["chat", "a", "--model", "b"]) == 3 and "Two models are named" in capsys.readouterr().err
