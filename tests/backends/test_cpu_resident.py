"""Code that only the start of a process runs does not stay in its memory, and can still be run."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

CHILD = """
import torch
from trireme.backends.cpu.resident import forget_code

def resident() -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssFile"))

square = torch.arange(6.0).view(2, 3)
expected = (square @ square.T).softmax(-1)
before = resident()
found = forget_code()
after = resident()
assert torch.equal((square @ square.T).softmax(-1), expected)
print(found, before - after)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/smaps").exists(), reason="needs Linux' account of mappings")
def test_code_of_large_libraries_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, kilobytes = map(int, done.stdout.split())
    assert found >= 1
    assert kilobytes > 20_000
