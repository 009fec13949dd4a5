"""Whole models under use(): forward and backward equal to torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trireme import kernels
from trireme.kernels import chips

transformers = pytest.importorskip("transformers")
INTERPRETED = chips.current().interpreted


def llama() -> Any:
    hidden, inner, layers = (16, 24, 1) if INTERPRETED else (256, 688, 3)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")


def qwen() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=99, hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    return transformers.Qwen2ForCausalLM._from_config(config, attn_implementation="eager")


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM._from_config(config, attn_implementation="eager")


def compare(model: Any, device: str, tokens: torch.Tensor, rtol: float, atol: float) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        result = model(input_ids=tokens, labels=tokens)
        result.loss.backward()
        return (
            result.logits.detach(),
            result.loss.detach(),
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        )

    logits, loss, grads = run()
    with kernels.use():
        our_logits, our_loss, our_grads = run()
    torch.testing.assert_close(our_logits, logits, rtol=rtol, atol=atol)
    torch.testing.assert_close(our_loss, loss, rtol=rtol, atol=atol)
    assert our_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_a_tiny_llama(device: str) -> None:
    torch.manual_seed(3)
    model = llama().to(device)
    compare(model, device, torch.randint(0, 99, (1, 5), device=device), 1e-3, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [llama, qwen, bert])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models(build: Any, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(3)
    model = build().to(device=device, dtype=dtype)
    tolerance = (1e-3, 2e-4) if dtype is torch.float32 else (5e-2, 3e-2)
    compare(model, device, torch.randint(0, 99, (2, 77), device=device), *tolerance)
