"""`make`'s environment: which build of torch is fetched, shown with real pip on a stand-in index and with a stand-in for uv."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable

import environment
import pytest
from environment import has_gpu, install_torch, pinned_torch

ROOT = pathlib.Path(__file__).parent.parent


def wheel(folder: pathlib.Path, name: str, version: str, *needs: str) -> None:
    """An empty package."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name.replace('_', '-')}", f"Version: {version}"]
    lines += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: pathlib.Path) -> Callable[..., list[str]]:
    """pip in an empty environment, with an index of its own: plain PyPI's torch, or one with a CPU build."""

    def make(*needs: str) -> list[str]:
        links = tmp_path / "index"
        links.mkdir()
        wheel(links, "torch", "2.13.0", *needs)
        wheel(links, "nvidia_cublas", "13.0")
        wheel(links, "uv", "0.13.8")
        venv.create(tmp_path / "venv", with_pip=False)
        pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv" / "bin" / "python"), "--isolated"]
        return ["env", "PIP_NO_INDEX=1", f"PIP_FIND_LINKS={links}", *[part for part in pip if part != "--isolated"]]

    return make


def uv(tmp_path: pathlib.Path, code: int) -> list[str]:
    """A uv that notes what it was asked for, and succeeds or fails."""
    script = tmp_path / "uv"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit {code}\n')
    script.chmod(0o755)
    return [str(script), "pip", "install"]


def run(command: list[str], wanted: bool) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if wanted else None).stdout or ""


def installed(tmp_path: pathlib.Path) -> set[str]:
    return {path.name.split("-")[0] for path in tmp_path.glob("venv/lib/*/site-packages/*.dist-info")}


def test_a_cpu_build_that_pip_finds_is_taken(index: Callable[..., list[str]], tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    assert install_torch("torch==2.13.0", index(), uv(tmp_path, 1), False, run, said.append) == "pip"
    assert installed(tmp_path) == {"torch"} and not (tmp_path / "asked").exists()
    assert "without CUDA (about 200 MB)" in said[-1]


def test_cuda_packages_are_not_fetched_without_a_gpu(index: Callable[..., list[str]], tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    assert install_torch("torch==2.13.0", index("nvidia-cublas"), uv(tmp_path, 0), False, run, said.append) == "uv"
    assert (tmp_path / "asked").read_text().split() == ["pip", "install", "--torch-backend", "cpu", "torch==2.13.0"]
    assert "nvidia_cublas" not in installed(tmp_path) and "torch" not in installed(tmp_path)  # uv's stand-in fetches nothing
    assert "no NVIDIA GPU" in said[-1] and "200 MB" in said[-1]


def test_where_uv_cannot_reach_the_builds_pip_serves(index: Callable[..., list[str]], tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    assert install_torch("torch==2.13.0", index("nvidia-cublas"), uv(tmp_path, 2), False, run, said.append) == "pip"
    assert installed(tmp_path) >= {"torch", "nvidia_cublas"} and "3 GB" in said[-1]


def test_with_a_gpu_the_cuda_build_is_fetched(index: Callable[..., list[str]], tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    assert install_torch("torch==2.13.0", index("nvidia-cublas"), uv(tmp_path, 1), True, run, said.append) == "pip"
    assert (
        installed(tmp_path) == {"torch", "nvidia_cublas"} and "has an NVIDIA GPU" in said[0] and not (tmp_path / "asked").exists()
    )


def test_a_gpu_is_known_by_its_driver_or_its_command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_gpu()
    (tmp_path / "version").touch()
    assert has_gpu()
    (tmp_path / "version").rename(tmp_path / "nvidia-smi")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert has_gpu()


def test_the_version_is_the_pinned_one() -> None:
    assert pinned_torch((ROOT / "requirements.txt").read_text()).startswith("torch==2.")
