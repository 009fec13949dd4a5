"""A model whose tokens see those after them, and that keeps nothing: prompts are computed whole, and none is found in a cache."""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

import pytest
import torch
from drive import Drive
from torch import Tensor

from trireme.errors import BadRequest
from trireme.layers import Batch, Embedding, Env, Head, Module
from trireme.models import MODELS, ModelConfig
from trireme.models.config import read_config

CONFIG: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "architectures": ["BothWaysForCausalLM"],
}  # fmt: skip
LENGTHS = (20, 3, 11, 24, 1, 24, 9)
PROMPTS = [torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


class BothWays(Module):
    """Each token attends to its whole sequence."""

    whole_prompts = True

    def __init__(self, env: Env, cfg: ModelConfig):
        self.env = env
        self.embed, self.head = env.new(Embedding, cfg.vocab, cfg.hidden), env.new(Head, cfg.vocab, cfg.hidden, None)

    config = staticmethod(read_config)

    def mixed(self, x: Tensor) -> Tensor:
        return x + torch.softmax(4 * x @ x.T, -1) @ x

    def __call__(self, batch: Batch) -> Tensor:
        x, begins = self.embed(batch.tokens), batch.views[0].layout.query_starts.tolist()
        for begin, end in itertools.pairwise(begins):
            x[begin:end] = self.mixed(x[begin:end])
        return self.head(self.env.keep(x, batch.logits_at))


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setitem(MODELS, "BothWaysForCausalLM", BothWays)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("page_size", [0, 4])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_prompt_is_computed_whole_and_anew(folder: pathlib.Path, backend: str, page_size: int) -> None:
    drive = Drive(folder, backend=backend, random_weights=True, dtype="float32", page_size=page_size, max_step_tokens=24)
    ready, model = drive.worker.ready, drive.worker.model
    assert (ready.num_pages, ready.kv_bytes, ready.whole_prompts) == (0, 0, True)
    for number, tokens in enumerate([*PROMPTS, *PROMPTS]):
        drive.add(f"{number}", tokens, max_tokens=0)
    runs = drive.finish()
    for number, tokens in enumerate([*PROMPTS, *PROMPTS]):
        run = runs[f"{number}"]
        expected = model.head(model.mixed(model.embed(torch.tensor(tokens, dtype=torch.int32))))
        found = torch.stack([run.logits[at] for at in range(len(tokens))])
        torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)
        assert run.cached == 0 and not run.tokens
    with pytest.raises(BadRequest, match="one step"):
        drive.add("long", [1] * 25, max_tokens=0)
    with pytest.raises(BadRequest, match="writes nothing"):
        drive.add("talks", [1], max_tokens=1)
