"""The chip's clock beside a measurement, from a stand-in for nvidia-smi that is a real process."""

from __future__ import annotations

import pathlib
import time

import pytest

from trireme.bench.clocks import Clocks, parsed

STAND_IN = """#!/bin/sh
case "$*" in *clocks.sm,power.draw.instant*--loop-ms=50*) ;; *) exit 2 ;; esac
echo "Field is not valid"
while true; do echo "1410, 701.25, Active"; echo "1980, 620.00, Not Active"; echo "1410, 700.75, Active"; sleep 0.02; done
"""


def test_clocks_while_something_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(STAND_IN)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with Clocks() as clocks:
        assert clocks.since(time.perf_counter() + 60) == ""  # nothing seen since then
        deadline = time.monotonic() + 30
        while len(clocks.samples) < 30 and time.monotonic() < deadline:
            time.sleep(0.05)
        found = clocks.since(0.0)
    assert found.startswith("1,410 MHz, 70") and "limited by power 6" in found  # two of three samples
    assert clocks._process is not None and clocks._process.returncode is not None, "ended with the measurement"


def test_without_the_command_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with Clocks() as clocks:
        assert clocks.since(0.0) == ""


@pytest.mark.parametrize("line", ["", "N/A, N/A, N/A", "1980", "Field is not valid"])
def test_other_lines_are_no_samples(line: str) -> None:
    assert parsed(line, 0.0) is None
