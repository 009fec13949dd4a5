"""The start of a CPU engine: a first token without libraries that have no part in it."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch

from trireme.backends import reason_against
from trireme.backends.cpu import resident
from trireme.command.early import TRIED

if reason_against("cpu"):
    pytest.skip(str(reason_against("cpu")), allow_module_level=True)

# Seconds each to import, and tens of megabytes: torch's compiler, its algebra system, the kernels of a device that is not here.
NEEDLESS = ("torch._dynamo", "torch._inductor", "sympy", "transformers", *([] if reason_against("cuda") is None else ["triton"]))
CHILD = """
import sys
from trireme import LLM, SamplingParams
with LLM(sys.argv[1], backend="auto") as llm:
    for sampling in (SamplingParams(max_tokens=3, temperature=0.0), SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9)):
        llm.generate("The capital of France is", sampling)
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


def test_answers_come_without_compilers(smollm2_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", CHILD, str(smollm2_path), *NEEDLESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# What `trireme generate` does, in a process that can be asked afterwards. Deferred modules are there in name only, and work.
EARLY = """
import sys
from trireme.command.early import DEFERRED, open_llm
from trireme.cli.main import main
main(["generate", "The capital of France is", "--max-tokens", "3", "--model", sys.argv[1]])
import torch
print(*(name for name in DEFERRED if type(sys.modules.get(name)).__name__ == "module"))
assert callable(torch._meta_registrations.meta_mm)
print(torch.mm(torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")).shape)
"""


def test_the_command_line_leaves_modules_of_torch_until_they_are_used(smollm2_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, "-c", EARLY, str(smollm2_path)], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    *answer, loaded, shape = done.stdout.splitlines()
    assert answer[0].strip().startswith("Paris")
    assert not loaded or not deferring()
    assert shape == "torch.Size([2, 4])"


def test_code_is_forgotten_only_where_the_system_shows_its_mappings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(resident, "MAPPINGS", tmp_path / "smaps")
    assert resident.forget_code.__wrapped__() == 0


def deferring() -> bool:
    return torch.version.cuda is None and torch.version.hip is None and torch.__version__.startswith(TRIED)
