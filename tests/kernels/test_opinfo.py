"""torch's own sample inputs for every operator of the library that has them."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference import tensors_of

from trireme import kernels
from trireme.kernels import chips

# torch's sample database imports this package only for its own tests.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase, assert_expected_inline=None))
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

INTERPRETED = chips.current().interpreted
BASES = {name.partition(".")[0] for name in kernels.OPERATORS}
RENAMED = {"linalg.vector_norm": "linalg_vector_norm", "nn.functional.cross_entropy": "cross_entropy_loss"}
RENAMED |= {f"nn.functional.{n}": n for n in ("gelu", "relu", "silu", "embedding", "rms_norm")}
RENAMED |= {"nn.functional.layer_norm": "native_layer_norm", "nn.functional.group_norm": "native_group_norm"}
RENAMED |= {"max": "max", "max.reduction_no_dim": "max", "var_mean": "var_mean"}
RANDOM = {"rand", "randn", "rand_like", "native_dropout"}
INFOS = [info for info in op_db if RENAMED.get(info.name, info.name) in BASES - RANDOM]
QUICK = {"add", "softmax", "amax", "linalg.vector_norm", "where", "clamp", "cumsum"}
SAMPLES = 12 if INTERPRETED else 60


def chosen() -> Iterator[Any]:
    for info in INFOS:
        marks = [] if info.name in QUICK else [pytest.mark.gpu]
        yield pytest.param(info, id=f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''}", marks=marks)


def run(info: Any, sample: Any, grad: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and, where asked, the gradient of their sum in the first input."""
    x = sample.input
    leaf = x.detach().clone().requires_grad_() if grad else x
    results = tensors_of(info(leaf, *sample.args, **sample.kwargs))
    differentiable = [r for r in results if r.requires_grad]
    if not (grad and differentiable):
        return [r.detach() for r in results], []
    gradients = torch.autograd.grad([r.float().sum() for r in differentiable], leaf, allow_unused=True)
    return [r.detach() for r in results], [g for g in gradients if g is not None]


@pytest.mark.parametrize("info", list(chosen()))
def test_samples(info: Any, device: str) -> None:
    kinds = [t for t in (torch.float32, torch.int64, torch.bool) if t in info.supported_dtypes(device)]
    for dtype in kinds[:1] if INTERPRETED else kinds:
        for index, sample in enumerate(info.sample_inputs(device, dtype, requires_grad=False)):
            if index >= SAMPLES:
                break
            grad = isinstance(sample.input, torch.Tensor) and dtype is torch.float32 and info.supports_autograd
            try:
                expected, expected_grads = run(info, sample, grad)
            except RuntimeError:
                continue  # torch itself refuses a few of its samples (sparse gradients scaled by frequency)
            with kernels.use():
                got, got_grads = run(info, sample, grad)
            assert len(got) == len(expected) and len(got_grads) == len(expected_grads)
            for mine, theirs in zip(got + got_grads, expected + expected_grads, strict=True):
                torch.testing.assert_close(
                    mine, theirs, rtol=2e-4, atol=2e-4, equal_nan=True, msg=lambda m, s=sample: f"{s}: {m}"[:2000]
                )


def anew(x: Any) -> Any:
    """The same arguments in other memory, and other numbers where any will do."""
    if isinstance(x, (list, tuple)):
        return type(x)(anew(part) for part in x)
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if min(x.stride(), default=1) > 0 else x.clone()
    return made.copy_(x * (0.5 + torch.rand(())) if x.is_floating_point() else x)


@pytest.mark.wide
@pytest.mark.parametrize("info", INFOS, ids=lambda info: f"{info.name}.{info.variant_test_name}")
def test_samples_again(info: Any, device: str) -> None:
    """What is remembered of a call, ours or torch's by way of ours, is right for the next ones."""
    dtype = next((t for t in (torch.float32, torch.int64) if t in info.supported_dtypes(device)), torch.complex64)
    for index, sample in enumerate(info.sample_inputs(device, dtype, requires_grad=False)):
        if index >= (3 if INTERPRETED else 20):
            break
        for _ in range(6):
            x, args, kwargs = anew(sample.input), anew(sample.args), {name: anew(value) for name, value in sample.kwargs.items()}
            with torch.no_grad():
                expected = tensors_of(info(x, *args, **kwargs))
                with kernels.use():
                    got = tensors_of(info(x, *args, **kwargs))
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4, equal_nan=True)
