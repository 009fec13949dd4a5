"""The record by which tokens are drawn: one name on its whole way, and a parameter more is a matter of a few lines."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tiny_models

import trireme
from trireme.backends import reason_against
from trireme.backends.cpu.library import CHOOSING
from trireme.kernels.steps import sampling
from trireme.ops import Choosing
from trireme.types import DRAWN, SamplingParams

PACKAGE = pathlib.Path(trireme.__file__).parent
MOST_FILES = 6
# A parameter that keeps no token less likely than this, as whoever adds one would write it.
CHANGES = {
    "types.py": [
        ("    min_p: float | None = None\n", "    floor_p: float | None = None\n"),
        ("    min_p: float = 0.0\n", "    floor_p: float = 0.0\n"),
        ('    ("min_p", 0.0, 1.0),\n', '    ("floor_p", 0.0, 1.0),\n'),
    ],
    "ops/choosing.py": [
        ("    min_p: Tensor\n", "    floor_p: Tensor\n"),
        ("    keep &= (before < ", "PLACE"),
    ],
}
ADDED = "    keep &= (p >= by.floor_p.unsqueeze(1)) | (rank == 0)\n"
ASK = """
import json, sys
import msgspec
from trireme.api.openai.protocol import SamplingFields
from trireme.api.parameters.sampling import sampling_of
from trireme.llm import LLM

folder, backend, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
answers = []
with LLM(folder, backend=backend, threads=1, max_model_len=64) as llm:
    for body in asked:
        fields = msgspec.json.decode(json.dumps(body).encode(), type=SamplingFields)
        answers.append(llm.generate([[5, 6, 7]], sampling_of(fields, {}, 12))[0].token_ids)
print(json.dumps(answers))
"""


def test_one_list_of_names_from_the_request_to_the_kernels() -> None:
    assert DRAWN == Choosing._fields == CHOOSING == sampling.COLUMNS
    assert set(DRAWN) <= set(SamplingParams.__struct_fields__)


def test_a_parameter_names_few_files() -> None:
    """Those that a parameter needs, kernels of both backends included; besides them only its command-line flag, the page's slider
    and the cases by which ops are checked."""
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".c", ".h") and "min_p" in path.read_text()
    }
    spoken = {"command/flags.py", "ops/cases.py", "worker/conformance.py"}
    assert len(named - spoken) <= MOST_FILES, sorted(named - spoken)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of the package with a parameter more."""
    copy = tmp_path_factory.mktemp("copy") / "trireme"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "web"))
    for name, edits in CHANGES.items():
        text = (copy / name).read_text()
        for after, line in edits:
            assert text.count(after) == 1, (name, after)
            end = text.index("\n", text.index(after)) + 1
            text = text[:end] + (ADDED if line == "PLACE" else line) + text[end:]
        (copy / name).write_text(text)
    return copy.parent


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.wide), "cpu"])
def test_a_parameter_that_is_added_takes_effect(backend: str, changed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From a request's body to the choice; a kernel that does not know it leaves the choice to the plain body."""
    if reason_against(backend):
        pytest.skip(str(reason_against(backend)))
    tiny_models.save("llama2", tmp_path)
    drawn = {"temperature": 1.5, "seed": 3, "ignore_eos": True}
    asked = [{**drawn, "temperature": 0.0}, drawn, {**drawn, "floor_p": 1.0}, {**drawn, "floor_p": 0.0}]
    command = [sys.executable, "-c", ASK, str(tmp_path), backend, json.dumps(asked)]
    environ = {**os.environ, "PYTHONPATH": str(changed)}
    done = subprocess.run(command, cwd=changed, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    greedy, free, bound, off = json.loads(done.stdout)
    assert bound == greedy != free == off
