"""The commands of the documents: each is run here, or its reason not to be stands here. `test_docs` checks the flags of all."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest
from api.served import Served
from test_docs import FENCE, PAGES, ROOT, Fence, fences
from test_docs_blocks import PLUG_INS, is_worked

ADDRESS = "http://127.0.0.1:8000"
# Blocks that are no commands, by language: where they are tried.
OTHER = {
    "python": "test_docs.py, test_docs_blocks.py",
    "toml": "test_docs_blocks.py",
    "json": "test_docs_blocks.py",
    "yaml": "test_docs_blocks.py",
    "nginx": "api/test_proxy.py",
    "caddy": "api/test_proxy.py",
    "js": "clients/test_recipes.py",
}
COMMANDS = ("", "console", "sh", "bash")
RUN = (
    "trireme generate",
    "trireme doctor",
    "trireme models",
    "trireme backends",
    "trireme simulate",
    "trireme ps",
    "curl",
    "TRIREME_",
)
REASONS = {
    "trireme backends check": "test_docs.py checks the worked backend without installing it",
    "trireme models check": "compares a model with transformers: tests/bench/test_model_check.py",
    "trireme serve": "starts a server: tests/serve and tests/api",
    "trireme chat": "talks: tests/cli/test_chat.py",
    "trireme pull": "fetches from the network: tests/hub/test_registry.py, on loopback",
    "trireme bench": "measures for minutes, some on a GPU: tests/bench",
    "make": "sets up what the tests themselves need",
    "pip install dist": "tests/test_wheel.py",
    "git": "changes the clone",
    "lm_eval": "clients/test_clients.py",
    "llm": "clients/test_recipes.py",
    "export OPENAI_": "clients/test_recipes.py",
    "aider": "clients/test_recipes.py",
    "opencode": "clients/test_recipes.py",
    "python -m pytest": "is a test",
    "TRITON_INTERPRET=1 python -m pytest": "kernels/test_registry.py",
    "python tests/kernels/compile_for.py": "kernels/test_targets.py",
}


def commands() -> Iterator[tuple[Fence, str]]:
    """The command lines of all pages. Of blocks without a language only those that begin with a known program."""
    programs = ("trireme ", "curl ", "lm_eval ")
    for fence in fences(*COMMANDS):
        for line in fence.text.replace("\\\n", " ").splitlines():
            shell = fence.language in ("sh", "bash") and line and not line.startswith("#")
            if shell or (not fence.language and line.startswith(programs)):
                yield fence, line
            elif fence.language == "console" and line.startswith("$ "):
                yield fence, line[2:]


def is_run(command: str) -> bool:
    return command.startswith(RUN) and not command.startswith(tuple(REASONS))


def test_every_block_is_run_or_has_its_reason() -> None:
    languages = {match.group(1) for page in PAGES for match in FENCE.finditer(page.read_text())}
    assert languages <= {*OTHER, *COMMANDS}
    for place in {word for text in OTHER.values() for word in re.findall(r"[\w/]+\.py", text)}:
        assert (ROOT / "tests" / place).exists(), place
    left = [command for _, command in commands() if not is_run(command) and not command.startswith(tuple(REASONS))]
    assert not left, left
    unused = [start for start in (*RUN, *REASONS) if not any(command.startswith(start) for _, command in commands())]
    assert not unused, unused


def test_reasons_name_tests_that_exist() -> None:
    for text in REASONS.values():
        for place in re.findall(r"(?:tests/)?([\w/]+\.py)", text):
            assert (ROOT / "tests" / place).exists(), place


def test_programs_about_kernels(tmp_path: pathlib.Path) -> None:
    """Those for a GPU are run by `test_docs_blocks` where there is one; the other one is run here, interpreted."""
    found = [f.text for f in fences("python") if "kernels" in f.text and not is_worked(f) and f.page.name != PLUG_INS]
    (doubled,) = (text for text in found if 'device="cuda"' not in text)
    (tmp_path / "doubled.py").write_text(f"import torch\n{doubled}\nprint(doubled(torch.arange(2000.0)).sum().item())\n")
    done = run("TRITON_INTERPRET=1 python doubled.py", tmp_path)
    assert done.stdout == "3998000.0\n", done.stderr[-2000:]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_path: pathlib.Path) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("srv"), "--max-model-len", "1024", keys=())
    try:
        server.wait()
        yield server
    finally:
        server.end()


def install(page: pathlib.Path, folder: pathlib.Path) -> None:
    """Puts the modules of a page and their entry points into the folder, as installing its package would."""
    for fence in (fence for fence in fences("python") if fence.page == page and is_worked(fence)):
        (folder / fence.text.partition("\n")[0].removeprefix("# ")).write_text(fence.text)
    points = [
        tomllib.loads(fence.text).get("project", {}).get("entry-points", {}) for fence in fences("toml") if fence.page == page
    ]
    lines = [
        f"[{group}]\n{name} = {place}\n" for found in points for group, names in found.items() for name, place in names.items()
    ]
    if lines:
        (folder / "page-0.1.dist-info").mkdir()
        (folder / "page-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: page\nVersion: 0.1\n")
        (folder / "page-0.1.dist-info/entry_points.txt").write_text("".join(lines))


def run(command: str, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    text = re.sub(r"(^|\s)trireme ", r"\1python -m trireme ", command, count=1)
    text = re.sub(r"(^|\s)python ", rf"\1{sys.executable} ", text)
    environ = dict(os.environ, PYTHONPATH=f"{ROOT}:{folder}", OMP_NUM_THREADS="1")
    return subprocess.run(["bash", "-c", text], cwd=folder, env=environ, capture_output=True, text=True, timeout=250)


@pytest.mark.wide
@pytest.mark.parametrize("command", sorted({text for _, text in commands() if is_run(text) and not text.startswith("curl")}))
def test_commands_do_what_their_page_shows(command: str, smollm2_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    page = next(fence.page for fence, text in commands() if text == command)
    settings = [fence.text for fence in fences("toml") if fence.page == page]
    (tmp_path / "trireme.toml").write_text("".join(settings) if "trireme.toml" in command else "")
    install(page, tmp_path)
    done = run(command, tmp_path)
    if "SISE" in command:  # the mistake that its page shows
        assert done.returncode == 3 and done.stderr.strip() in page.read_text()
        return
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() or "trireme ps" in command  # which has nothing to list


@pytest.mark.wide
@pytest.mark.parametrize("command", sorted({text for _, text in commands() if text.startswith("curl")}))
def test_curl_gets_an_answer(command: str, server: Served, tmp_path: pathlib.Path) -> None:
    done = run(command.replace(ADDRESS, server.url), tmp_path)
    assert done.returncode == 0 and '"choices"' in done.stdout, done.stdout[-500:] + done.stderr[-500:]
