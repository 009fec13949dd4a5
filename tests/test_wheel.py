"""The wheel: built as `make wheel` does, installed where there is no compiler, and asked to chat."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

import trireme

ROOT = pathlib.Path(__file__).parent.parent
ARM = shutil.which("aarch64-linux-gnu-gcc")
pytestmark = pytest.mark.wide


def build_wheel(folder: pathlib.Path, **environ: str) -> pathlib.Path:
    source = folder / "source"  # building leaves folders behind
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", str(source), "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run(command, check=True, env=dict(os.environ, WHEEL_NEEDS_KERNELS="1", **environ))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_it_carries_kernels_and_says_what_machine_it_is_for(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] and "-py3-none-manylinux_2_" in wheel.name
    assert wheel.name.startswith(f"trireme_llm-{trireme.__version__}-")
    assert "trireme/api/web/index.html" in names and not [name for name in names if name.startswith("tests/")]


@pytest.mark.skipif(ARM is None, reason="needs gcc-aarch64-linux-gnu")
def test_another_machines_wheel_comes_from_a_cross_compiler(tmp_path: pathlib.Path) -> None:
    made = build_wheel(tmp_path, WHEEL_MACHINE="aarch64", CC=str(ARM))
    assert made.name.startswith(f"trireme_llm-{trireme.__version__}-py3-none-manylinux_2_") and made.name.endswith("_aarch64.whl")
    with zipfile.ZipFile(made) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith(".so"))
        head = archive.read(library)[:20]
    assert head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") == 183  # an ELF file for AArch64


def test_installed_without_a_compiler_it_chats(wheel: pathlib.Path, smollm2_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The other packages are those of this environment; of the project there is the wheel alone."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)], check=True)
    site = next((tmp_path / "venv" / "lib").glob("*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environ = {"PATH": str(python.parent), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}  # no compiler on this path
    words = ["-m", "trireme", "generate", "What is the capital of Japan?", "--chat", "--temperature", "0"]
    done = subprocess.run(
        [str(python), *words, "--model", str(smollm2_path), "--backend", "cpu"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert "Tokyo" in done.stdout, done.stderr
    where = "import trireme.backends.cpu.build as b; print(b.__file__, b.find(b.SOURCES))"
    found = subprocess.run([str(python), "-c", where], cwd=tmp_path, env=environ, capture_output=True, text=True).stdout
    assert found.count(str(site)) == 2, found
