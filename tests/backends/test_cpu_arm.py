"""The ARM kernels, cross-compiled and run in an emulator where one is installed: the same products, against plain loops."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from trireme.backends.cpu import build

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
ROOT = pathlib.Path("/usr/aarch64-linux-gnu")


@pytest.mark.skipif(not COMPILER or not EMULATOR, reason="needs gcc-aarch64-linux-gnu and qemu-user")
def test_arm_kernels_in_an_emulator(tmp_path: pathlib.Path) -> None:
    assert COMPILER and EMULATOR
    library = build.build(tmp_path, [COMPILER], "aarch64")
    program = tmp_path / "check"
    source = pathlib.Path(__file__).parent / "arm_check.c"
    command = [COMPILER, "-O1", f"-I{build.SOURCES}", str(source), str(library), "-o", str(program), "-lm"]
    subprocess.run([*command, f"-Wl,-rpath,{tmp_path}"], check=True)
    done = subprocess.run([EMULATOR, "-cpu", "max", "-L", str(ROOT), str(program)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
