"""Compiles the CPU kernels into the wheel where a compiler is there; without one they are built on first use, or torch's ops serve.

Everything else about the package is in pyproject.toml.
"""

import importlib.util
import pathlib
import sys

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

FOLDER = pathlib.Path("trireme/backends/cpu")


class BuildKernels(build_py):
    def run(self) -> None:
        super().run()
        self.build_kernels(FOLDER if self.editable_mode else pathlib.Path(self.build_lib) / FOLDER)

    def build_kernels(self, target: pathlib.Path) -> None:
        # Loaded by its path: importing the package would ask for torch, which a build environment need not have.
        spec = importlib.util.spec_from_file_location("trireme_cpu_build", FOLDER / "build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        try:
            print(f"CPU kernels: {module.build(target)}")
        except module.BuildFailed as error:
            print(f"CPU kernels are left for first use: {error}")


class BinaryDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # the wheel holds a library for this kind of machine


setup(cmdclass={"build_py": BuildKernels}, distclass=BinaryDistribution)
