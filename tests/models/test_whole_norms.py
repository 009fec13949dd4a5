"""A norm over all query or key heads at once, as OLMo 2 has it: on one rank, and where ranks share the heads."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from torch import Tensor

from tests import tiny_models
from tests.drive import Drive, ThreadGroup
from trireme.backends import reason_against
from trireme.config import resolve
from trireme.layers import Attention, Batch, Env, HeadNormSpec, Module, Projections, RMSNorm, Rope
from trireme.models import MODELS, ModelConfig, register
from trireme.models.llama import Block, Llama

PROMPT = tiny_models.prompt(30, 4)


class Olmo2Block(Block):
    """Norms stand behind attention and feed-forward, not before them."""

    def __init__(self, env: Env, cfg: ModelConfig, layer: int, rope: Rope):
        super().__init__(env, cfg, layer, rope)
        del self.input_layernorm
        self.post_feedforward_layernorm = env.new(RMSNorm, cfg.hidden, cfg.eps)

    def attention(self, env: Env, cfg: ModelConfig, layer: int, rope: Rope) -> Module:
        made = Projections(norm=HeadNormSpec(cfg.eps, whole=True))
        return env.new(Attention, cfg.hidden, cfg.heads, layer, rope, projections=made)

    def __call__(self, x: Tensor, residual: Tensor | None, batch: Batch, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        mixed = self.self_attn(x, batch, only)
        x = self.env.keep(x, only) + self.post_attention_layernorm(mixed)[0]
        return self.post_feedforward_layernorm(self.mlp(x))[0], x


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.setitem(tiny_models.FAMILIES, "olmo2", ("Olmo2Config", {}))
    before = dict(MODELS)
    register("Olmo2ForCausalLM")(type("Olmo2", (Llama,), {"block": Olmo2Block}))
    yield tiny_models.save("olmo2", tmp_path / "olmo2")
    MODELS.clear()
    MODELS.update(before)


@pytest.mark.parametrize(("backend", "ranks"), [("reference", 1), ("cpu", 1), ("reference", 2), ("reference", 4)])
def test_every_rank_norms_as_one_does(backend: str, ranks: int, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := reason_against(backend):
        pytest.skip(f"{backend}: {reason}")
    settings = {"max_model_len": 64, "tp": ranks, "page_size": 4, "max_running": 8, "max_step_tokens": 13, "graphs": False}
    settings |= {"backend": backend, "dtype": "float32"}
    worker = ThreadGroup(resolve(settings, environ={}), folder, monkeypatch) if ranks > 1 else None
    run = Drive(folder, worker=worker, full=backend == "reference", **settings).run("a", PROMPT, max_tokens=6)
    if worker:
        worker.close()
    answer, logits = tiny_models.reference("olmo2", PROMPT, 6)
    assert run.tokens == answer
    assert max(float((run.logits[at] - logits[at]).abs().max()) for at in run.logits) <= 1e-4 * float(logits.abs().max())
