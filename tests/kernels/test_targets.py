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

from trireme.kernels import chips, launch

HERE = pathlib.Path(__file__).parent
# Where a chip is, modules have chosen its ways by the time another's are asked for; there kernels are tested by running them.
chipless = pytest.mark.skipif(torch.cuda.is_available(), reason="a chip is here")


def printed(cache: pathlib.Path, script: str, *flags: str) -> str:
    """What a script prints that compiles, in a process where Triton does not interpret."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent), str(HERE.parent.parent), environ.get("PYTHONPATH", ""))),
    }
    done = subprocess.run([sys.executable, str(HERE / script), *flags], env=environ, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def compiled(chip: str, cache: pathlib.Path, *flags: str) -> int:
    output = printed(cache, "compile_for.py", chip, *flags)
    found = re.search(r"(\d+) forms of (\d+) kernels", output)
    assert found, output
    assert int(found[2]) >= 20, output  # those of one formula each share a name
    return int(found[1])


@chipless
@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", ["sm_120", "gfx942"])
def test_kernels_compile_for(chip: str, tmp_path: pathlib.Path) -> None:
    assert compiled(chip, tmp_path) > 80


@chipless
@pytest.mark.soak
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("chip", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942", "gfx1100"])
def test_all_forms_compile_for(chip: str, tmp_path: pathlib.Path) -> None:
    assert compiled(chip, tmp_path, "--all") > 120


class Cramped:
    """Stands in for a kernel's function on a chip whose shared memory holds `room` stages: answers `built`."""

    def __init__(self, room: int, built: Any = None):
        self.room, self.built, self.tried = room, built, list[int]()

    def __getitem__(self, grid: Any) -> Any:
        return self.run

    def run(self, *args: Any, num_warps: int, num_stages: int) -> Any:
        self.tried.append(num_stages)
        if num_stages > self.room:
            raise launch.OutOfResources(70_000 * num_stages, 70_000 * self.room, "shared memory")
        return self.built


def test_fewer_stages_where_shared_memory_is_small() -> None:
    kernel, jit = launch.Kernel(_nothing), Cramped(2, "built")
    kernel.jit = jit  # type: ignore[assignment]
    assert kernel._fitted((1,), (), {"num_warps": 4, "num_stages": 5}, {}) == "built" and jit.tried == [5, 4, 3, 2]
    kernel.jit = none = Cramped(0)  # type: ignore[assignment]
    with pytest.raises(launch.OutOfResources):
        kernel._fitted((1,), (), {"num_warps": 4, "num_stages": 3}, {})
    assert none.tried == [3, 2, 1]


def test_another_vendors_launcher_is_left_to_triton() -> None:
    """AMD's has a raw start too, but its arguments come in another order."""
    launcher = SimpleNamespace(launch=_refuse, launch_cooperative_grid=False, profile_scratch_size=0)
    kernel, jit = launch.Kernel(_nothing), Cramped(2, SimpleNamespace(run=launcher))
    kernel.jit, kernel.direct = jit, True  # type: ignore[assignment]
    for _ in range(2):
        kernel((1,), stages=3)
    assert jit.tried == [3, 2, 3, 2] and not kernel.direct and not kernel.compiled


def test_the_private_launcher_is_for_releases_it_was_tried_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips, "current", lambda: chips.HOPPER)
    monkeypatch.setattr(launch, "TRIED", ("3.5.", "3.6."))
    for release, direct in (("3.6.1", True), ("3.5.0", True), ("3.60.0", False), ("4.0.0", False)):
        monkeypatch.setattr(launch.triton, "__version__", release)
        kernel = launch.Kernel(_nothing)
        assert kernel.direct is direct, release
    kernel.jit = jit = Cramped(3)  # type: ignore[assignment]
    kernel((1,), stages=3)
    assert jit.tried == [3] and not kernel.compiled, "Triton's public start"


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_all_is_right_through_the_public_launcher() -> None:
    """Kernels of the engine and of operators, in a process that takes this Triton for one that nobody tried."""
    files = [str(HERE / name) for name in ("test_llm_kernels.py", "test_accuracy.py", "test_repeat.py")]
    chosen = ["-k", "decode or kv or softmax or norms or products or descriptors"]
    line = [sys.executable, "-m", "pytest", "-q", "--public-launcher", "-p", "no:cacheprovider", *chosen, *files]
    done = subprocess.run(line, capture_output=True, text=True, cwd=HERE.parent.parent)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:]


def _nothing() -> None:
    """No kernel at all."""


def _refuse(*args: Any) -> None:
    raise AssertionError("the raw start was called")


def test_only_the_table_of_chips_names_cuda() -> None:
    folder = pathlib.Path(chips.__file__).parent
    naming = {file.name for file in folder.rglob("*.py") if "cuda" in file.read_text().lower()}
    assert naming == {"chips.py"}
