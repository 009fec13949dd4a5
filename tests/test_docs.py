"""The documents: links lead somewhere, commands exist with the flags shown, Python blocks compile, worked examples compute."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import pathlib
import re
import shlex
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import tiny_models
from drive import Drive

import trireme
from trireme.backends import reason_against
from trireme.backends.conformance import check_ops
from trireme.cli import bench
from trireme.cli.main import COMMANDS
from trireme.config import DeviceOptions, ScheduleOptions
from trireme.errors import UnsupportedModel
from trireme.hub.catalogue import CATALOGUE
from trireme.llm import LLM
from trireme.models import MODELS
from trireme.models.llama import Llama
from trireme.sched.capacity import Capacity
from trireme.sched.scheduler import Scheduler
from trireme.types import Request, SamplingParams

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE_COMMAND = re.compile(r"`(trireme [a-z][^`]*)`")


class Fence(NamedTuple):
    page: pathlib.Path
    language: str
    text: str


def fences(*languages: str) -> list[Fence]:
    found = [Fence(page, *match.groups()) for page in PAGES for match in FENCE.finditer(page.read_text())]
    return [fence for fence in found if fence.language in languages]


# --- links --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: pathlib.Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for link in LINK.findall(prose):
        place, _, anchor = link.partition("#")
        if "://" in place or place.startswith("mailto:"):
            continue
        target = (page.parent / place).resolve() if place else page
        assert target.exists() and target.is_relative_to(ROOT), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text()), f"{page.name}: {link}"


def test_the_page_of_memory_has_every_model_of_the_catalogue() -> None:
    section = (ROOT / "docs/memory.md").read_text().partition("## Models that are known by name")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w.-]+)`", section, re.MULTILINE)) == set(CATALOGUE)


def test_pictures_exist_and_none_is_left_over() -> None:
    named = {page.parent / name for page in PAGES for name in re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text())}
    named |= {page.parent / name for page in PAGES for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())}
    assert {path.resolve() for path in named} == set((ROOT / "docs/images").iterdir())


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_readme() -> None:
    found = {ROOT / "README.md"}
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in found:
                found.add(target)
                waiting.append(target)
    assert set(PAGES) == {page for page in found if page.is_relative_to(ROOT)}


def test_the_page_of_figures_is_short() -> None:
    words = (ROOT / "docs/benchmarks.md").read_text().replace("|", " ").split()
    assert len(words) <= 1000


def test_the_architecture_stays_one_page() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 250


def test_the_changelog_begins_with_this_version() -> None:
    newest, *_ = re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == trireme.__version__


def test_files_that_are_named_exist() -> None:
    """`folder/file.py` is under the root or under the package."""
    folders = "|".join(
        ["trireme", "tests", "docs", "deploy", *(path.name for path in (ROOT / "trireme").iterdir() if path.is_dir())]
    )
    missing = []
    for page in PAGES:
        for name in re.findall(rf"`((?:{folders})/[\w/-]+\.\w+)`", page.read_text()):
            if not (ROOT / name).exists() and not (ROOT / "trireme" / name).exists():
                missing.append(f"{page.name}: {name}")
    assert not missing, missing


# --- commands -----------------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """Every `trireme ...` of a console block and of the text, with its page."""
    for fence in fences("", "console", "bash", "sh", "shell"):
        joined = fence.text.replace("\\\n", " ")
        for line in joined.splitlines():
            plain = re.sub(r"^\$ ", "", line.strip())
            if plain.startswith("trireme ") and (fence.language != "console" or line.startswith("$ ")):
                yield fence.page.name, plain
    for page in PAGES:
        for command in INLINE_COMMAND.findall(FENCE.sub("", page.read_text())):
            yield page.name, command


def check_command(command: str) -> None:
    """Raises unless the command line could be parsed; runs nothing."""
    words = shlex.split(re.split(r" (?:\||>|2>|&&|&)(?: |$)", command)[0], comments=True)[1:]
    if words == ["--help"] or words == ["--version"]:
        return
    name, *rest = words
    assert name in COMMANDS, f"no command {name!r}"
    module = importlib.import_module(f"trireme.cli.{name}")
    parser = argparse.ArgumentParser(prog=f"trireme {name}", exit_on_error=False)
    module.add_arguments(parser)
    if any(word.isupper() or "|" in word for word in rest) or not rest or "..." in rest:
        known = parser.format_help() + (" ".join(bench.KINDS) if name == "bench" else "")
        for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
            assert flag in known, f"no flag {flag}"
        return
    try:
        parser.parse_args(rest)
    except SystemExit as end:
        assert not end.code, f"exit code {end.code}"


def test_commands_exist_with_their_flags() -> None:
    seen, wrong = 0, []
    for page, command in commands():
        seen += 1
        try:
            check_command(command)
        except (AssertionError, argparse.ArgumentError, ImportError, ValueError) as error:
            wrong.append(f"{page}: {command}: {error}")
    assert seen > 10
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", ["trireme fly", "trireme serve --no-such-flag", "trireme bench nosuch", "trireme ps --jsn"])
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises((AssertionError, argparse.ArgumentError)):
        check_command(command)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(page.name, target) for page in PAGES for target in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named and {target for _, target in named} <= targets, named


# --- Python blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", fences("python"), ids=lambda fence: fence.page.name)
def test_python_compiles(fence: Fence) -> None:
    ast.parse(fence.text)


def example(name: str, folder: pathlib.Path) -> ModuleType:
    """The worked example that begins with `# NAME.py`, imported as a reader would."""
    (text,) = [fence.text for fence in fences("python") if fence.text.startswith(f"# {name}.py\n")]
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith(("#", '"""')))


EXAMPLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "smollm3": ("smollm3", "SmolLM3Config", {"num_hidden_layers": 4, "tie_word_embeddings": True, "no_rope_layers": [1, 0, 1, 0]}),
    "gpt-neox": ("gpt_neox", "GPTNeoXConfig", {}),
    "gpt-neox, one after the other": ("gpt_neox", "GPTNeoXConfig", {"use_parallel_residual": False, "rotary_pct": 0.5}),
}


def worst_error(folder: pathlib.Path, family: str, backend: str) -> tuple[float, bool]:
    """The largest error of any logit beside transformers, and whether the tokens are the same."""
    tokens = tiny_models.prompt(45, 1)
    settings = {
        "backend": backend,
        "dtype": "float32",
        "max_model_len": 128,
        "page_size": 4,
        "max_step_tokens": 20,
        "graphs": False,
    }
    run = Drive(folder, full=backend == "reference", **settings).run("a", tokens, max_tokens=8)
    answer, logits = tiny_models.reference(family, tokens, 8)
    scale = float(logits.abs().max())
    return max(float((run.logits[at] - logits[at]).abs().max()) / scale for at in run.logits), run.tokens == answer


@pytest.fixture
def example_model(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A family of `tiny_models` made of a worked example, and forgotten afterwards."""
    module, config, changes = EXAMPLES[request.param]
    monkeypatch.setitem(tiny_models.FAMILIES, request.param, (config, changes))
    before = dict(MODELS)
    example(module, tmp_path)
    tiny_models.save(request.param, tmp_path / "model")
    yield request.param
    MODELS.clear()
    MODELS.update(before)


@pytest.mark.parametrize("example_model", EXAMPLES, indirect=True)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_worked_models_agree_with_transformers(example_model: str, backend: str, tmp_path: pathlib.Path) -> None:
    if reason := reason_against(backend):
        pytest.skip(f"{backend}: {reason}")
    error, same = worst_error(tmp_path / "model", example_model, backend)
    assert same and error <= 1e-4


@pytest.mark.parametrize("example_model", ["smollm3"], indirect=True)
def test_the_comparison_sees_the_difference(example_model: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedModel, match="no_rope_layers"):  # plain Llama does not say that it reads them
        MODELS["SmolLM3ForCausalLM"], example_class = Llama, MODELS["SmolLM3ForCausalLM"]
        worst_error(tmp_path / "model", example_model, "reference")
    MODELS["SmolLM3ForCausalLM"] = type("Liar", (Llama,), {"reads": example_class.reads})
    assert worst_error(tmp_path / "model", example_model, "reference")[0] > 1e-2


def test_a_llama_like_model_is_short(tmp_path: pathlib.Path) -> None:
    (text,) = [fence.text for fence in fences("python") if fence.text.startswith("# smollm3.py")]
    assert code_lines(text) < 20
    (text,) = [fence.text for fence in fences("python") if fence.text.startswith("# gpt_neox.py")]
    assert code_lines(text) < 150


def test_the_worked_backend_conforms(tmp_path: pathlib.Path) -> None:
    backend = example("acme", tmp_path).Acme(DeviceOptions(backend="acme"))
    findings = list(check_ops(backend, ["rms_norm", "add_rms_norm", "linear"]))
    assert findings and all(finding.ok for finding in findings)


def test_the_worked_device_tells_its_memory(tmp_path: pathlib.Path) -> None:
    backend = example("acme_device", tmp_path).AcmeDevice(DeviceOptions(backend="acme"))
    assert backend.kv_budget(1.0) == 6 << 30 and backend.kv_budget(0.5) == 2 << 30
    findings = list(check_ops(backend, ["rms_norm"]))
    assert findings and all(finding.ok for finding in findings)


def test_the_worked_policy_orders_the_queue(tmp_path: pathlib.Path) -> None:
    policy = example("shortest", tmp_path).Shortest("1")
    scheduler = Scheduler(ScheduleOptions(), Capacity(num_pages=64, page_size=4, max_model_len=64), policy=policy, seed=0)
    for id, length in (("long", 9), ("short", 2)):
        scheduler.add(Request(id=id, tokens=list(range(length)), sampling=SamplingParams(max_tokens=4)))
    plan = scheduler.schedule()
    assert plan is not None and [admit.num_prompt for admit in plan.admit] == [2]


# --- what the default model is shown to say --------------------------------------------------------------------------------------


def test_the_default_model_says_what_the_pages_show(smollm2_path: pathlib.Path) -> None:
    """Greedy, with the weights as shipped. The questions are such that it is sure of its answer in any arithmetic."""
    consoles = "".join(fence.text for fence in fences("console"))
    shown = re.findall(r'^\$ trireme generate "(.+)" --chat\n(.+)$', consoles, re.MULTILINE)
    talks = re.findall(r"^> (.+\?)\n(.+)\n> (.+\?)\n(.+)$", consoles, re.MULTILINE)
    assert len(shown) == 3 and len(talks) == 2
    with LLM(str(smollm2_path), max_model_len=512) as llm:

        def answer(*said: str) -> str:
            turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
            return llm.chat(turns, SamplingParams(temperature=0.0, max_tokens=24))[0].text

        for question, expected in dict(shown).items():
            assert answer(question) == expected
        for question, expected, follow_up, second in set(talks):
            assert answer(question) == expected
            assert answer(question, expected, follow_up) == second
