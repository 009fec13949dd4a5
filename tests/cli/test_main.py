"""The command line as a user meets it: quick help, one-line errors with their own exit codes, real answers."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from trireme import __version__
from trireme.bench.flags import FLAGS
from trireme.cli import serve
from trireme.cli.bench import KINDS
from trireme.cli.main import COMMANDS
from trireme.command.flags import config_from
from trireme.command.parser import Parser
from trireme.config import resolve


def trireme(*args: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trireme", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(command, capture_output=True, text=True, input=stdin, env=env, timeout=180)


def test_help_names_every_command_and_loads_no_torch() -> None:
    code = "import sys; from trireme.cli.main import main; main(['--help'])"
    check = f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit:\n    pass\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0 and all(name in done.stdout for name in COMMANDS)


def test_the_version_is_the_packages() -> None:
    assert trireme("--version").stdout == f"trireme {__version__}\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_without_torch(name: str) -> None:
    check = (
        "import sys\nfrom trireme.cli.main import main\n"
        f"try:\n    main([{name!r}, '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: trireme" in done.stdout


def test_every_benchmark_has_help_without_what_it_measures() -> None:
    """One process asks them all: only the flags may be imported for it."""
    check = (
        "import sys\nfrom trireme.cli.main import main\nfrom trireme.cli.bench import KINDS\n"
        "for kind in KINDS:\n"
        "    try:\n        main(['bench', kind, '--help'])\n    except SystemExit as end:\n        assert not end.code\n"
        "    for heavy in ('torch', 'triton', 'numpy', 'tokenizers', 'rich', 'trireme.llm'):\n"
        "        assert heavy not in sys.modules, (kind, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: trireme bench {kind}" in done.stdout for kind in KINDS)


def test_every_benchmark_has_flags_and_a_module_that_runs_it() -> None:
    """The modules are found by name, only when a kind is run: one process imports them all."""
    check = "from trireme.cli.bench import KINDS, module_of\nassert all(callable(module_of(kind).run) for kind in KINDS)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(FLAGS) == list(KINDS)


@pytest.mark.parametrize(
    ("args", "code", "word"),
    [
        (("generate", "x", "--model", "no-such-model"), 4, "no-such-model"),
        (("generate", "x", "--model", "/nowhere/model.gguf"), 4, "/nowhere/model.gguf"),
        (("generate", "x", "--tp", "0"), 3, "tp"),
        (("generate", "x", "--config", "/nowhere.toml"), 3, "/nowhere.toml"),
        (("pull", "no-such-model"), 4, "no-such-model"),
        (("generate", "x", "--backend", "abacus"), 11, "abacus"),
        (("generate", "x", "--temperature", "nan"), 2, "temperature"),
        (("generate", "x", "--kv-tokens", "1000000000000"), 9, "--kv-tokens"),
    ],
)
def test_errors_are_one_line_with_their_own_code(args: tuple[str, ...], code: int, word: str, smollm2_path: pathlib.Path) -> None:
    done = trireme(*args)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("trireme: ") and word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("generate x --kvdtype int8", "trireme generate: Unrecognized arguments: --kvdtype int8. Fix: did you mean --kv-dtype?"),
        (
            "generate x --kv-dtype int9",
            "trireme generate: Argument --kv-dtype: there is no 'int9'. Fix: use one of: auto, plain, int8, fp8, int4",
        ),
        ("generate", "trireme generate: The following arguments are required: prompt. Fix: see `trireme generate --help`"),
        ("serv", "trireme: Argument COMMAND: there is no 'serv'. Fix: did you mean serve?"),
        ("bench kernls", "trireme bench: Argument KIND: there is no 'kernls'. Fix: did you mean kernels?"),
        ("bench latency --bath 2", "trireme bench latency: Unrecognized arguments: --bath 2. Fix: did you mean --batch?"),
        ("serve --port 65536", "trireme: port is 65536; the largest is 65535. Fix: give a smaller one, or 0 for any that is free"),
        (
            "serve --port abc",
            "trireme: port is 'abc', which is not a whole number. Fix: give a whole number: port to listen at (0: any free one)",
        ),
    ],
)
def test_mistyped_flags_are_one_line_with_what_was_meant(args: str, line: str) -> None:
    done = trireme(*args.split())
    assert (done.stdout, done.stderr) == ("", line + "\n") and done.returncode in (2, 3)


@pytest.mark.parametrize("args", [["kernels"], ["bench", "kernels"]])
def test_without_triton_there_is_a_line(args: list[str]) -> None:
    code = f"import sys; sys.modules['triton'] = None; from trireme.cli.main import main; sys.exit(main({args}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith(f"trireme: `trireme {' '.join(args)}` needs Triton")
    assert done.stderr.count("\n") == 1


def test_help_shows_choices_and_no_empty_defaults() -> None:
    told = trireme("serve", "--help").stdout
    assert "{auto,float32,bfloat16,float16}" in told and "{text,json}" in told and "()" not in told
    assert "Serve a model over HTTP: OpenAI, Anthropic and other APIs" in told, "names keep their capitals"


def test_the_help_of_benchmarks_shows_defaults() -> None:
    told = trireme("bench", "latency", "--help").stdout
    assert "so many [3]" in told and "together [1]" in told and "each prompt [128]" in told
    assert "[None]" not in told and "[False]" not in told.partition("model:")[0]
    lists = trireme("bench", "serve", "--help").stdout
    assert "0: no bound [0]" in " ".join(lists.split()) and "[[" not in lists and "[]" not in lists


def test_options_may_be_repeated_or_separated_by_commas() -> None:
    parser = Parser(prog="serve")
    serve.add_arguments(parser)
    repeated, names = ["--api-key", "a", "--api-key", "b,c"], ["--served-model-name", "x", "--served-model-name", "y"]
    config = config_from(parser.parse_args([*repeated, *names]))
    assert config.serve.api_key == ("a", "b", "c") and config.serve.served_model_name == ("x", "y")
    assert resolve({}, environ={"TRIREME_API_KEY": "a,b"}).serve.api_key == ("a", "b")


def test_unknown_variable_is_refused() -> None:
    done = trireme("generate", "x", TRIREME_PAGE_SISE="3")
    assert done.returncode == 3 and "page_size" in done.stderr


def test_truncated_model_is_one_line(tmp_path: pathlib.Path, smollm2_path: pathlib.Path) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_path.open("rb") as whole:
        cut.write_bytes(whole.read(5_000_000))
    done = trireme("generate", "x", "--model", str(cut))
    assert done.returncode == 5 and done.stderr.count("\n") == 1 and "cut.gguf" in done.stderr


@pytest.mark.xdist_group("smollm2")
def test_generate_streams_and_prints_json(smollm2_path: pathlib.Path) -> None:
    settings = ("--quantize", "none", "--dtype", "float32", "--max-model-len", "256", "--max-tokens", "6")
    assert trireme("generate", "The capital of France is", *settings).stdout == " Paris.\n\nThe answer\n"
    answer = json.loads(trireme("generate", "-", "--json", *settings, stdin="The capital of France is").stdout)
    assert answer["completions"][0]["token_ids"] == [7042, 30, 198, 198, 504, 2988]


@pytest.mark.xdist_group("smollm2")
def test_a_chat_with_commands(smollm2_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    saved = tmp_path / "talk.json"
    lines = [
        "What is the capital of France? Answer in one sentence.",
        "/stats",
        "/set temperature 9999",
        "/set nonsense 1",
        "/nonsense",
        f"/save {saved}",
        "/load /nowhere",
        "/exit",
    ]
    settings = ("--quantize", "none", "--dtype", "float32", "--max-model-len", "512", "--temperature", "0")
    done = trireme("chat", *settings, stdin="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout and "8 tokens" in done.stdout
    assert "temperature is 9999" in done.stdout and "/nonsense is no command" in done.stdout and "/load" in done.stdout
    assert [m["role"] for m in json.loads(saved.read_text())] == ["user", "assistant"]


def test_models_and_doctor_say_what_is_here() -> None:
    assert "smollm2 (default)" in trireme("models").stdout
    told = trireme("doctor").stdout
    assert "would choose" in told and "backend reference" in told and "can run here" in told


def test_broken_pipe_is_quiet() -> None:
    process = subprocess.Popen([sys.executable, "-m", "trireme.cli.main", "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
