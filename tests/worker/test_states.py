"""A recurrent state beside windows and full attention: kept at points, shared by forks, gone on from by later prompts."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from drive import Drive
from tiny_models import prompt
from torch import Tensor

from trireme.layers import Attention, Batch, Embedding, Env, Head, Module, RMSNorm, Rope
from trireme.models import MODELS, ModelConfig
from trireme.models.config import read_config
from trireme.ops import StateSpec

CONFIG: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "architectures": ["HybridForCausalLM"],
}  # fmt: skip
WINDOW = 9


class Gated(Module):
    """h[t] = gate(x[t]) * h[t - 1] + x[t], token by token."""

    def __init__(self, hidden: int):
        self.hidden = hidden

    def cache_specs(self) -> dict[int, StateSpec]:
        return {1: StateSpec({"h": ((self.hidden,), torch.float64)})}

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        states, layout = batch.caches[1], batch.views[0].layout
        before, begins = states.before("h", layout), layout.query_starts.tolist()
        out, after = x.double(), []
        for h, begin, end in zip(before, begins, begins[1:], strict=False):
            for at in range(begin, end):
                h = torch.sigmoid(4 * out[at]) * h + out[at]
                out[at] = h
            after.append(h)
        states.keep("h", layout, torch.stack(after))
        return out.to(x.dtype)


class Hybrid(Module):
    """Layer 0 sees a window, layer 1 keeps a state, layer 2 sees everything."""

    def __init__(self, env: Env, cfg: ModelConfig):
        rope = Rope(env, cfg.heads.dim, cfg.rope, cfg.max_positions)
        self.env = env
        self.embed, self.norm = env.new(Embedding, cfg.vocab, cfg.hidden), env.new(RMSNorm, cfg.hidden, cfg.eps)
        self.near = env.new(Attention, cfg.hidden, cfg.heads, 0, rope, window=WINDOW)
        self.gated = Gated(cfg.hidden)
        self.far = env.new(Attention, cfg.hidden, cfg.heads, 2, rope)
        self.head = env.new(Head, cfg.vocab, cfg.hidden, None)

    config = staticmethod(read_config)

    def __call__(self, batch: Batch) -> Tensor:
        x = self.embed(batch.tokens)
        x = x + self.near(x, batch)
        x = x + self.gated(x, batch)
        x = x + self.far(x, batch)
        return self.head(self.env.keep(self.norm(x, None)[0], batch.logits_at))


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setitem(MODELS, "HybridForCausalLM", Hybrid)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def opened(folder: pathlib.Path, **settings: Any) -> Drive:
    fixed = {"kv_tokens": 512, "dtype": "float32", "page_size": 4, "graphs": False, "full": False}
    return Drive(folder, random_weights=True, **fixed | settings)


def alone(folder: pathlib.Path, tokens: list[int], seed: int, max_tokens: int, **settings: Any) -> list[int]:
    """The answer of a worker that does nothing else and keeps all tokens."""
    drive = opened(folder, prefix_cache=False, kv_windows="off", max_running=1, **settings)
    return drive.run("alone", tokens, max_tokens=max_tokens, temperature=1.0, seed=seed).tokens


@pytest.mark.parametrize("windows", ["on", "off"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_prefix_is_resumed_at_a_kept_state(folder: pathlib.Path, backend: str, windows: str) -> None:
    settings = {"backend": backend, "kv_windows": windows}
    drive = opened(folder, checkpoint_tokens=16, max_running=3, **settings)
    stem = prompt(50, 1)
    hits = []
    for seed, tokens in enumerate(
        [stem, stem + prompt(20, 2), stem[:33], stem[:40] + prompt(9, 3), stem[:40] + prompt(9, 4), stem[:7]]
    ):
        run = drive.run(f"{seed}", tokens, max_tokens=5, temperature=1.0, seed=seed)
        assert run.tokens == alone(folder, tokens, seed, 5, backend=backend), seed
        hits.append(run.cached)
    # At 48 the first prompt has its last whole page, and states at 16 and 32; the fourth leaves one at 40, where it branches off.
    assert hits == [0, 48, 32, 32, 40, 0]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [0, 1, 4])
@pytest.mark.parametrize("backend, rows", [pytest.param("reference", 2, marks=pytest.mark.wide), ("cpu", 6)])
def test_forks_go_on_from_one_state(folder: pathlib.Path, backend: str, rows: int, page_size: int, prefix_cache: bool) -> None:
    settings: dict[str, Any] = {"backend": backend, "page_size": page_size, "max_model_len": 128, "kv_tokens": 1024}
    drive = opened(folder, kv_windows="on", max_running=rows, prefix_cache=prefix_cache, **settings)
    drive.add("many", prompt(22, 1), n=5, seed=3, max_tokens=6, temperature=1.0)
    drive.add("other", prompt(9, 2), n=2, seed=4, max_tokens=6, temperature=1.0)
    steps = drive.finish()
    assert drive.scheduler.stats().tokens_scheduled == 22 + 4 + 5 * 5 + 9 + 1 + 2 * 5, "a prompt was computed twice"
    for name, tokens, seed in (("many", prompt(22, 1), 3), ("other", prompt(9, 2), 4)):
        for other in range(5 if name == "many" else 2):
            run = steps[f"{name}/{other}" if other else name]
            assert run.tokens == alone(folder, tokens, seed + other, 6, **settings), (name, other)


def test_a_pause_goes_on_from_the_newest_state(folder: pathlib.Path) -> None:
    """Kept in long answers, too: at most the distance between two states is computed again."""
    tight = opened(folder, kv_tokens=136, max_model_len=100, checkpoint_tokens=8, policy="aggressive", max_running=3)
    asked = [(prompt(30, 1), 24), (prompt(25, 2), 24), (prompt(20, 3), 40)]
    for i, (tokens, most) in enumerate(asked):
        tight.add(f"{i}", tokens, max_tokens=most, temperature=1.0, seed=i)
    runs, stats = tight.finish(), tight.scheduler.stats()
    for i, (tokens, most) in enumerate(asked):
        assert runs[f"{i}"].tokens == alone(folder, tokens, i, most), i
    assert stats.preemptions == 1
    anew = stats.tokens_scheduled - sum(len(tokens) + most - 1 for tokens, most in asked)
    assert anew <= 8 + 12, "the paused row lost more than the distance of two states and three pages that others took"
