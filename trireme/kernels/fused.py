"""Steps of a transformer fused into one pass: gelu_and_mul, silu_and_mul, rotary_embedding, skip_layer_norm, skip_rms_norm.
Knows rows of tokens, never a model."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trireme.kernels import chips, scalar
from trireme.kernels.aten.calls.repeat import repeating
from trireme.kernels.aten.elementwise.pointwise import pointwise
from trireme.kernels.aten.rowwise import norms
from trireme.kernels.launch import blocks, empty, kernel, next_power


@pointwise()
def _silu_and_mul(x, y):
    return x / (1.0 + tl.exp(-x)) * y


@pointwise()
def _gelu_and_mul(x, y):
    return scalar.gelu(x) * y


@pointwise()
def _half_gelu_and_mul(x, y):
    return scalar.half_gelu(x) * y


@pointwise()
def _gelu_tanh_and_mul(x, y):
    return scalar.gelu_tanh(x) * y


def _halves(x: torch.Tensor, y: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if y is not None:
        return x, y
    width = x.shape[-1] // 2
    if x.shape[-1] != 2 * width:
        raise ValueError(f"a fused gate and value needs an even last dimension, not {x.shape[-1]}")
    return x[..., :width], x[..., width:]


@repeating
def _gated(x: torch.Tensor, y: torch.Tensor | None, kind: str) -> torch.Tensor:
    gate, value = _halves(x, y)
    if kind == "gelu" and gate.dtype == value.dtype and gate.dtype in (torch.float16, torch.bfloat16):
        kind = "half gelu"
    return _ACTIVATIONS[kind](gate, value)


_ACTIVATIONS = {
    "silu": _silu_and_mul,
    "gelu": _gelu_and_mul,
    "half gelu": _half_gelu_and_mul,
    "gelu tanh": _gelu_tanh_and_mul,
}


def silu_and_mul(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x) · y; with one tensor, x and y are the halves of its last dimension"""
    return _gated(x, y, "silu")


def gelu_and_mul(x: torch.Tensor, y: torch.Tensor | None = None, approximate: str = "none") -> torch.Tensor:
    """gelu(x) · y, exact or by tanh; with one tensor, x and y are the halves of its last dimension"""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is "none" or "tanh", not {approximate!r}')
    return _gated(x, y, "gelu" if approximate == "none" else "gelu tanh")


@triton.jit
def _turn(x, y, cosine, sine, first_head, heads, width, half, H: tl.constexpr, D: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotates H heads of one token and copies what lies past the rotary part."""
    head = (first_head + tl.arange(0, H))[:, None]
    pair = tl.arange(0, D)[None, :]
    mask = (head < heads) & (pair < half)
    left = head * width + (2 * pair if INTERLEAVED else pair)
    right = left + (1 if INTERLEAVED else half)
    a = tl.load(x + left, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + right, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + left, (a * cosine - b * sine).to(y.dtype.element_ty), mask=mask)
    tl.store(y + right, (b * cosine + a * sine).to(y.dtype.element_ty), mask=mask)
    for at in range(2 * half, width, D):
        beyond = head * width + at + pair
        rest = (head < heads) & (at + pair < width)
        tl.store(y + beyond, tl.load(x + beyond, mask=rest), mask=rest)


@kernel
def _rotary(
    q, k, q_out, k_out, cosines, sines, positions, q_heads, k_heads, width, half, length, table_stride, q_stride, k_stride,
    INTERLEAVED: tl.constexpr, H: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """(a, b) → (a cos − b sin, b cos + a sin) for every pair of every head of one token"""
    chips.begin(EARLY, OPEN=True)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = token % length
    if positions is not None:
        position = tl.load(positions + token).to(tl.int64)
    pair = tl.arange(0, D)
    cosine = tl.load(cosines + position * table_stride + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + position * table_stride + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    q_parts = tl.cdiv(q_heads, H)
    if part < q_parts:
        q_row = q_out + token * q_heads * width
        _turn(q + token * q_stride, q_row, cosine, sine, part * H, q_heads, width, half, H, D, INTERLEAVED)
    else:
        k_row = k_out + token * k_heads * width
        _turn(k + token * k_stride, k_row, cosine, sine, (part - q_parts) * H, k_heads, width, half, H, D, INTERLEAVED)


def rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q[…, tokens, heads, width] and k by tables cos, sin[positions, pairs]; where pairs < width / 2 the rest is copied.

    Pairs are (i, i + pairs), or neighbours if `interleaved`. Without `positions`, token t of a sequence takes row t.
    """
    return _rotate(q, k, cos, sin, positions, interleaved)


@repeating
def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    width, pairs = q.shape[-1], cos.shape[-1]
    if 2 * pairs > width:
        raise ValueError(f"tables of {pairs} pairs do not fit heads of width {width}")
    q_rows, k_rows = _tokens(q), _tokens(k)
    count = q_rows.shape[0]
    q_out, k_out = (empty(x.shape, x.dtype, x.device) for x in (q, k))
    if count == 0:
        return q_out, k_out
    q_heads, k_heads = q.shape[-2], k.shape[-2]
    d = next_power(pairs)
    few = count < chips.current().multiprocessors
    h = max(1, min(256 // d if few else 2048 // d, next_power(max(q_heads, k_heads))))
    grid = (count, blocks(q_heads, h) + blocks(k_heads, h))
    places = None if positions is None else positions.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    _rotary(grid, q_rows, k_rows, q_out, k_out, cos, sin, places, q_heads, k_heads, width, pairs, q.shape[-3], cos.stride(0),
            q_rows.stride(0), k_rows.stride(0), INTERLEAVED=interleaved, H=h, D=d, warps=4)  # fmt: skip
    return q_out, k_out


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads · width]; slices of a fused projection keep their own token stride."""
    if x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == x.shape[2]:
        return x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))
    return x.contiguous().view(-1, x.shape[-2] * x.shape[-1])


def skip_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x, in place; returns rms_norm(residual) · weight and the residual"""
    return _skip_rms(x, residual, weight, eps)


@repeating
def _skip_rms(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _require_contiguous(x, residual)
    length = x.shape[-1]
    weight = None if weight is None else weight.contiguous()
    y = norms.rms_rows(norms.as_rows(x, length), residual, weight, eps)
    return y.view(x.shape), residual


def skip_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x, in place; returns layer_norm(residual) · weight + bias and the residual"""
    return _skip_layer(x, residual, weight, bias, eps)


@repeating
def _skip_layer(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _require_contiguous(x, residual)
    y, _, _ = norms.layer_rows(x, residual, weight, bias, x.numel() // x.shape[-1], 1, 1, eps)
    return y, residual


def _require_contiguous(x: torch.Tensor, residual: torch.Tensor) -> None:
    if residual.shape != x.shape or not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous and shaped {tuple(x.shape)}: it is updated in place")
