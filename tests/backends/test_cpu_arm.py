"""The ARM kernels, cross-compiled and run in an emulator where one is installed, on CPUs with and without their instructions."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from trireme.backends.cpu import build

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
ROOT = pathlib.Path("/usr/aarch64-linux-gnu")
CPUS = {"max": ["bf16", "i8mm", "dotprod", "portable"], "neoverse-n1": ["dotprod", "portable"], "cortex-a57": ["portable"]}

pytestmark = pytest.mark.skipif(not COMPILER or not EMULATOR, reason="needs gcc-aarch64-linux-gnu and qemu-user")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    assert COMPILER
    folder = tmp_path_factory.mktemp("arm")
    library = build.build(folder, [COMPILER, "-O2"], "aarch64")  # half the time of -O3
    source = pathlib.Path(__file__).parent / "arm_check.c"
    command = [
        COMPILER,
        "-O1",
        "-Wall",
        "-Werror",
        f"-I{build.SOURCES}",
        str(source),
        str(library),
        "-o",
        str(folder / "check"),
        "-lm",
    ]
    subprocess.run([*command, f"-Wl,-rpath,{folder}"], check=True)
    return folder / "check"


@pytest.mark.parametrize("cpu", CPUS)
def test_arm_kernels_in_an_emulator(program: pathlib.Path, cpu: str) -> None:
    assert EMULATOR
    command = [EMULATOR, "-cpu", cpu, "-L", str(ROOT), str(program), *CPUS[cpu]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
