"""Other people's clients, in an environment of their own (CLIENTS_PYTHON, or .venv-clients), against the real server."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from api.conftest import served  # noqa: F401
from api.served import KEYS, Served

from trireme.llm import LLM
from trireme.types import SamplingParams

HERE = pathlib.Path(__file__).parent
PYTHON = os.environ.get("CLIENTS_PYTHON", str(HERE.parents[1] / ".venv-clients" / "bin" / "python"))
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not pathlib.Path(PYTHON).exists(), reason=f"no {PYTHON}: `make test-clients` sets it up"),
]


def drive(name: str, server: Served) -> str:
    command = [PYTHON, str(HERE / f"drive_{name}.py"), server.url, KEYS[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["langchain", "llama_index", "ollama", "litellm", "instructor", "pydantic_ai", "huggingface"])
def test_client(name: str, served: Served) -> None:  # noqa: F811
    """Each also leaves a stream of 2,000 tokens at its first: the server notices, by its own count."""
    before = num_left(served)
    drive(name, served)
    assert num_left(served) > before


def num_left(server: Served) -> float:
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "request_aborted_total" in line and 'cause="disconnect"' in line)


def test_lm_eval_scores_what_the_offline_engine_does(served: Served) -> None:  # noqa: F811
    told = json.loads(drive("lm_eval", served).splitlines()[-1])
    with LLM("smollm2") as llm:
        texts = ["The capital of France is Paris", "The capital of France is Berlin"]
        outputs = llm.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    for (logprob, greedy), output, is_paris in zip(told["scored"], outputs, (True, False), strict=True):
        entry = (output.prompt_logprobs or [])[5]
        assert entry is not None and logprob == pytest.approx(entry.logprob, abs=1e-3)
        assert greedy == is_paris == (entry.rank == 1)
    assert told["text"] == " Paris"
