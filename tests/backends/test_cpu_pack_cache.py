"""Packed weights kept on disk: the same bytes without packing, or packed anew; never a crash, never too much of the disk."""

from __future__ import annotations

import hashlib
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from trireme.backends import open_backend, reason_against
from trireme.blocks import BLOCKS
from trireme.config import DeviceOptions
from trireme.hub.weights import Weight, map_file, weight_from_bytes
from trireme.quant import Noise
from trireme.quant.gguf import decode_blocks

if reason_against("cpu"):
    pytest.skip(str(reason_against("cpu")), allow_module_level=True)

from trireme.backends.cpu import cache as cache_module
from trireme.backends.cpu import library, weights
from trireme.backends.cpu.cache import PackCache
from trireme.backends.cpu.methods import METHODS, Packed

ROWS, COLUMNS = 96, 256


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "LEAST", 1)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call that packs rows."""
    calls: list[int] = []
    loaded = library.library()

    class Counting:
        def __getattr__(self, name: str) -> object:
            if name == "trireme_pack":
                calls.append(1)
            return getattr(loaded, name)

    monkeypatch.setattr(weights, "library", Counting)
    return calls


def write_source(path: pathlib.Path, seed: int = 0) -> pathlib.Path:
    path.write_bytes(np.random.default_rng(seed).standard_normal((ROWS, COLUMNS), dtype=np.float32).tobytes())
    return path


def stored(path: pathlib.Path, name: str = "w") -> Weight:
    return weight_from_bytes(name, "F32", (ROWS, COLUMNS), map_file(path))


def load(parts: list[Weight], folder: pathlib.Path | None, method: str = "int8", **options: object) -> Packed:
    """Loads as a fresh start would."""
    chosen = METHODS[method] if folder is None else METHODS[method].kept_in(PackCache(folder, **options))  # type: ignore[arg-type]
    return chosen.load(parts, None, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]


def same(one: Packed, other: Packed) -> bool:
    kinds = [[(w.kind, w.rows, w.columns) for w in packed.weights] for packed in (one, other)]
    return kinds[0] == kinds[1] and all(torch.equal(a.data, b.data) for a, b in zip(one.weights, other.weights, strict=True))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_second_start_packs_nothing(method: str, tmp_path: pathlib.Path, packs: list[int]) -> None:
    first, second = write_source(tmp_path / "a"), write_source(tmp_path / "b", 1)
    plain = load([stored(first), stored(second, "v")], None, method)
    filling = load([stored(first), stored(second, "v")], tmp_path / "packed", method)
    del packs[:]
    kept = load([stored(first), stored(second, "v")], tmp_path / "packed", method)
    assert not packs
    assert same(plain, filling) and same(plain, kept)
    assert torch.equal(plain.weights[0].floats(), kept.weights[0].floats())
    assert kept.weights[0].data.data_ptr() % 64 == 0


def test_only_what_was_quantised_unless_all_is_asked_for(tmp_path: pathlib.Path, packs: list[int]) -> None:
    parts = [stored(write_source(tmp_path / "a"))]
    load(parts, tmp_path / "packed", "none")
    assert not (tmp_path / "packed").exists()
    filling = load(parts, tmp_path / "packed", "none", everything=True)
    del packs[:]
    assert same(filling, load(parts, tmp_path / "packed", "none", everything=True)) and not packs


def test_changed_sources_are_packed_again(tmp_path: pathlib.Path, packs: list[int]) -> None:
    path, folder = write_source(tmp_path / "a"), tmp_path / "packed"
    before = load([stored(path)], folder)
    write_source(path, 1)
    after = load([stored(path)], folder)
    assert not same(before, after) and same(after, load([stored(path)], None))
    os.utime(path, ns=(0, 0))
    del packs[:]
    assert same(after, load([stored(path)], folder)) and packs


def test_cuts_are_kept_apart(tmp_path: pathlib.Path, packs: list[int]) -> None:
    """The shares of tensor-parallel ranks, and rows in another order, each their own file."""
    whole, folder = stored(write_source(tmp_path / "a")), tmp_path / "packed"
    order = np.random.default_rng(0).permutation(ROWS)
    cuts = [whole.rows(slice(0, 48)), whole.rows(slice(48, 96)), whole.columns(slice(0, 128)), whole.columns(slice(128, 256))]
    cuts += [whole.rows(order), whole.rows(order[::-1]), whole.rows(order).columns(slice(0, 128))]
    for _ in range(2):
        del packs[:]
        loaded = [load([cut], folder) for cut in cuts]
        assert all(same(one, load([cut], None)) for one, cut in zip(loaded, cuts, strict=True))
    assert len(packs) == len(cuts)  # those without a cache
    assert len(list(folder.iterdir())) == len(cuts)


def test_no_origin_no_file(tmp_path: pathlib.Path) -> None:
    loose = Weight("w", "F32", np.ones((ROWS, COLUMNS), np.float32))
    for part in (loose, Noise("w", (ROWS, COLUMNS))):
        assert part.origin is None
        load([part], tmp_path / "packed")  # type: ignore[list-item]
    assert not (tmp_path / "packed").exists()


def test_damaged_files_are_made_anew(tmp_path: pathlib.Path) -> None:
    path, folder = write_source(tmp_path / "a"), tmp_path / "packed"
    expected = load([stored(path)], folder)
    (file,) = folder.iterdir()
    whole, draw = file.read_bytes(), random.Random(0)
    flips = [draw.randrange(4096) for _ in range(20)] + [draw.randrange(4096, len(whole)) for _ in range(20)]
    damaged = [whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :] for at in flips]
    damaged += [b"", whole[:100], whole[:4096], whole[:-1], whole + b"\0", bytes(len(whole)), os.urandom(len(whole))]
    for content in damaged:
        file.unlink()
        file.write_bytes(content)
        assert same(expected, load([stored(path)], folder))
        assert file.read_bytes() == whole
    file.unlink()
    file.mkdir()
    assert same(expected, load([stored(path)], folder))


def test_other_kernels_or_format_are_foreign(tmp_path: pathlib.Path, packs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write_source(tmp_path / "a"), tmp_path / "packed"
    load([stored(path)], folder)
    monkeypatch.setattr(cache_module, "FORMAT", cache_module.FORMAT + 1)
    del packs[:]
    load([stored(path)], folder)
    assert packs
    monkeypatch.setattr(cache_module.build, "library_name", lambda: "another.so")
    del packs[:]
    load([stored(path)], folder)
    assert packs


def test_oldest_go_and_this_start_stays(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "packed"
    paths = [write_source(tmp_path / str(i), i) for i in range(4)]
    load([stored(paths[0])], folder)
    (first,) = folder.iterdir()
    limit = 2 * first.stat().st_size
    os.utime(first, (1, 1))
    load([stored(paths[1])], folder, limit=limit)
    second = next(path for path in folder.iterdir() if path != first)
    os.utime(second, (2, 2))
    load([stored(paths[0])], folder)  # used: now the second is the oldest
    os.utime(first, (3, 3))
    load([stored(paths[2])], folder, limit=limit)
    assert first.exists() and not second.exists() and len(list(folder.iterdir())) == 2
    os.utime(first, (4, 4))
    method = METHODS["int8"].kept_in(PackCache(folder, limit=limit))
    for path in paths:  # more than there is room for: the beginning stays, so that the next start has it
        method.load([stored(path)], None, torch.float32, torch.device("cpu"))
        assert sum(file.stat().st_size for file in folder.iterdir()) <= limit
    assert first.exists()


def test_small_matrices_are_not_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "LEAST", 1 << 20)
    load([stored(write_source(tmp_path / "a"))], tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_full_disk_is_said_once(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "packed").write_text("a file where the folder should be")
    method = METHODS["int8"].kept_in(PackCache(tmp_path / "packed"))
    for seed in range(2):
        part = stored(write_source(tmp_path / "a", seed))
        kept = method.load([part], None, torch.float32, torch.device("cpu"))
        assert same(kept, load([part], None))
    line, *more = capsys.readouterr().err.splitlines()
    assert line.startswith("trireme: packed weights are not kept") and "--pack-cache off" in line and not more


def test_failed_write_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "replace", full)
    load([stored(write_source(tmp_path / "a"))], tmp_path / "packed")
    assert not list((tmp_path / "packed").iterdir())


CHILD = """
import pathlib, sys, torch
sys.path.insert(0, sys.argv[1])
import test_cpu_pack_cache as tests
tests.cache_module.LEAST = 1
source, folder = pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for step in range(30):
    part = tests.stored(source).rows(slice(0, 16 * (1 + step % 6)))
    assert tests.same(tests.load([part], folder), tests.load([part], None)), step
    if step % 6 == 5:
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
"""


def test_two_processes_at_once(tmp_path: pathlib.Path) -> None:
    write_source(tmp_path / "a")
    here = str(pathlib.Path(__file__).parent)
    command = [sys.executable, "-c", CHILD, here, str(tmp_path / "a"), str(tmp_path / "packed")]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.wait(timeout=60) for child in children] == [0, 0]


def test_backend_keeps_by_its_setting(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path))
    parts = [stored(write_source(tmp_path / "a"))]
    counts = {}
    for setting in ("off", "auto", "on"):
        backend = open_backend(DeviceOptions(backend="cpu", pack_cache=setting))
        for method in ("none", "int8"):
            backend.methods[method].load(parts, None, torch.float32, backend.device)  # type: ignore[arg-type]
        counts[setting] = len(list((tmp_path / "packed").iterdir())) if (tmp_path / "packed").exists() else 0
    assert counts == {"off": 0, "auto": 1, "on": 2}


def test_decoding_is_what_the_format_was_numbered_for() -> None:
    """The packing itself is in the kernels' digest; the decoding of blocks before it is not. Changed values need a new FORMAT."""
    digest = hashlib.sha256()
    for kind, (_, size) in sorted(BLOCKS.items()):
        raw = torch.from_numpy(np.random.default_rng(0).integers(0, 48, (8, size), dtype=np.uint8))
        digest.update(np.ascontiguousarray(decode_blocks(kind, raw).numpy() + 0.0).tobytes())
    numbered = (cache_module.FORMAT, digest.hexdigest()[:16])
    assert numbered == (2, "2b6d150eb4f4a193"), "raise FORMAT in backends/cpu/cache.py and note the new digest"
