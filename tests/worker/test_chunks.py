"""Layers that attend inside chunks of w tokens keep the last chunk alone: as a dense masked computation over the whole prompt."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest
import torch
from drive import Drive
from tiny_models import prompt
from torch import Tensor

from trireme.backends.reference import Reference
from trireme.errors import UnsupportedModel
from trireme.layers import Attention, Batch, Embedding, Env, Head, Module, Rope
from trireme.models import MODELS, ModelConfig
from trireme.models.config import read_config

CONFIG: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "architectures": ["ChunksForCausalLM"],
}  # fmt: skip
CHUNK = 12


class Chunked(Attention):
    """Sees nothing before the last multiple of CHUNK, and no positions."""

    def __init__(self, env: Env, cfg: ModelConfig, layer: int, chunk: int):
        super().__init__(env, cfg.hidden, cfg.heads, layer, Rope(env, cfg.heads.dim, cfg.rope, cfg.max_positions))
        self.kind = dataclasses.replace(self.kind, window=chunk, chunked=chunk > 0)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (-1, self.dim)) for part in self.qkv.split(x)]

    def __call__(self, x: Tensor, batch: Batch, only: Tensor | None = None, key: int | None = None) -> Tensor:
        q, k, v = (part.contiguous() for part in self.parts(x))
        cache = batch.caches[self.layer]
        view = batch.views[cache.band]
        self.env.ops.store_kv(k, v, cache, view.slots)
        return self.out(self.env.ops.attention(q, cache, view.plan, self.kind).flatten(1))


class Chunks(Module):
    def __init__(self, env: Env, cfg: ModelConfig):
        self.env = env
        self.embed = env.new(Embedding, cfg.vocab, cfg.hidden)
        self.layers = [Chunked(env, cfg, 0, CHUNK), Chunked(env, cfg, 1, 0)]
        self.head = env.new(Head, cfg.vocab, cfg.hidden, None)

    config = staticmethod(read_config)

    def __call__(self, batch: Batch) -> Tensor:
        x = self.embed(batch.tokens)
        for layer in self.layers:
            x = x + layer(x, batch)
        return self.head(self.env.keep(x, batch.logits_at))


@torch.inference_mode()
def dense(model: Chunks, tokens: list[int]) -> Tensor:
    """The logits of every position, each layer at once and without a cache."""
    x, at = model.embed(torch.tensor(tokens)), torch.arange(len(tokens))
    for layer in model.layers:
        q, k, v = (part.double() for part in layer.parts(x))
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.dim**-0.5
        seen = at[None] <= at[:, None]
        if layer.kind.chunked:
            seen = seen & (at[None] // CHUNK == at[:, None] // CHUNK)
        mixed = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v.transpose(0, 1)
        x = x + layer.out(mixed.transpose(0, 1).flatten(1).float())
    return model.head(x)


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setitem(MODELS, "ChunksForCausalLM", Chunks)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def opened(folder: pathlib.Path, **settings: Any) -> Drive:
    fixed = {"kv_tokens": 256, "max_model_len": 128, "dtype": "float32", "page_size": 4, "kv_windows": "on"}
    return Drive(folder, random_weights=True, **fixed | settings)


@pytest.mark.parametrize("page_size", [0, 1, 4, 16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_chunks_are_a_dense_masked_computation(folder: pathlib.Path, backend: str, page_size: int) -> None:
    drive = opened(folder, backend=backend, page_size=page_size, max_step_tokens=17, max_running=3, graphs=False)
    bands = drive.worker.ready.bands
    assert [(band.keep, band.chunked) for band in bands] == [(0, False), (CHUNK, True)][: 2 if page_size else 1]
    stem = prompt(50, 1)
    asked = {
        "a": stem,
        "b": prompt(23, 2),
        "c": prompt(1, 3),
        "again": stem[:41] + prompt(9, 4),
        "branch": stem[:41] + prompt(5, 5),
    }
    for name, tokens in asked.items():
        drive.add(name, tokens, max_tokens=30)
        drive.step()
    for name, run in drive.finish().items():
        whole = dense(drive.worker.model, asked[name] + run.tokens)
        assert len(run.logits) >= 30
        for position, logits in run.logits.items():
            assert torch.allclose(logits, whole[position], atol=1e-5), (name, position)


def test_finished_chunks_are_free(folder: pathlib.Path) -> None:
    drive = opened(folder, max_running=1, prefix_cache=False, full=False)
    drive.add("a", prompt(20, 1), max_tokens=60)
    (band,), held = drive.scheduler.memory.windows.bands, []
    while drive.scheduler.has_work():
        drive.step()
        held.append(int(band.held[0]))
    assert max(held[1:]) <= CHUNK // 4 + 1 and min(held[1:-1]) == 0  # at the end of a chunk none is needed
    assert len(band.pool) == band.size.num_pages


def test_several_answers_and_later_prompts_go_on_inside_a_chunk(folder: pathlib.Path) -> None:
    drive = opened(folder, backend="cpu", full=False, max_running=5)
    drive.add("many", prompt(31, 1), n=5, seed=1, max_tokens=9, temperature=1.0)
    runs = drive.finish()
    alone = opened(folder, backend="cpu", full=False, kv_windows="off", prefix_cache=False)
    for other in range(5):
        name = f"many/{other}" if other else "many"
        assert runs[name].tokens == alone.run(name, prompt(31, 1), max_tokens=9, temperature=1.0, seed=1 + other).tokens
    later = drive.run("later", prompt(31, 1) + runs["many"].tokens + prompt(4, 2), max_tokens=5)
    assert later.cached == 36
    assert later.tokens == alone.run("later", prompt(31, 1) + runs["many"].tokens + prompt(4, 2), max_tokens=5).tokens


def test_a_backend_without_chunks_refuses(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "chunked_windows", False)
    with pytest.raises(UnsupportedModel, match="begin anew"):
        opened(folder)
