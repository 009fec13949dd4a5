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


needs_cpu = pytest.mark.skipif(reason_against("cpu") is not None, reason=str(reason_against("cpu")))


@pytest.mark.wide
@needs_cpu
def test_int8_is_near_and_small(smollm2_path: pathlib.Path) -> None:
    """Measured 0.016 to 0.018; 0.038 with scales 2 % off, 0.033 with bytes cut off instead of rounded, 0.042 with 7 bits.

    The weights are floats: with the file's own, activations are rounded to 8 bits before each product (but for prompts on CPUs
    that multiply bf16), and there any change at all, of one part in 10^7 or of 8-bit KV, moves log-probabilities by 0.04 to 0.05.
    """
    results = (answer(smollm2_path, backend="cpu", quantize="none", kv_dtype=kv) for kv in ("auto", "int8"))
    (plain, plain_bytes), (small, small_bytes) = results
    assert small_bytes == plain_bytes * (64 + 4) / (64 * 4)  # SmolLM2 has heads of 64
    assert 0 < mean_error(plain, small) < 0.03


@needs_cpu
def test_int8_is_the_same_recorded_or_not(smollm2_path: pathlib.Path) -> None:
    """With the file's own weights, as it is used."""
    recorded, unrecorded = (answer(smollm2_path, backend="cpu", kv_dtype="int8", graphs=on)[0] for on in (True, False))
    assert recorded.token_ids == unrecorded.token_ids


@pytest.mark.wide
def test_fp8_is_near_and_small(smollm2_path: pathlib.Path) -> None:
    (plain, plain_bytes), (small, small_bytes) = (answer(smollm2_path, backend="reference", kv_dtype=kv) for kv in ("auto", "fp8"))
    assert small_bytes == plain_bytes // 4
    assert 0 < mean_error(plain, small) < 0.15


def test_a_backend_without_int8_says_so(smollm2_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "kv_kinds", ("plain",))
    with pytest.raises(BadConfig, match="reference keeps no int8 KV"):
        LLM(str(smollm2_path), backend="reference", kv_dtype="int8")
