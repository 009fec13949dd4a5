"""The record of running servers: the living are listed, what the dead left is cleared, nobody else's folder is entered."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest

from trireme.cli import main
from trireme.errors import BadConfig
from trireme.serve.runtime import Record, base_folder, birth_of, own_folder, running_servers, write_record
from trireme.serve.start import model_name


def _record(pid: int, born: int) -> Record:
    return Record(pid=pid, born=born, url="http://127.0.0.1:8000", model="tiny", path="/tiny", started=1.0)


def test_the_living_are_listed_and_the_dead_cleared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = own_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(base_folder().stat().st_mode) == 0o700
    mine = _record(os.getpid(), birth_of(os.getpid()) or 0)
    write_record(folder, mine)
    reused = base_folder() / "1"  # a number that belongs to another process now
    reused.mkdir()
    write_record(reused, _record(1, -1))
    dead = base_folder() / "4194999"
    dead.mkdir()
    assert running_servers() == [mine]
    assert not dead.exists()


def test_ps_prints_them(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main.main(["ps"]) == 0
    assert "No server" in capsys.readouterr().err
    write_record(own_folder(), _record(os.getpid(), birth_of(os.getpid()) or 0))
    assert main.main(["ps"]) == 0
    assert str(os.getpid()) in capsys.readouterr().out


def test_a_folder_open_to_others_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "trireme").mkdir(mode=0o777)
    (tmp_path / "trireme").chmod(0o777)
    with pytest.raises(BadConfig, match="private"):
        base_folder()


def test_names_of_models(tmp_path: pathlib.Path) -> None:
    (tmp_path / "some.gguf").write_bytes(b"")
    assert model_name("smollm2") == "smollm2"
    assert model_name(str(tmp_path)) == tmp_path.name
    assert model_name(str(tmp_path / "some.gguf")) == "some"
