"""Chips that are not here: every kernel compiles for them and finds room in their shared memory. That it computes the right thing
there is for somebody with such a chip to see."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trireme.kernels import launch

# Where a chip is, modules have chosen its ways by the time another's are asked for; there kernels are tested by running them.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a chip is here")
HERE = pathlib.Path(__file__).parent


def compiled(chip: str, cache: pathlib.Path, *flags: str) -> int:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent), str(HERE.parent.parent), environ.get("PYTHONPATH", ""))),
    }
    command = [sys.executable, str(HERE / "compile_for.py"), chip, *flags]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"(\d+) forms of (\d+) kernels", done.stdout)
    assert found, done.stdout
    assert int(found[2]) >= 20, done.stdout  # those of one formula each share a name
    return int(found[1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", ["sm_89", "gfx942"])
def test_kernels_compile_for(chip: str, tmp_path: pathlib.Path) -> None:
    assert compiled(chip, tmp_path) > 80


@pytest.mark.soak
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("chip", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942", "gfx1100"])
def test_all_forms_compile_for(chip: str, tmp_path: pathlib.Path) -> None:
    assert compiled(chip, tmp_path, "--all") > 120


def test_fewer_stages_where_shared_memory_is_small() -> None:
    kernel, tried = launch.Kernel(_nothing), list[int]()

    class Jit:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, num_warps: int, num_stages: int) -> str:
                tried.append(num_stages)
                if num_stages > 2:
                    raise launch.OutOfResources(70_000 * num_stages, 150_000, "shared memory")
                return f"{num_stages} stages"

            return run

    kernel.jit = Jit()  # type: ignore[assignment]
    assert kernel._fitted((1,), (), {"num_warps": 4, "num_stages": 5}, {}) == "2 stages" and tried == [5, 4, 3, 2]
    Jit.__getitem__ = lambda self, grid: _refuse  # type: ignore[assignment, method-assign]
    with pytest.raises(launch.OutOfResources):
        kernel._fitted((1,), (), {"num_warps": 4, "num_stages": 3}, {})


def test_another_vendors_launcher_is_left_to_triton() -> None:
    """AMD's has a raw start too, but its arguments come in another order."""
    kernel, started = launch.Kernel(_nothing), list[int]()
    launcher = SimpleNamespace(launch=_refuse, launch_cooperative_grid=False, profile_scratch_size=0)

    class Jit:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, num_warps: int, num_stages: int) -> Any:
                started.append(num_stages)
                if num_stages > 2:
                    raise launch.OutOfResources(70_000 * num_stages, 150_000, "shared memory")
                return SimpleNamespace(run=launcher)

            return run

    kernel.jit, kernel.direct = Jit(), True  # type: ignore[assignment]
    for _ in range(2):
        kernel((1,), stages=3)
    assert started == [3, 2, 3, 2] and not kernel.direct and not kernel.compiled


def _nothing() -> None:
    """No kernel at all."""


def _refuse(*args: Any, **options: Any) -> None:
    raise launch.OutOfResources(1, 0, "shared memory")
