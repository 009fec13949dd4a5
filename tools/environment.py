"""Makes the environment that `make` works in: a virtual environment with the pinned packages. Needs the standard library alone.

torch decides the size. Where there is no NVIDIA GPU its CPU build is wanted; plain PyPI's build for Linux brings gigabytes of CUDA
packages along. So pip is asked first what it would fetch. If that holds CUDA packages that nobody here can use, uv is asked for the
CPU build, since it knows where torch's own builds are. If uv cannot reach them, pip's choice is taken, and the user is told.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
UV = "uv==0.13.8"
DRIVER = pathlib.Path("/proc/driver/nvidia/version")
CPU_SIZE, CUDA_SIZE = "about 200 MB", "about 3 GB"

Run = Callable[[Sequence[str], bool], str]  # (command, whether its output is wanted) -> the output; raises on failure


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU and its driver."""
    return DRIVER.exists() or shutil.which("nvidia-smi") is not None


def pinned_torch(requirements: str) -> str:
    found = re.search(r"^torch==\S+", requirements, re.MULTILINE)
    assert found, "requirements.txt pins no torch"
    return found[0]


def brings_cuda(report: str) -> bool:
    """Whether what pip would install holds packages for NVIDIA GPUs, or a build of torch made for them."""
    packages = [package["metadata"] for package in json.loads(report).get("install", [])]
    return any(
        package["name"].lower().startswith(("nvidia", "cuda")) or (package["name"] == "torch" and "+cu" in package["version"])
        for package in packages
    )


def install_torch(torch: str, pip: Sequence[str], uv: Sequence[str], gpu: bool, run: Run, say: Callable[[str], None]) -> str:
    """Installs torch and returns the tool that fetched it, "pip" or "uv". `pip` and `uv` are the first words of their commands."""
    if gpu:
        say(f"This machine has an NVIDIA GPU: fetching {torch} as pip finds it (with CUDA {CUDA_SIZE}).")
        run([*pip, "install", "-q", torch], False)
        return "pip"
    say(f"Asking pip what {torch} needs ...")
    if not brings_cuda(run([*pip, "install", "-q", "--dry-run", "--report", "-", torch], True)):
        say(f"Fetching {torch}, a build without CUDA ({CPU_SIZE}).")
        run([*pip, "install", "-q", torch], False)
        return "pip"
    say(
        f"pip would fetch CUDA packages ({CUDA_SIZE}); there is no NVIDIA GPU here. Fetching {torch} for CPUs with uv ({CPU_SIZE})."
    )
    try:
        run([*pip, "install", "-q", UV], False)
        run([*uv, "--torch-backend", "cpu", torch], False)
        return "uv"
    except subprocess.CalledProcessError:
        say(f"uv cannot reach torch's CPU builds. Fetching what pip finds instead: {CUDA_SIZE}.")
        run([*pip, "install", "-q", torch], False)
        return "pip"


def _run(command: Sequence[str], wanted: bool) -> str:
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if wanted else None)
    return done.stdout or ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a virtual environment with this project and its pinned packages.")
    parser.add_argument("folder", type=pathlib.Path, help="where the environment is made")
    folder: pathlib.Path = parser.parse_args().folder
    if not (folder / "bin" / "pip").exists():
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    requirements = ROOT / "requirements.txt"
    print(f"Setting up {folder} (once).", flush=True)
    uv = [str(folder / "bin" / "uv"), "pip", "install", "-q", "--python", python]
    try:
        install_torch(pinned_torch(requirements.read_text()), pip, uv, has_gpu(), _run, _say)
        _say("Fetching the other packages (about 60 MB) ...")
        _run([*pip, "install", "-q", "-r", str(requirements), "setuptools"], False)
        _run([*pip, "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], False)
    except subprocess.CalledProcessError as error:
        sys.exit(f"Setting up failed in: {' '.join(map(str, error.cmd))}. Fix: see the lines above, then call make again.")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
