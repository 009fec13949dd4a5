"""Real checkpoints: the reference tokens, and transformers on the same dequantised weights, token by token and logit by logit."""

from __future__ import annotations

import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from drive import Drive, Run
from torch import Tensor

from trireme.backends import reason_against
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.resolve import resolve_model
from trireme.hub.tokenizer import Tokenizer
from trireme.quant import decode

FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"
FRANCE_GOES_ON = [
    7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33, 34, 42, 37, 35, 30, 2,
]  # fmt: skip
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]
SETTINGS: dict[str, Any] = {"max_model_len": 512, "kv_tokens": 1024}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: pathlib.Path) -> Iterator[Drive]:
    yield Drive(smollm2_path, **SETTINGS)
    gc.collect()


def test_reference_tokens(smollm2: Drive) -> None:
    run = smollm2.run("plain", FRANCE, eos=[2], max_tokens=40)
    assert run.tokens == FRANCE_GOES_ON


def test_reference_chat(smollm2: Drive, smollm2_path: pathlib.Path) -> None:
    tokenizer = Tokenizer.open(smollm2_path)
    tokens = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    run = smollm2.run("chat", tokens, eos=[2], max_tokens=40)
    assert run.tokens == ANSWER
    assert tokenizer.decode(run.tokens) == "The capital of France is Paris."


def test_smollm2_is_what_transformers_computes(smollm2: Drive, smollm2_path: pathlib.Path) -> None:
    run = smollm2.run("again", [9, *FRANCE], max_tokens=12)  # another first token: nothing of it is cached
    compare(run, *transformers_says(smollm2_path, [9, *FRANCE], 12))


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_reference_tokens_on_other_backends(backend: str, smollm2_path: pathlib.Path) -> None:
    reason = reason_against(backend)
    if reason:
        pytest.skip(f"{backend}: {reason}")
    drive = Drive(smollm2_path, full=False, backend=backend, dtype="float32", quantize="none", **SETTINGS)
    assert drive.run("plain", FRANCE, eos=[2], max_tokens=40).tokens == FRANCE_GOES_ON
    kept = Drive(smollm2_path, full=False, backend=backend, **SETTINGS)  # as the backend would have it: fast, and near
    assert kept.run("plain", FRANCE, eos=[2], max_tokens=5).tokens == FRANCE_GOES_ON[:5]


@pytest.mark.gpu
def test_bfloat16_is_as_near_as_the_reference_in_it(smollm2_path: pathlib.Path) -> None:
    """Over the text that float32 writes, no further from float32 than plain torch in bfloat16; where the best token is another one,
    float32's two best lie near each other."""
    reason = reason_against("cuda")
    if reason:
        pytest.skip(f"cuda: {reason}")
    tokens = [*FRANCE, *FRANCE_GOES_ON]
    exact = _likelihoods(Drive(smollm2_path, **SETTINGS).run("text", tokens, max_tokens=1))
    errors = {}
    for backend in ("reference", "cuda"):
        drive = Drive(smollm2_path, backend=backend, dtype="bfloat16", quantize="none", **SETTINGS)
        found = _likelihoods(drive.run("text", tokens, max_tokens=1))
        errors[backend] = float((found - exact).gather(1, torch.tensor([*tokens[1:], 0])[:, None])[:-1].abs().mean())
        elsewhere = found.argmax(-1) != exact.argmax(-1)
        best = exact[elsewhere].topk(2).values
        print(f"{backend}: mean error {errors[backend]:.4f}, another best token at {int(elsewhere.sum())} of {len(tokens)}")
        assert elsewhere.sum() <= 3 and (best[:, 0] - best[:, 1] < 0.2).all()
    assert errors["cuda"] <= 1.2 * errors["reference"]


def _likelihoods(run: Run) -> Tensor:
    return torch.stack([run.logits[at].float().cpu() for at in sorted(run.logits)]).log_softmax(-1)


def test_int8_keeps_the_first_tokens(smollm2_path: pathlib.Path) -> None:
    drive = Drive(smollm2_path, quantize="int8", **SETTINGS)
    run = drive.run("plain", FRANCE, eos=[2], max_tokens=8)
    assert run.tokens == FRANCE_GOES_ON[:8]
    assert drive.worker.ready.weight_bytes < 0.3 * 4 * 134.6e6  # a quarter of float32, and the scales


# --- against transformers ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def transformers_says(path: pathlib.Path, tokens: list[int], num_new: int) -> tuple[list[int], Tensor]:
    """Greedy continuation and the logits behind it, by transformers on the weights as our decoder gives them."""
    checkpoint = Checkpoint.open(path)
    config = transformers.AutoConfig.for_model(**{"dtype": "float32", **checkpoint.config})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {name: decode(checkpoint.weight(name), torch.float32) for name in checkpoint.names()}
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    problems = model.load_state_dict(weights, assign=True, strict=False)
    assert not problems.missing_keys and not problems.unexpected_keys
    _make_buffers(model, config)
    out = model.eval().generate(torch.tensor([tokens]), max_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0)
    logits = model(out[:, :-1]).logits[0].clone()
    return out[0, len(tokens) :].tolist(), logits


def _make_buffers(model: Any, config: Any) -> None:
    """What no checkpoint holds (rope frequencies, embedding scales), computed anew: it was made without memory."""
    inner = type(model.model)
    for name, module in list(model.model.named_modules()):
        if "rotary" in name:
            model.model.set_submodule(name, type(module)(config))
    for _, module in model.model.named_modules():
        scale = getattr(module, "scalar_embed_scale", None)
        if scale is not None:
            module.register_buffer("embed_scale", torch.tensor(scale), persistent=False)
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not left, f"{inner.__name__} has buffers without values: {left}"


def compare(run: Run, answer: list[int], logits: Tensor, tolerance: float = 1e-4) -> None:
    assert run.tokens == answer
    scale = float(logits.abs().max())
    assert max(float((run.logits[at] - logits[at]).abs().max()) for at in run.logits) <= tolerance * scale


REAL = {
    "stories15m": "Once upon a time, a little girl named Lily",
    "gemma-3-270m": "The capital of France is",
    "tinyllama": "<|user|>\nWhat is the capital of France?</s>\n<|assistant|>\n",
    "qwen2.5-coder-1.5b": "def fibonacci(n: int) -> int:\n",
}


@pytest.mark.models
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str) -> None:
    path = resolve_model(name)
    tokens = Tokenizer.open(path).encode(REAL[name])
    answer, logits = transformers_says(path, tokens, 16)
    gc.collect()
    for settings in ({"page_size": 16}, {"page_size": 1, "max_step_tokens": 3}):
        drive = Drive(path, max_model_len=128, kv_tokens=128, max_running=1, **settings)
        compare(drive.run("a", tokens, max_tokens=16), answer, logits)
        del drive
        gc.collect()
    print(repr(Tokenizer.open(path).decode(answer)))
