"""The blocks of the documents are run: Python as it stands, clients against a server, settings by their reader."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
import torch
import yaml
from api.served import Served
from test_docs import ROOT, Fence, fences

from trireme.config import GROUPS, resolve

ADDRESS = "http://127.0.0.1:8000"
WORKED = "# "  # worked examples begin with their file's name; `test_docs` and the operators' tests run them
PLUG_INS = "add-a-format.md"  # whose modules `tests/quant/test_plugins.py` installs and runs


def name_of(fence: Fence) -> str:
    return f"{fence.page.relative_to(ROOT).as_posix()}-{fence.text.partition(chr(10))[0][:30]}"


def is_worked(fence: Fence) -> bool:
    return fence.text.startswith(WORKED) and fence.text.partition("\n")[0].endswith(".py")


PYTHON = [fence for fence in fences("python") if not is_worked(fence) and fence.page.name != PLUG_INS]
CLIENTS = [fence for fence in PYTHON if ADDRESS in fence.text]
OFFLINE = [fence for fence in PYTHON if ADDRESS not in fence.text and "kernels" not in fence.text]
ELSEWHERE = ("langchain_openai", "llama_index", "instructor", "pydantic_ai")  # run by `make test-clients`


def run(text: str, folder: pathlib.Path) -> str:
    """What the program prints."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environ = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, env=environ, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


PRINTED = {
    "README.md": "Paris",
    "docs/quickstart.md": "[(5, 576), (1, 576), (1, 576)]",
    "docs/structured-output.md": "['city', 'country']",
    "docs/memory.md": "1440.0",
}


def test_every_page_with_a_program_is_known() -> None:
    assert {fence.page.relative_to(ROOT).as_posix() for fence in OFFLINE} == set(PRINTED)


@pytest.mark.parametrize(
    "fence",
    [f if f.page.name == "README.md" else pytest.param(f, marks=pytest.mark.wide) for f in OFFLINE],
    ids=name_of,
)
def test_python_prints_what_its_page_says(fence: Fence, smollm2_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert PRINTED[fence.page.relative_to(ROOT).as_posix()] in run(fence.text, tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: pathlib.Path) -> Iterator[Served]:
    """Without keys, as the pages have it."""
    server = Served(tmp_path_factory.mktemp("srv"), "--max-model-len", "512", keys=())
    try:
        server.wait()
        yield server
    finally:
        server.end()


@pytest.mark.wide
@pytest.mark.parametrize("fence", CLIENTS, ids=name_of)
def test_clients_get_an_answer(fence: Fence, server: Served, tmp_path: pathlib.Path) -> None:
    if any(package in fence.text for package in ELSEWHERE):
        pytest.skip("its package is in the clients' environment; `make test-clients` drives it")
    assert run(fence.text.replace(ADDRESS, server.url), tmp_path).strip()


@pytest.mark.gpu
@pytest.mark.parametrize("fence", [fence for fence in PYTHON if "cuda" in fence.text], ids=name_of)
def test_programs_for_a_gpu(fence: Fence, tmp_path: pathlib.Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    run(fence.text, tmp_path)


@pytest.mark.parametrize("fence", fences("toml", "json", "yaml"), ids=name_of)
def test_files_parse_and_settings_are_known(fence: Fence, tmp_path: pathlib.Path) -> None:
    reader = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}[fence.language]
    tables = reader(fence.text)
    assert tables
    if fence.language == "toml" and set(tables) <= set(GROUPS):
        path = tmp_path / "trireme.toml"
        path.write_text(fence.text)
        resolve(environ={}, file=path)
