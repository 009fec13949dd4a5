"""`bench quality`: perplexity is that of transformers, and agreement counts what it says."""

from __future__ import annotations

import math
import pathlib

import pytest
import tiny_models
import torch

from tests.quant.test_made import joined
from trireme.backends import reason_against
from trireme.backends.cpu.methods import METHODS as CPU_METHODS
from trireme.backends.cpu.ops import CpuOps
from trireme.bench.plain_cpu import PlainCpu
from trireme.bench.quality import Beside, _Reading, perplexity, read
from trireme.hub.weights import map_file, weight_from_bytes
from trireme.llm import LLM
from trireme.ops import Ops
from trireme.types import TokenLogprobs


def test_perplexity_is_that_of_transformers(tmp_path: pathlib.Path) -> None:
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


def test_plain_forms_keep_the_packed_values(tmp_path: pathlib.Path) -> None:
    """The plain form rounds as the kernels do: a product differs by the last bit of some bfloat16 at most."""
    if reason_against("cpu"):
        pytest.skip(str(reason_against("cpu")))
    values = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    (tmp_path / "m").write_bytes(values.numpy().tobytes())
    stored = weight_from_bytes("m", "F32", (48, 96), map_file(tmp_path / "m"))
    for method in ("none", "int8", "int4", "mxfp4", "fp8"):
        options = [stored], None, torch.float32, torch.device("cpu")
        kept, plain = CPU_METHODS[method].load(*options), PlainCpu.methods[method].load(*options)
        for rows in (3, 40):
            x = torch.randn(rows, 96)
            got, wanted = kept.linear(CpuOps(), x), plain.linear(Ops(), x)
            assert (got - wanted).norm() <= (1e-5 if rows < 16 else 3e-3) * wanted.norm(), (method, rows)


def test_the_plain_form_of_columns_in_an_order() -> None:
    if reason_against("cpu"):
        pytest.skip(str(reason_against("cpu")))
    matrix, _ = joined("gptqmodel-4-bit-in-an-order")
    kept, plain = (
        methods["auto"].load([matrix], None, torch.float32, torch.device("cpu")) for methods in (CPU_METHODS, PlainCpu.methods)
    )
    x = torch.randn(3, matrix.shape[1])
    got, wanted = kept.linear(CpuOps(), x), plain.linear(Ops(), x)
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()


def test_beside_is_a_share_with_its_error() -> None:
    mine, other = ([TokenLogprobs(7, value, 1, []) for value in values] for values in ((-1.0, -2.0), (-1.0, -1.0)))
    found = Beside.of(mine, other)
    assert found.more == pytest.approx(math.exp(0.5) - 1) and found.error == pytest.approx(0.5 / math.sqrt(2))


def test_agreement_counts_places_and_common_beginnings() -> None:
    first = reading([1, 2, 3, 4], [[5, 6, 7], [1, 1, 1]])
    quality = reading([1, 2, 0, 4], [[5, 6, 0], [0, 1, 1]]).beside(first)
    assert quality.agreement == quality.agreement_few == 0.75
    assert quality.greedy_tokens == 1.0  # two of the first, none of the second
    assert quality.perplexity == pytest.approx(math.e)
    assert first.beside(first).greedy_tokens == 3.0
