"""Whether this machine can have a device for the CUDA backend, as files and drivers tell without torch.

Knows file names of torch's package and of drivers. Where both could serve a device, torch has to be asked.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib

DRIVERS = ("libcuda.so.1",)  # what NVIDIA's driver brings
ROCM = pathlib.Path("/dev/kfd")  # what AMD's driver brings


def surely_missing() -> str | None:
    """Why there can be no such device here, by what is known without importing torch; None if torch must be asked."""
    libraries = _torch_libraries()
    if libraries and not any(name.startswith(("libtorch_cuda", "libtorch_hip")) for name in libraries):
        return "the installed torch is a build for CPUs alone"
    if not ROCM.exists() and not any(map(_loads, DRIVERS)):
        return "no driver of a CUDA or ROCm device is installed"
    return None


def _torch_libraries() -> list[str]:
    """The names of torch's libraries; empty where they lie in an unusual place."""
    spec = importlib.util.find_spec("torch")
    folder = pathlib.Path(spec.origin or "").parent / "lib" if spec else pathlib.Path()
    names = os.listdir(folder) if folder.is_dir() else []
    return names if any(name.startswith("libtorch_cpu") for name in names) else []


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
