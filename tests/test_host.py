"""What a machine may lack or limit: containers' bounds, a compiler, Linux's own ways with processes."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch

from trireme import host
from trireme.backends import open_backend
from trireme.backends.cpu import build, library
from trireme.backends.cuda import present
from trireme.backends.reference import Reference
from trireme.cli import main
from trireme.command import startup
from trireme.config import DeviceOptions
from trireme.serve import runtime
from trireme.serve.runtime import birth_of

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(host, "ROOT", tmp_path)
    return tmp_path


def write(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


VERSION_2 = {
    "proc/self/cgroup": "0::/pods/one",
    "sys/fs/cgroup/pods/memory.max": str(2 * GIB),
    "sys/fs/cgroup/pods/memory.current": str(GIB),
    "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {GIB // 2}",
    "sys/fs/cgroup/pods/cpu.max": "150000 100000",
    "sys/fs/cgroup/pods/one/memory.max": "max",
    "sys/fs/cgroup/pods/one/memory.current": "0",
    "sys/fs/cgroup/pods/one/cpu.max": "max 100000",
}
VERSION_1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/x",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
}


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1])
def test_limits_of_the_group_and_those_around_it_hold(files: dict[str, str], root: pathlib.Path) -> None:
    write(root, files)
    assert host.memory_room() == (3 * GIB // 2, 2 * GIB)
    assert host.cpu_quota() == 1.5 and host.cores() == min(2, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/cpu.max": "max 100000"},
        {
            "proc/self/cgroup": "4:memory:/\n5:cpu:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_without_limits_the_machine_counts(files: dict[str, str], root: pathlib.Path) -> None:
    write(root, files)
    assert host.memory_room() is None and host.cpu_quota() is None
    assert host.cores() == len(os.sched_getaffinity(0))


def test_a_backend_takes_no_more_than_the_container_has(root: pathlib.Path) -> None:
    backend = Reference(DeviceOptions())
    free, total = backend.memory()
    assert free > GIB and total > 2 * GIB
    write(root, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(GIB), "sys/fs/cgroup/memory.current": str(GIB // 4)})
    assert backend.memory() == (3 * GIB // 4, GIB)
    assert backend.kv_budget(1.0) == 3 * GIB // 8


def test_cores_and_memory_are_known_without_linux(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert host.cores() == 7
    asked = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 16384}  # macOS does not tell how many pages are free
    monkeypatch.setattr(os, "sysconf", lambda name: asked[name] if name in asked else int("unknown name"))
    assert host.memory() == (500 * 16384, 1000 * 16384)


def test_doctor_shows_the_containers_limits(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor"]) == 0 and "container" not in capsys.readouterr().out
    write(root, VERSION_2)
    assert main.main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "this container may use 1.5 CPUs" in told and "this container may use 2.0 GiB" in told


def test_doctor_answers_without_torch() -> None:
    script = "import sys; from trireme.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, "doctor", "--backend", "cpu"], capture_output=True, text=True, check=True)
    *told, modules = done.stdout.splitlines()
    assert "torch" not in modules.split() and "trireme.cli.doctor" in modules.split()
    assert any(line.split() == ["torch", importlib.metadata.version("torch")] for line in told)
    assert any(line.startswith("would choose       backend cpu, ") for line in told)


def test_doctor_compiles_nothing_unasked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "find", lambda cache: None)
    monkeypatch.setattr(build, "compiler", lambda: "/usr/bin/cc")
    monkeypatch.setattr(build, "build", lambda *given: pytest.fail("it was compiled"))
    assert main.main(["doctor", "--backend", "cpu"]) == 0
    assert "not compiled yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "driver", "reason"),
    [
        (["libtorch_cpu.so"], True, "the installed torch is a build for CPUs alone"),
        (["libtorch_cpu.so", "libtorch_cuda.so"], False, "no driver of a CUDA or ROCm device is installed"),
        (["libtorch_cpu.so", "libtorch_cuda.so"], True, None),
        ([], True, None),  # torch lies in an unusual place: it must be asked
    ],
)
def test_what_is_known_of_a_gpu_without_torch(
    files: list[str], driver: bool, reason: str | None, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "lib").mkdir()
    write(root, {f"lib/{name}": "" for name in files})
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(root / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(present, "DRIVERS", ("libc.so.6" if driver else "libnothing.so.1",))
    monkeypatch.setattr(present, "ROCM", root / "kfd")
    assert present.surely_missing() == reason


def test_without_kernels_and_compiler_one_line_says_how_much_slower_and_what_mends_it(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert open_backend(DeviceOptions()).name != "reference" and capsys.readouterr().err == ""
    monkeypatch.setattr(build, "find", lambda cache: None)
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    library.library.cache_clear()
    try:
        assert open_backend(DeviceOptions()).name == "reference"
    finally:
        library.library.cache_clear()
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "no C compiler" in told and "8 times slower" in told and "Fix: " in told


def test_a_process_without_the_kernels_help_still_ends_with_its_parent() -> None:
    child = (
        "import os, sys, time\nfrom trireme.ipc import lifeline\nlifeline._kernel_ties = lambda: False\n"
        "lifeline.tie_to_parent(int(sys.argv[1]))\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )
    parent = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    orphan = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while birth_of(orphan) is not None and time.monotonic() < deadline:
        if "\nState:\tZ" in pathlib.Path(f"/proc/{orphan}/status").read_text():
            break  # ended, and nobody waits for it here
        time.sleep(0.1)
    else:
        assert birth_of(orphan) is None


def test_births_are_known_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(runtime, "PROC", tmp_path)
    born = birth_of(os.getpid())
    assert born is not None and abs(time.time() - born) < 7200 and birth_of(os.getpid()) == born
    assert birth_of(4194999) is None


def test_what_takes_seconds_is_shown_on_terminals_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with startup.shown("Importing torch"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with startup.shown("Importing torch"):
        assert capsys.readouterr().err == "Importing torch ..."
    assert capsys.readouterr().err == "\r\x1b[K"
