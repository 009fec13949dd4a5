"""The recipes of docs/recipes.md, run as they are printed against the real server. A program that is not installed is skipped."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from api.served import Served

ROOT = pathlib.Path(__file__).parents[2]
PLACES = os.environ.get("RECIPES_PATH", "")  # folders with llm, aider, opencode, node and a python with langchain-openai
MODULES = os.environ.get("RECIPES_NODE_MODULES", "")
pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Without keys, as the recipes have it."""
    server = Served(tmp_path_factory.mktemp("srv"), keys=())
    try:
        server.wait()
        yield server
    finally:
        server.end()


def blocks(title: str, server: Served) -> list[str]:
    """The blocks under a heading, pointed at this server."""
    text = (ROOT / "docs/recipes.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    return [block.replace("http://127.0.0.1:8000", server.url) for block in found]


def run(folder: pathlib.Path, program: str, *arguments: str, **more: str) -> str:
    path = f"{PLACES}:{os.environ['PATH']}"
    found = shutil.which(program, path=path)
    if found is None:
        pytest.skip(f"no {program} on this machine (RECIPES_PATH names folders to look in)")
    environ = {"PATH": path, "HOME": str(folder), "TERM": "dumb", **more}
    command = [found, *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_langchain(served: Served, tmp_path: pathlib.Path) -> None:
    (text,) = blocks("LangChain", served)
    try:
        run(tmp_path, "python", "-c", "import langchain_openai")
    except AssertionError:
        pytest.skip("no langchain-openai for the python of RECIPES_PATH")
    assert "Tokyo" in run(tmp_path, "python", "-c", text)


def test_ai_sdk(served: Served, tmp_path: pathlib.Path) -> None:
    if not (pathlib.Path(MODULES) / "ai").is_dir():
        pytest.skip("no package `ai` (RECIPES_NODE_MODULES names the node_modules folder)")
    (tmp_path / "node_modules").symlink_to(MODULES)
    (tmp_path / "chat.mjs").write_text(blocks("Vercel's AI SDK", served)[0])
    assert "Tokyo" in run(tmp_path, "node", "chat.mjs")


def test_llm(served: Served, tmp_path: pathlib.Path) -> None:
    models, command = blocks("llm", served)
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    run(tmp_path, "llm", "--version")
    assert "Tokyo" in run(tmp_path, "bash", "-c", command, LLM_USER_PATH=str(tmp_path))


def test_aider(served: Served, tmp_path: pathlib.Path) -> None:
    (command,) = blocks("aider", served)
    quiet = "--no-git --yes-always --no-check-update --analytics-disable --no-pretty"
    run(tmp_path, "aider", "--version")
    assert "Tokyo" in run(tmp_path, "bash", "-c", command.replace("aider --model", f"aider {quiet} --model"))


def test_opencode(served: Served, tmp_path: pathlib.Path) -> None:
    """Its requests arrive and are answered; what so small a model says to its instructions is another matter."""
    config, _ = blocks("opencode", served)
    (tmp_path / "opencode.json").write_text(config)
    run(tmp_path, "opencode", "--version")
    with contextlib.suppress(AssertionError):  # it goes on asking until its context is full
        run(tmp_path, "timeout", "60", "opencode", "run", "--model", "trireme/smollm2", "Hello")
    assert served.logged('"path":"/v1/chat/completions","status":200')
