"""Compiles the CPU kernels into the wheel where a compiler is there; without one they are built on first use, or torch's ops serve.

`make wheel` makes a wheel for this kind of machine; with WHEEL_MACHINE=aarch64 and CC=aarch64-linux-gnu-gcc, for another one.
Everything else about the package is in pyproject.toml.
"""

import importlib.util
import os
import pathlib
import re
import sys
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = pathlib.Path("trireme/backends/cpu")
TARGET = os.environ.get("WHEEL_MACHINE") or None  # the machine type that the wheel is for; None means this machine
OLDEST_GLIBC = (2, 17)  # wheels name this version of the C library, or a newer one if the kernels need it


def builder() -> ModuleType:
    """Loads trireme.backends.cpu.build by its path. Importing the package would need torch, which may not be installed."""
    spec = importlib.util.spec_from_file_location("trireme_cpu_build", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_py):
    def run(self) -> None:
        super().run()
        self.build_kernels(FOLDER if self.editable_mode else pathlib.Path(self.build_lib) / FOLDER)

    def build_kernels(self, target: pathlib.Path) -> None:
        build = builder()
        for stale in target.glob("*.so"):
            if stale.name != build.library_name(TARGET):
                stale.unlink()
        try:
            print(f"CPU kernels: {build.build(target, target=TARGET)}")
        except build.BuildFailed as error:
            if TARGET or os.environ.get("WHEEL_NEEDS_KERNELS"):
                sys.exit(f"No wheel: {error}. Fix: install a C compiler, or name one with CC.")
            print(f"CPU kernels are left for first use: {error}")


class Wheel(bdist_wheel):
    """A wheel named after the machine and the C library that its kernels need. Any Python 3 can load them, through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        build = builder()
        library = pathlib.Path(self.bdist_dir) / FOLDER / build.library_name(TARGET)
        if not library.exists():
            return ("py3", "none", "any")
        if sys.platform != "linux":
            return ("py3", "none", super().get_tag()[2])
        major, minor = needed_glibc(library.read_bytes())
        return ("py3", "none", f"manylinux_{major}_{minor}_{TARGET or build.machine()}")


def needed_glibc(library: bytes) -> tuple[int, int]:
    """The newest version of the C library that any symbol of the kernels needs."""
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)\b", library)]
    return max([OLDEST_GLIBC, *versions])


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # the wheel holds a compiled library, which fits one machine type only


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel}, distclass=BinaryDistribution)
