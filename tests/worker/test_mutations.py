"""Mutated models: each is refused in one line or runs; none crashes, hangs or takes memory. The loading is a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("mutated_models.py")
FEW = {"gguf": 60, "safetensors": 40, "config": 30, "tokenizer": 60}
FEWEST = {"gguf": 30, "tokenizer": 30}
MANY = {"gguf": 4000, "safetensors": 3000, "config": 2000, "tokenizer": 3000}


def load_mutated(kind: str, count: int, seed: int, folder: pathlib.Path) -> None:
    command = [sys.executable, str(PROGRAM), kind, str(count), str(seed), str(folder)]
    environ = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, f"ended with {done.returncode}; files in {folder}:\n{done.stderr[-3000:]}"
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["files"] == count and told["refused"] > count / 4
    print(f"{kind}: {told['files']} files, {told['refused']} refused, {told['growth'] >> 20} MiB more")


@pytest.mark.parametrize("kind, count", [*FEWEST.items(), *(pytest.param(*few, marks=pytest.mark.wide) for few in FEW.items())])
def test_mutated_models(kind: str, count: int, tmp_path: pathlib.Path) -> None:
    load_mutated(kind, count, 0, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", MANY)
def test_many_mutated_models(kind: str, tmp_path: pathlib.Path) -> None:
    load_mutated(kind, MANY[kind], 1, tmp_path)
