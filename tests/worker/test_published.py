"""Whole models in published quantized formats answer as the same values stored plainly, on every backend and number of ranks."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
import transformers
from drive import Drive, Run, ThreadGroup
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quant.packers import FORMATS
from trireme.config import resolve
from trireme.worker.inspect import inspect_model, show_model
from trireme.worker.worker import LocalWorker

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 64, 192, 6, 3, 32, 131
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "vocab_size": VOCAB,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
# formats that differ in how they are found, cut or read; blocks of gpt-oss have other names, and hold experts
SOME = [
    "gptq 4 bit with zeros, version 1", "gptq in an order", "awq", "words 4 with zeros", "int8 by row", "fp8 blocks",
    "nvfp4 of modelopt", "mxfp4", "nf4", "bitsandbytes int8",
]  # fmt: skip
PROMPT = [3, 17, 99, 5, 64, 120, 7]


def write(folder: pathlib.Path, name: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Two folders of one model: in a format, and with the values that it means."""
    random = torch.Generator().manual_seed(5)
    plain = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random)}
    plain["lm_head.weight"] = torch.randn(VOCAB, HIDDEN, generator=random) / 8
    packed = dict(plain)
    norms = ["model.norm", *(f"model.layers.{n}.{norm}_layernorm" for n in range(2) for norm in ("input", "post_attention"))]
    packed |= {f"{norm}.weight": torch.ones(HIDDEN) for norm in norms}
    plain = dict(packed)
    for layer in range(2):
        for part, (rows, columns) in SHAPES.items():
            tensors, values = FORMATS[name][0](rows, columns)
            base = f"model.layers.{layer}.{part}"
            packed |= {base + end: tensor for end, tensor in tensors.items()}
            plain[f"{base}.weight"] = values
    return save(folder / "packed", packed), save(folder / "plain", plain)


def save(folder: pathlib.Path, tensors: dict[str, Tensor]) -> pathlib.Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def answer(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Run:
    settings = {"backend": "reference", "max_model_len": 32, "kv_tokens": 64, "page_size": 4} | settings
    if settings.get("tp", 1) == 1:
        return Drive(folder, **settings).run("a", PROMPT)
    with monkeypatch.context() as patched:
        group = ThreadGroup(resolve(settings, environ={}), folder, patched)
        try:
            return Drive(folder, worker=group, **settings).run("a", PROMPT)
        finally:
            group.close()


@pytest.mark.parametrize("name", SOME)
def test_a_format_answers_as_its_values_do(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, plain = write(tmp_path, name)
    wanted = answer(plain, monkeypatch)
    got = answer(packed, monkeypatch)
    assert got.tokens == wanted.tokens
    for place, logits in wanted.logits.items():
        assert torch.equal(got.logits[place], logits)
    for ranks in (2, 3):
        shared = answer(packed, monkeypatch, tp=ranks)
        assert shared.tokens == wanted.tokens
        for place, logits in wanted.logits.items():
            torch.testing.assert_close(shared.logits[place], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SOME)
def test_a_format_on_the_cpu(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are kept or packed; activations are rounded to eight bits where the weights are whole numbers."""
    packed, plain = write(tmp_path, name)
    wanted, got = answer(plain, monkeypatch), answer(packed, monkeypatch, backend="cpu", pack_cache="off")
    for place in range(len(PROMPT)):
        far = (got.logits[place] - wanted.logits[place]).abs().max() / wanted.logits[place].abs().max()
        assert far < 0.05, (place, far)


@pytest.mark.parametrize("name", SOME)
def test_a_format_answers_as_transformers_does_with_its_values(name: str, tmp_path: pathlib.Path) -> None:
    packed, plain = write(tmp_path, name)
    run = Drive(packed, backend="reference", max_model_len=32, kv_tokens=64).run("a", PROMPT)
    config = transformers.LlamaConfig(**CONFIG | {"num_attention_heads": 2, "num_key_value_heads": 1})
    config.num_attention_heads, config.num_key_value_heads = HEADS, KV_HEADS  # it would refuse heads that are wider than the model
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(load_file(plain / "model.safetensors"))
    with torch.no_grad():
        (wanted,) = model(torch.tensor([PROMPT + run.tokens[:-1]])).logits
    assert len(wanted) == len(PROMPT) + len(run.tokens) - 1
    assert wanted[len(PROMPT) - 1 :].argmax(-1).tolist() == run.tokens
    for place, logits in enumerate(wanted):
        torch.testing.assert_close(run.logits[place], logits, rtol=2e-4, atol=2e-4)


def test_what_a_model_holds_is_said(tmp_path: pathlib.Path) -> None:
    packed, _ = write(tmp_path, "gptq in an order")
    config = resolve({"backend": "cpu", "pack_cache": "off", "max_model_len": 32, "kv_tokens": 64}, environ={})
    shown = dict(show_model(config, packed))
    assert shown["holds"] == "159 KB, GPTQ 4 bit, groups of 32, act order; F32"
    assert shown["runs"] == "packed as q4_min, packed as f32 on cpu"
    worker = LocalWorker(config, packed)
    assert worker.ready.weights.startswith(shown["holds"]) and "packed as q4_min (" in worker.ready.weights
    assert dict(inspect_model(config, packed))["understood"]


@pytest.mark.parametrize("name", ["fp8 given", "int8 given", "nvfp4 of modelopt"])
def test_scales_of_activations_are_said_to_be_unused(name: str, tmp_path: pathlib.Path) -> None:
    packed, _ = write(tmp_path, name)
    config = resolve({"backend": "reference", "max_model_len": 32, "kv_tokens": 64}, environ={})
    worker = LocalWorker(config, packed)
    assert "with scales of activations (not used: each token gets its own)" in worker.ready.weights
    assert "dense, no kernel takes its" in worker.ready.weights


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:auto_awq"])
def test_files_of_autoround(packing: str, backend: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are packed as GPTQ's without an order, or as AWQ's. Layers may have more bits, or be left as they were."""
    packed, plain = write(tmp_path, "gptq 4 bit")
    tensors, values = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".g_idx")]:
        del tensors[name]
    for part, form in {"k_proj": "gptq 8 bit", "v_proj": "", "o_proj": "awq" if "awq" in packing else "gptq version 2"}.items():
        base = f"model.layers.1.self_attn.{part}"
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(base)}
        if form:
            made, values[f"{base}.weight"] = FORMATS[form][0](*SHAPES[f"self_attn.{part}"])
            tensors |= {base + end: tensor for end, tensor in made.items() if end != ".g_idx"}
        else:
            tensors[f"{base}.weight"] = values[f"{base}.weight"]
    save_file(tensors, packed / "model.safetensors")
    save_file(values, plain / "model.safetensors")
    settings = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": True}
    (packed / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": settings}))
    wanted, got = answer(plain, monkeypatch), answer(packed, monkeypatch, backend=backend, pack_cache="off")
    for place in range(len(PROMPT)):
        far = (got.logits[place] - wanted.logits[place]).abs().max() / wanted.logits[place].abs().max()
        assert far < (0.05 if backend == "cpu" else 1e-6), (place, far)
