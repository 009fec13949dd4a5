"""What layers keep: by keys of their own choosing, for each token or for each sequence, and nobody else's."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from drive import Drive
from tiny_models import prompt
from torch import Tensor

from trireme.errors import OutOfMemory
from trireme.ipc.messages import ONE_STATE
from trireme.layers import Attention, Batch, Embedding, Env, Head, Module, RMSNorm, Rope
from trireme.models import MODELS, ModelConfig, cache_specs
from trireme.models.config import read_config
from trireme.ops import CacheSpec, KVCache, Ops, StateSpec
from trireme.ops.attention import AttentionKind
from trireme.ops.cases import Draw

CONFIG: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


class Borrowing(Attention):
    """Attends to what another layer keeps."""

    def cache_specs(self) -> dict[int, CacheSpec]:
        return {}

    def __call__(self, x: Tensor, batch: Batch, only: Tensor | None = None, key: int | None = None) -> Tensor:
        q, _, _ = (part.unflatten(-1, (-1, self.dim)) for part in self.qkv.split(x))
        cache = batch.caches[self.layer]
        view = batch.views[cache.band]
        q = self.env.ops.rope(q.clone(), *self.rope.at(batch))
        return self.out(self.env.ops.attention(q, cache, view.plan, self.kind).flatten(1))


class Twice(Attention):
    """One module at two depths, with a cache for each."""

    def cache_specs(self) -> dict[int, CacheSpec]:
        (spec,) = super().cache_specs().values()
        return {2: spec, 5: spec}


class Keys(Module):
    """Layers 0 and 4 keep nothing, 2 and 5 are one module with two caches, 3 reads what 2 has kept."""

    def __init__(self, env: Env, cfg: ModelConfig):
        rope = Rope(env, cfg.heads.dim, cfg.rope, cfg.max_positions)
        self.env = env
        self.embed = env.new(Embedding, cfg.vocab, cfg.hidden)
        self.norm = env.new(RMSNorm, cfg.hidden, cfg.eps)
        self.twice, self.borrows = Twice(env, cfg.hidden, cfg.heads, 2, rope), Borrowing(env, cfg.hidden, cfg.heads, 2, rope)
        self.head = env.new(Head, cfg.vocab, cfg.hidden, None)

    config = staticmethod(read_config)

    def __call__(self, batch: Batch) -> Tensor:
        x = self.embed(batch.tokens)
        x = x + self.twice(x, batch, key=2)
        x = x + self.borrows(x, batch)
        x = x + self.twice(x, batch, key=5)
        return self.head(self.env.keep(self.norm(x, None)[0], batch.logits_at))


class Sums(Module):
    """The running sum of a sequence's embeddings."""

    def __init__(self, env: Env, cfg: ModelConfig):
        self.env, self.hidden = env, cfg.hidden
        self.embed = env.new(Embedding, cfg.vocab, cfg.hidden)
        self.head = env.new(Head, cfg.vocab, cfg.hidden, None)

    config = staticmethod(read_config)

    def cache_specs(self) -> dict[int, StateSpec]:
        return {7: StateSpec({"sum": ((self.hidden,), torch.float64)})}

    def __call__(self, batch: Batch) -> Tensor:
        states, layout = batch.caches[7], batch.views[0].layout
        x = self.embed(batch.tokens).double()
        ends = layout.query_starts.long()
        owner = torch.searchsorted(ends[1:].contiguous(), torch.arange(len(x)), right=True)
        whole = torch.cat([torch.zeros(1, self.hidden).double(), x.cumsum(0)])
        before = states.before("sum", layout)
        states.keep("sum", layout, before + whole[ends[1:]] - whole[ends[:-1]])
        owner = owner.clamp_max(len(before) - 1)  # padding belongs to nobody
        sums = before[owner] + whole[1:] - whole[ends[owner]]
        return self.head(self.env.keep(sums.float(), batch.logits_at))


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setitem(MODELS, "KeysForCausalLM", Keys)
    monkeypatch.setitem(MODELS, "SumsForCausalLM", Sums)
    return tmp_path


def opened(folder: pathlib.Path, model: str, **settings: Any) -> Drive:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": [f"{model}ForCausalLM"]}))
    return Drive(folder, random_weights=True, **{"kv_tokens": 256, "dtype": "float32", "page_size": 4} | settings)


PROMPTS = [prompt(23, 1), prompt(9, 2), prompt(1, 3)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_cache_is_found_by_its_key(folder: pathlib.Path, backend: str) -> None:
    whole = opened(folder, "Keys", backend=backend, full=False)
    assert list(cache_specs(whole.worker.model)) == [2, 5]
    cut = opened(folder, "Keys", backend=backend, full=False, max_step_tokens=5)
    alone = [whole.run(f"{i}", tokens, max_tokens=12).tokens for i, tokens in enumerate(PROMPTS)]
    for i, tokens in enumerate(PROMPTS):
        cut.add(f"{i}", tokens, max_tokens=12)
    assert [run.tokens for run in cut.finish().values()] == alone
    # Both caches are written, each with what its own depth brings.
    assert not torch.equal(whole.worker.runner.caches[2].k, whole.worker.runner.caches[5].k)


def test_keys_that_do_not_agree_are_refused(folder: pathlib.Path) -> None:
    drive = opened(folder, "Keys")
    drive.worker.model.other = Attention.__new__(Attention)
    drive.worker.model.other.cache_specs = lambda: {5: CacheSpec((1, 8), (1, 8))}
    with pytest.raises(AssertionError, match=r"other asks for .* under 5"):
        cache_specs(drive.worker.model)


@pytest.mark.parametrize("backend, graphs", [("reference", False), ("cpu", False), ("cpu", True)])
def test_a_state_is_its_sequences_own(folder: pathlib.Path, backend: str, graphs: bool) -> None:
    """Rows change hands in every order; each sequence has the sum of its own tokens, however its prompt was cut."""
    drive = opened(folder, "Sums", backend=backend, graphs=graphs, full=False, max_running=2, max_step_tokens=6)
    weight = drive.worker.model.embed
    for i, tokens in enumerate([*PROMPTS, *PROMPTS]):
        drive.add(f"{i}", tokens, max_tokens=3 + i % 3)
    for i, run in enumerate(drive.finish().values()):
        tokens = [*PROMPTS, *PROMPTS][i]
        for token in run.tokens:
            total = weight(torch.tensor(tokens)).double().sum(0, keepdim=True)
            assert token == int(drive.worker.model.head(total.float()).argmax()), (i, len(tokens))
            tokens = [*tokens, token]


def test_a_pause_begins_the_state_anew(folder: pathlib.Path) -> None:
    free, tight = (
        opened(folder, "Sums", full=False, kv_tokens=slots, max_model_len=64, policy="aggressive") for slots in (256, 64)
    )
    for drive in (free, tight):
        for i in range(3):
            drive.add(f"{i}", prompt(6, i), max_tokens=40)
    assert [run.tokens for run in tight.finish().values()] == [run.tokens for run in free.finish().values()]
    assert tight.scheduler.stats().preemptions > 0


def test_states_take_memory_of_every_row(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = opened(folder, "Sums", max_running=3, checkpoint_tokens=64)
    kept = 256 // 64 + 2 * 3
    assert [(band.keep, band.num_pages) for band in small.worker.ready.bands[1:]] == [(ONE_STATE, kept)]
    assert small.worker.ready.kv_bytes == (2 * 4 + kept) * CONFIG["hidden_size"] * 8
    monkeypatch.setattr(type(small.worker.backend), "kv_budget", lambda self, fraction: 100 * CONFIG["hidden_size"] * 8)
    tight = opened(folder, "Sums", max_running=9)
    assert tight.worker.ready.bands[1].num_pages == (100 - 20) // 10
    none = opened(folder, "Sums", max_running=45)
    assert none.worker.ready.bands[1].num_pages == 0 and not none.worker.ready.shares_prefixes
    with pytest.raises(OutOfMemory):
        opened(folder, "Sums", max_running=100)


def test_values_may_be_part_of_keys() -> None:
    """As for latent attention: one head of keys, of which the first numbers are the values."""
    d, ops = Draw(0, torch.float32), Ops()
    layout = d.layout([(0, 5), (11, 1)], 4)
    spec = CacheSpec((1, 24), (1, 16), shared=True)
    assert spec.bytes_per_token(torch.float32) == 24 * 4
    slots = d.num_slots(layout)
    one = KVCache.allocate(spec, slots, torch.float32, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    two = KVCache.allocate(CacheSpec((1, 24), (1, 16)), slots, torch.float32, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    k = d.normal(slots, 1, 24)
    for cache in (one, two):
        ops.store_kv(k, k[..., :16], cache, d.int32(range(slots)))
    q, kind = d.normal(6, 4, 24), AttentionKind(24**-0.5)
    a, b = (ops.attention(q, cache, ops.plan_attention(layout), kind) for cache in (one, two))
    assert a.shape == (6, 4, 16)
    assert torch.equal(a, b)
