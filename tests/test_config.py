"""Settings: where they come from, which wins, and what is refused."""

import pathlib
import re

import pytest

from trireme.config import OTHER_VARIABLES, Config, number, resolve, settings
from trireme.errors import BadConfig


def test_defaults_without_any_source() -> None:
    assert resolve({}, environ={}) == Config()


def test_flags_win_over_variables_over_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "trireme.toml"
    file.write_text("[schedule]\nmax_running = 1\nmax_step_tokens = 11\nmax_waiting = 111\n")
    environ = {"TRIREME_MAX_STEP_TOKENS": "22", "TRIREME_MAX_WAITING": "222"}
    config = resolve({"max_waiting": "333"}, environ=environ, file=file)
    assert (config.schedule.max_running, config.schedule.max_step_tokens, config.schedule.max_waiting) == (1, 22, 333)


def test_file_named_by_variable(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\ndtype = "float32"\n')
    assert resolve({}, environ={"TRIREME_CONFIG": str(tmp_path / "a.toml")}).model.dtype == "float32"


@pytest.mark.parametrize(
    ("flags", "environ", "text", "word"),
    [
        ({"no_such": 1}, {}, "", "no_such"),
        ({}, {"TRIREME_PAGESIZE": "4"}, "", "page_size"),  # the nearest real name is offered
        ({}, {}, "[cache]\npage_sise = 4\n", "page_size"),
        ({}, {}, "[nonsense]\na = 1\n", "nonsense"),
        ({}, {}, "this is not toml", "not TOML"),
        ({"tp": "many"}, {}, "", "tp"),
        ({"tp": 1.5}, {}, "", "tp"),
        ({"tp": True}, {}, "", "tp"),
        ({"dtype": "int3"}, {}, "", "bfloat16"),
        ({"prefix_cache": "perhaps"}, {}, "", "prefix_cache"),
        ({"max_running": 0}, {}, "", "max_running"),
        ({"memory_fraction": 1.5}, {}, "", "memory_fraction"),
    ],
)
def test_refuses_in_one_line(flags: dict, environ: dict, text: str, word: str, tmp_path: pathlib.Path) -> None:
    file = None
    if text:
        file = tmp_path / "bad.toml"
        file.write_text(text)
    with pytest.raises(BadConfig) as caught:
        resolve(flags, environ=environ, file=file)
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file() -> None:
    with pytest.raises(BadConfig, match="Cannot read"):
        resolve({}, environ={}, file="/nonexistent/trireme.toml")


@pytest.mark.parametrize(("text", "value"), [("12", 12), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2M", 2**21)])
def test_numbers_as_people_write_them(text: str, value: int) -> None:
    assert number(text) == value


def test_every_setting_has_its_own_name_and_help() -> None:
    for name, (_, field) in settings().items():
        assert field.metadata["help"], name


def test_every_variable_that_is_named_anywhere_is_taken() -> None:
    """A page that recommends a variable, or code that reads one, must not make every command refuse to start."""
    root = pathlib.Path(__file__).parents[1]
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".service", ""}
    files = [path for place in ("trireme", "docs", "deploy") for path in (root / place).rglob("*") if path.suffix in kinds]
    texts = {path: path.read_text() for path in [*files, root / "Makefile", root / "README.md"] if path.is_file()}
    named = {name for text in texts.values() for name in re.findall(r"\bTRIREME_[A-Z][A-Z_]*[A-Z]\b", text)}
    assert {"TRIREME_TUNE", "TRIREME_CACHE"} <= named
    named.remove("TRIREME_PAGE_SISE")  # the quickstart shows what a wrong name is told
    assert not {name for name in named if name.removeprefix("TRIREME_").lower() not in settings()} - OTHER_VARIABLES
    code = "".join(text for path, text in texts.items() if path.suffix == ".py" and path.name != "config.py")
    own = (root / "trireme" / "config.py").read_text()
    unread = {name for name in OTHER_VARIABLES if name not in code and own.count(name) < 2}
    assert not unread, f"nothing reads {unread}"
