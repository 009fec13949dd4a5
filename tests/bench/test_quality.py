"""`bench quality`: perplexity is that of transformers, and agreement counts what it says."""

from __future__ import annotations

import math
import pathlib

import pytest
import tiny_models
import torch

from trireme.bench.quality import _Reading, perplexity, read
from trireme.llm import LLM
from trireme.types import TokenLogprobs


def test_perplexity_is_that_of_transformers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.llm._tokenizer", lambda path, config: None)
    windows = [tiny_models.prompt(40, 1), tiny_models.prompt(23, 2)]
    losses = []
    for window in windows:
        logits = tiny_models.reference("llama2", window, 1)[1]
        chosen = torch.tensor(window[1:]).unsqueeze(1)
        losses.append(-logits[: len(window) - 1].log_softmax(-1).gather(1, chosen).squeeze(1))
    expected = math.exp(float(torch.cat(losses).mean()))
    path = str(tiny_models.save("llama2", tmp_path))
    for step_tokens in (2048, 8):
        with LLM(path, backend="reference", max_step_tokens=step_tokens, prefix_cache=False) as llm:
            tokens = read(llm, windows)
        assert len(tokens) == 61
        assert perplexity(tokens) == pytest.approx(expected, rel=1e-4)


def reading(likeliest: list[int], continuations: list[list[int]]) -> _Reading:
    tokens = [TokenLogprobs(7, -1.0, 1, [(token, -0.5)]) for token in likeliest]
    return _Reading("int8", "auto", 10, tokens, tokens, continuations)


def test_agreement_counts_places_and_common_beginnings() -> None:
    first = reading([1, 2, 3, 4], [[5, 6, 7], [1, 1, 1]])
    quality = reading([1, 2, 0, 4], [[5, 6, 0], [0, 1, 1]]).beside(first)
    assert quality.agreement == quality.agreement_few == 0.75
    assert quality.greedy_tokens == 1.0  # two of the first, none of the second
    assert quality.perplexity == pytest.approx(math.e)
    assert first.beside(first).greedy_tokens == 3.0
