"""The thread pool of the CPU kernels, by itself: more threads than cores, phases without items, with one and with many."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from trireme.backends.cpu import build

COMPILER = build.compiler()


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_every_item_is_done_once_and_before_the_next_phase(tmp_path: pathlib.Path) -> None:
    assert COMPILER
    program, source = tmp_path / "check", pathlib.Path(__file__).parent / "pool_check.c"
    command = [COMPILER, "-O2", "-std=gnu11", "-Wall", "-Werror", f"-I{build.SOURCES}", str(source), str(build.SOURCES / "pool.c")]
    subprocess.run([*command, "-o", str(program), "-lpthread"], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
