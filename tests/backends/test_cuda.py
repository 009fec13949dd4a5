"""The CUDA backend on a GPU: whole models against the reference backend, graphs against eager steps, mixed loads, memory."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tokenizers
import torch

from trireme.bench.shapes import SHAPES, write_model
from trireme.config import Config
from trireme.llm import LLM
from trireme.types import SamplingParams
from trireme.worker.group import RankGroup, open_ranks
from trireme.worker.worker import LocalWorker

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny Llama with real, sharp weights: its greedy choices do not hang on the last bit."""
    folder = write_model("tiny", tmp_path_factory.mktemp("model"))
    torch.manual_seed(3)
    c = SHAPES["tiny"]
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    tensors = {"model.embed_tokens.weight": torch.randn(c["vocab_size"], hidden), "model.norm.weight": torch.ones(hidden)}
    for i in range(c["num_hidden_layers"]):
        shapes = {
            "q_proj": (4 * dim, hidden),
            "k_proj": (2 * dim, hidden),
            "v_proj": (2 * dim, hidden),
            "o_proj": (hidden, 4 * dim),
        }
        block = {f"self_attn.{name}": torch.randn(shape) * 0.1 for name, shape in shapes.items()}
        block |= {"mlp.gate_proj": torch.randn(inner, hidden) * 0.1, "mlp.up_proj": torch.randn(inner, hidden) * 0.1}
        block |= {"mlp.down_proj": torch.randn(hidden, inner) * 0.1}
        block |= {"input_layernorm": torch.ones(hidden), "post_attention_layernorm": torch.ones(hidden)}
        tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in block.items()}
    _write_safetensors(folder / "model.safetensors", tensors)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(c["vocab_size"])}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return folder


def _write_safetensors(path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    header, offset = {}, 0
    for name, value in tensors.items():
        size = value.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(value.contiguous().numpy().tobytes())


PROMPTS = [[(7 * i * j + i) % 1000 + 5 for j in range(n)] for i, n in enumerate((3, 40, 1, 130, 17, 300, 64))]


def answers(path: pathlib.Path, prompts: list[list[int]] = PROMPTS, sampling: SamplingParams = GREEDY, **settings: object) -> list:
    with LLM(str(path), **({"max_model_len": 1024, "kv_tokens": 8192} | settings)) as llm:
        return [output.token_ids for output in llm.generate(prompts, sampling)]


@pytest.fixture(scope="module")
def expected(model: pathlib.Path) -> list:
    return answers(model, backend="reference", dtype="float32")


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 0])
def test_greedy_tokens_are_the_references(model: pathlib.Path, expected: list, graphs: bool, page_size: int) -> None:
    found = answers(model, backend="cuda", dtype="float32", graphs=graphs, page_size=page_size)
    assert found == expected


def test_chunked_prompts_and_prefix_hits_change_nothing(model: pathlib.Path, expected: list) -> None:
    with LLM(str(model), backend="cuda", dtype="float32", max_model_len=1024, kv_tokens=8192, max_step_tokens=48) as llm:
        for _ in range(2):  # the second time every prompt but its last token is cached
            assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected


def test_bfloat16_follows_the_reference(model: pathlib.Path, expected: list) -> None:
    """Rounding may turn a close choice; most answers stay whole."""
    found = answers(model, backend="cuda", dtype="bfloat16")
    same = sum(a == b for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=True))
    assert same >= 0.7 * sum(map(len, expected)), same


def test_graphs_equal_eager_steps_in_bfloat16(model: pathlib.Path) -> None:
    assert answers(model, backend="cuda", graphs=True) == answers(model, backend="cuda", graphs=False)


def test_graphs_are_captured_again_after_all_were_dropped(model: pathlib.Path) -> None:
    """As when weights are loaded anew. Torch gives up a pool of memory with the last graph that was captured with it."""
    with LLM(str(model), backend="cuda", dtype="float32", max_model_len=1024, kv_tokens=8192) as llm:
        runner, found = llm.worker.runner, []
        for _ in range(2):
            found.append([o.token_ids for o in llm.generate(PROMPTS, GREEDY)])
            assert runner.graphs
            runner.forget()
    assert found[0] == found[1]


def test_keys_and_values_in_fp8(model: pathlib.Path, expected: list) -> None:
    """Half the memory for nearly the same answers, with graphs and without; prompts in pieces read what was kept."""
    found = [answers(model, backend="cuda", dtype="bfloat16", kv_dtype="fp8", graphs=graphs) for graphs in (True, False)]
    assert found[0] == found[1]
    firsts = [f[0] == e[0] for f, e in zip(found[0], expected, strict=True)]
    assert sum(firsts) >= len(firsts) - 1, "a first token hangs on one step alone"
    with LLM(str(model), backend="cuda", max_model_len=1024, kv_tokens=8192, kv_dtype="fp8", max_step_tokens=48) as llm:
        assert all(len(o.token_ids) == 24 for o in llm.generate(PROMPTS, GREEDY))
        small = llm.worker.ready.kv_bytes
    with LLM(str(model), backend="cuda", max_model_len=1024, kv_tokens=8192) as llm:
        assert llm.worker.ready.kv_bytes == 2 * small


def test_random_choices_are_the_references(model: pathlib.Path) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=11, max_tokens=16, ignore_eos=True)
    settings = {"prompts": PROMPTS[:4], "sampling": sampling, "dtype": "float32"}
    assert answers(model, backend="cuda", **settings) == answers(model, backend="reference", **settings)


def test_logprobs_are_the_references(model: pathlib.Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    found = []
    for backend in ("cuda", "reference"):
        with LLM(str(model), backend=backend, dtype="float32", max_model_len=256, kv_tokens=2048) as llm:
            found.append(llm.generate([PROMPTS[1]], sampling)[0])
    ours, theirs = (output.completions[0].logprobs for output in found)
    assert [t.token for t in ours] == [t.token for t in theirs]
    assert torch.allclose(torch.tensor([t.logprob for t in ours]), torch.tensor([t.logprob for t in theirs]), atol=1e-3)


def test_answers_are_read_while_steps_are_captured(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server: a thread of its own reads answers, log-probabilities too, while the next step's size is captured."""
    lengths = range(3, 63, 2)  # the batch shrinks through every size, with an answer due before each capture
    sampling = [SamplingParams(temperature=0.0, max_tokens=n, logprobs=3, ignore_eos=True) for n in lengths]
    prompts = [[(i * 31 + j * 7) % 1000 + 5 for j in range(9)] for i in lengths]
    found = []

    def in_a_process(config: Config, path: pathlib.Path, report: Any) -> Any:
        group: Any = open_ranks(config, path, report)
        group.runner = group
        return group

    for worker in (LocalWorker, in_a_process):
        monkeypatch.setattr("trireme.llm.LocalWorker", worker)
        with LLM(str(model), backend="cuda", dtype="float32", max_model_len=256, kv_tokens=4096) as llm:
            assert isinstance(llm.worker, RankGroup) == (worker is not LocalWorker)
            found.append([o.completions[0] for _ in range(2) for o in llm.generate(prompts, sampling)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.token_ids == theirs.token_ids
        pairs = [(a.logprob, b.logprob) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
        assert torch.allclose(*torch.tensor(pairs).T, atol=1e-3)


def test_many_rows_come_and_go(model: pathlib.Path) -> None:
    """More requests than rows, of all lengths: graphs of many sizes, padding, mixed steps; each answer as if it were alone."""
    prompts = [[(i * 31 + j * 7) % 1000 + 5 for j in range(1 + (i * 13) % 90)] for i in range(60)]
    sampling = [SamplingParams(temperature=0.0, max_tokens=3 + (i * 5) % 29, ignore_eos=True) for i in range(60)]
    settings = {"max_model_len": 256, "kv_tokens": 4096, "dtype": "float32"}
    with LLM(str(model), backend="cuda", max_running=24, **settings) as llm:
        together = [o.token_ids for o in llm.generate(prompts, sampling)]
    with LLM(str(model), backend="cuda", graphs=False, max_running=1, **settings) as llm:
        alone = [o.token_ids for o in llm.generate(prompts, sampling)]
    assert together == alone
