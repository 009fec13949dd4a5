"""Fused steps against their unfused formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import TOLERANCE

from trireme import kernels
from trireme.kernels import chips

INTERPRETED = chips.current().interpreted
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(got: torch.Tensor, exact: torch.Tensor, factor: float = 2.0) -> None:
    tolerance = TOLERANCE[got.dtype] * factor
    torch.testing.assert_close(got.double(), exact.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TYPES)
def test_gated_activations(dtype: torch.dtype, device: str) -> None:
    for shape in [(5, 12), (2, 3, 8)] if INTERPRETED else [(5, 12), (1, 28672), (256, 28672), (33, 2002)]:
        x = torch.randn(shape, device=device).to(dtype)
        gate, value = x.double().chunk(2, -1)
        close(kernels.silu_and_mul(x), F.silu(gate) * value)
        close(kernels.gelu_and_mul(x), F.gelu(gate) * value)
        close(kernels.gelu_and_mul(x, approximate="tanh"), F.gelu(gate, approximate="tanh") * value)
        close(kernels.silu_and_mul(x, x), F.silu(x.double()) * x.double())


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    x, pairs = x.double(), cos.shape[-1]
    cos, sin, result = cos.double()[:, None], sin.double()[:, None], x.clone()
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_rotary_embedding(dtype: torch.dtype, interleaved: bool, device: str) -> None:
    cases = [(7, 4, 2, 10, 4), (3, 2, 2, 8, 4)] + (
        [] if INTERPRETED else [(1, 32, 8, 128, 64), (300, 14, 2, 64, 32), (256, 32, 8, 128, 64)]
    )
    for tokens, q_heads, k_heads, width, pairs in cases:
        fused = torch.randn(tokens, (q_heads + k_heads) * width, device=device).to(dtype)
        q = fused[:, : q_heads * width].unflatten(1, (q_heads, width))
        k = fused[:, q_heads * width :].unflatten(1, (k_heads, width))
        cos, sin = torch.randn(2, 512, pairs, device=device)
        places = torch.randint(0, 512, (tokens,), device=device)
        for mine, x in zip(kernels.rotary_embedding(q, k, cos, sin, places, interleaved), (q, k), strict=True):
            close(mine, rotated(x, cos[places], sin[places], interleaved))
        batched = kernels.rotary_embedding(q[None], k[None], cos, sin, None, interleaved)[0][0]
        close(batched, rotated(q, cos[:tokens], sin[:tokens], interleaved))


@pytest.mark.parametrize("dtype", TYPES)
def test_skip_norms(dtype: torch.dtype, device: str) -> None:
    factor = 4.0
    for shape in [(4, 20), (2, 17000)] if INTERPRETED else [(4, 20), (256, 4096), (3, 40000), (8192, 4096)]:
        x, before = torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype)
        w, b = torch.randn(2, shape[-1], device=device).to(dtype)
        residual = before.clone()
        y, same = kernels.skip_rms_norm(x, residual, w, 1e-5)
        assert same is residual
        close(residual, x.double() + before.double(), factor)
        close(y, F.rms_norm(residual.double(), shape[-1:], w.double(), 1e-5), factor)
        residual = before.clone()
        y, _ = kernels.skip_layer_norm(x, residual, w, b, 1e-5)
        close(residual, x.double() + before.double(), factor)
        close(y, F.layer_norm(residual.double(), shape[-1:], w.double(), b.double(), 1e-5), factor)
