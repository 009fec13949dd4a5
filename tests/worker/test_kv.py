"""Keys and values kept in eight bits: nearly the same answers from a quarter of the memory, recorded or not."""

from __future__ import annotations

import pathlib

import pytest

from trireme.backends import reason_against
from trireme.backends.reference import Reference
from trireme.errors import BadConfig
from trireme.llm import LLM
from trireme.types import Output, SamplingParams

TEXT = "The river rose in the night, and by morning the road to the village was under water. " * 3


def answer(path: pathlib.Path, **settings: object) -> tuple[Output, int]:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(path), kv_tokens=256, max_model_len=256, **settings) as llm:
        return llm.generate(TEXT, sampling)[0], llm.worker.ready.kv_bytes


def mean_error(plain: Output, small: Output) -> float:
    """Of the log-probabilities of the prompt's tokens."""
    assert plain.prompt_logprobs and small.prompt_logprobs
    pairs = zip(plain.prompt_logprobs, small.prompt_logprobs, strict=True)
    errors = [abs(a.logprob - b.logprob) for a, b in pairs if a is not None and b is not None]
    assert len(errors) > 50
    return sum(errors) / len(errors)


@pytest.mark.skipif(reason_against("cpu") is not None, reason=str(reason_against("cpu")))
def test_int8_is_near_and_small(smollm2_path: pathlib.Path) -> None:
    (plain, plain_bytes), (small, small_bytes) = (answer(smollm2_path, backend="cpu", kv_dtype=kv) for kv in ("auto", "int8"))
    assert small_bytes == plain_bytes * (64 + 4) / (64 * 4)  # SmolLM2 has heads of 64
    assert mean_error(plain, small) < 0.03
    unrecorded, _ = answer(smollm2_path, backend="cpu", kv_dtype="int8", graphs=False)
    assert unrecorded.token_ids == small.token_ids


def test_fp8_is_near_and_small(smollm2_path: pathlib.Path) -> None:
    (plain, plain_bytes), (small, small_bytes) = (answer(smollm2_path, backend="reference", kv_dtype=kv) for kv in ("auto", "fp8"))
    assert small_bytes == plain_bytes // 4
    assert 0 < mean_error(plain, small) < 0.15


def test_a_backend_without_int8_says_so(smollm2_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "kv_kinds", ("plain",))
    with pytest.raises(BadConfig, match="reference keeps no int8 KV"):
        LLM(str(smollm2_path), backend="reference", kv_dtype="int8")
