"""loss = −log softmax(x)[target]: cross entropy over class indices, with its gradient.
Knows rows of logits; probabilities as targets stay torch's."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trireme.kernels import chips
from trireme.kernels.aten.calls import originals
from trireme.kernels.aten.folds import reduce
from trireme.kernels.aten.rowwise import softmax
from trireme.kernels.aten.rowwise.norms import row_warps
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power, setting

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NONE, _MEAN = 0, 1  # of the reductions; the third adds up
_MANY = 1 << 16  # losses that one program does not add up alone


@triton.jit
def _of_target(row, lse, target, weight, classes, ignored, smoothing):
    """What the target's class adds to the loss of a row (or of several), its share, and whether it is a class at all"""
    valid = (target != ignored) & (target >= 0) & (target < classes)
    share = tl.where(valid, 1.0, 0.0)
    if weight is not None:
        share = tl.load(weight + target, mask=valid, other=0.0).to(tl.float32)
    chosen = tl.load(row + target, mask=valid, other=0.0).to(tl.float32)
    return share * (lse - chosen) * (1.0 - smoothing), share, valid


@kernel
def _forward(
    x, targets, weight, losses, shares, logs, rows, classes, ignored, smoothing,
    SMOOTHED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """loss = (1 − s) w_t (lse − x_t) + s / C Σ w_c (lse − x_c); shares = w_t; logs = lse = log Σ exp x; of M rows, N classes at
    once, of which each lane keeps a running maximum and sum"""
    chips.begin(EARLY, OPEN=False)
    row = tl.program_id(0) * M + tl.arange(0, M)
    base = x + row.to(tl.int64) * classes
    top = tl.full((M, N), float("-inf"), tl.float32)
    total = tl.zeros((M, N), tl.float32)
    weighted = tl.zeros((M, N), tl.float32)
    weights = tl.zeros((M, N), tl.float32)
    for at in range(0, classes, N):
        column = (at + tl.arange(0, N))[None, :]
        mask = (row < rows)[:, None] & (column < classes)
        value = tl.load(base[:, None] + column, mask=mask, other=float("-inf")).to(tl.float32)
        top, total = softmax.risen(top, total, value)
        if SMOOTHED:
            w = tl.where(mask, 1.0, 0.0)
            if weight is not None:
                w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
            weights += w
            weighted += tl.where(mask, w * value, 0.0)
    peak = tl.max(top, 1)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    lse = peak + tl.log(tl.sum(tl.where(top == float("-inf"), 0.0, total * tl.exp(top - finite[:, None])), 1))
    target = tl.load(targets + row, mask=row < rows, other=-1)
    loss, share, valid = _of_target(base, lse, target, weight, classes, ignored, smoothing)
    if SMOOTHED:
        loss += smoothing / classes * (lse * tl.sum(weights, 1) - tl.sum(weighted, 1))
    tl.store(losses + row, tl.where(valid & (row < rows), loss, 0.0).to(losses.dtype.element_ty), mask=row < rows)
    tl.store(shares + row, share, mask=row < rows)
    tl.store(logs + row, lse, mask=row < rows)


@kernel
def _total(losses, shares, out, rows, MEAN: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr):
    """out = Σ losses, or Σ losses / Σ shares, by one program"""
    chips.begin(EARLY, OPEN=False)
    total = tl.zeros((N,), tl.float32)
    weights = tl.zeros((N,), tl.float32)
    for at in range(0, rows, N):
        row = at + tl.arange(0, N)
        total += tl.load(losses + row, mask=row < rows, other=0.0)
        if MEAN:
            weights += tl.load(shares + row, mask=row < rows, other=0.0)
    result = tl.sum(total, 0)
    if MEAN:
        result = result / tl.sum(weights, 0)
    tl.store(out, result.to(out.dtype.element_ty))


@kernel
def _gradient(
    x, targets, weight, grads, logs, dx, rows, classes, ignored, smoothing, weight_total, grad_step,
    M: tl.constexpr, N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """dx_c = g ((1 − s) w_t (p_c − [c = t]) + s / C (p_c Σ w − w_c)) with p = exp(x − lse)"""
    chips.begin(EARLY, OPEN=False)
    row = tl.program_id(0) * M + tl.arange(0, M)
    target = tl.load(targets + row, mask=row < rows, other=-1)
    valid = (row < rows) & (target != ignored) & (target >= 0) & (target < classes)
    grad = tl.where(valid, tl.load(grads + row * grad_step, mask=row < rows, other=0.0), 0.0)[:, None]
    lse = tl.load(logs + row, mask=row < rows, other=0.0)[:, None]
    share = tl.full((M, 1), 1.0, tl.float32)
    if weight is not None:
        share = tl.load(weight + target, mask=valid, other=0.0).to(tl.float32)[:, None]
    base = (row.to(tl.int64) * classes)[:, None]
    for at in range(0, classes, N):
        column = (at + tl.arange(0, N))[None, :]
        mask = (row < rows)[:, None] & (column < classes)
        p = tl.exp(tl.load(x + base + column, mask=mask, other=float("-inf")).to(tl.float32) - lse)
        w = tl.where(mask, 1.0, 0.0)
        if weight is not None:
            w = tl.load(weight + column, mask=column < classes, other=0.0).to(tl.float32)
        total = (1.0 - smoothing) * share * (p - tl.where(column == target[:, None], 1.0, 0.0))
        total += smoothing / classes * (p * weight_total - w)
        tl.store(dx + base + column, tl.where(valid[:, None], grad * total, 0.0).to(dx.dtype.element_ty), mask=mask)


def _rows(x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits as [rows, classes] and targets as [rows]."""
    if x.dim() == 1:
        return x.contiguous().view(1, -1), target.reshape(1)
    return x.movedim(1, -1).reshape(-1, x.shape[1]).contiguous(), target.reshape(-1).contiguous()


def _block(classes: int) -> int:
    return min(next_power(classes), 4096)


def _together(rows: int, n: int) -> int:
    """How many rows of so many columns one program takes: short ones together, since only so many programs begin in a microsecond
    ."""
    return max(1, min(2048 // n, next_power(rows)))


def _evaluate(
    x: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor | None, ignored: int, smoothing: float, reduction: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, classes = x.shape
    losses = empty((rows,), x.dtype if reduction == _NONE else torch.float32, x.device)
    shares, logs = empty((2, rows), torch.float32, x.device)
    n = _block(classes)
    m = _together(rows, n)
    _forward((blocks(rows, m),), x, targets, weight, losses, shares, logs, rows, classes, ignored, float(smoothing),
             SMOOTHED=smoothing > 0, M=m, N=n, warps=row_warps(m * n))  # fmt: skip
    return losses, shares, logs


def _finish(losses: torch.Tensor, shares: torch.Tensor, shape: torch.Size, reduction: int, dtype: torch.dtype) -> torch.Tensor:
    if reduction == _NONE:
        return losses.view(shape)
    if losses.numel() > _MANY:
        losses, shares = (reduce.sum_dim(x).view(1) for x in (losses, shares))
    out = empty((), dtype, losses.device)
    n = _block(losses.numel())
    _total((1,), losses, shares, out, losses.numel(), MEAN=reduction == _MEAN, N=n, warps=row_warps(n))
    return out


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignored: int, smoothing: float
    ) -> torch.Tensor:
        flat, targets = _rows(x, target)
        losses, shares, logs = _evaluate(flat, targets, weight, ignored, smoothing, reduction)
        ctx.save_for_backward(x, target, flat, targets, weight, shares, logs)
        ctx.settings = (reduction, ignored, smoothing)
        return _finish(losses, shares, target.shape, reduction, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, target, flat, targets, weight, shares, logs = ctx.saved_tensors
        shape, (reduction, ignored, smoothing) = x.shape, ctx.settings
        if torch.is_grad_enabled():  # to be derived once more
            define = originals.overload_of("cross_entropy_loss").decompose
            (again,) = originals.derived_again(lambda: define(x, target, weight, *ctx.settings), [x], grad)
            return again, None, None, None, None, None
        rows, classes = flat.shape
        grads = grad.float().reshape(-1).contiguous()  # the gradient of a sum comes as one number, expanded
        if reduction == _MEAN:
            grads = grads / reduce.sum_dim(shares)
        dx = torch.empty_like(flat)
        weight_total = float(classes) if weight is None or smoothing == 0 else float(weight.sum())
        n = _block(classes)
        m = _together(rows, n)
        numbers = (rows, classes, ignored, float(smoothing), weight_total, int(reduction == _NONE))
        _gradient((blocks(rows, m),), flat, targets, weight, grads, logs, dx, *numbers, M=m, N=n, warps=row_warps(m * n))
        if len(shape) > 2:
            dx = dx.view(shape[0], *shape[2:], classes).movedim(-1, 1)
        return dx.reshape(shape), None, None, None, None, None


def _check(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, smoothing: float) -> None:
    if x.dtype not in _FLOATS or target.dtype is not torch.int64 or x.numel() == 0:
        raise Unsupported(f"no cross entropy of {x.dtype} against {target.dtype}")
    if weight is not None and weight.dtype is not x.dtype:
        raise Unsupported(f"classes of {x.dtype} with weights of {weight.dtype}")
    if not 0.0 <= smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {smoothing}")
    if setting(chips.autocasts):
        raise Unsupported("operators by which torch defines it, of which autocast knows the types")
    expected = x.shape[:1] + x.shape[2:] if x.dim() > 1 else torch.Size([])
    if target.shape != expected or (weight is not None and (weight.dim() != 1 or weight.numel() != x.shape[min(1, x.dim() - 1)])):
        raise Unsupported("shapes that torch refuses, in its own words")


def cross_entropy_loss_forward(
    self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = _MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """−log softmax(x)[target], averaged, summed or kept"""
    _check(self, target, weight, label_smoothing)
    weight = None if weight is None else weight.contiguous()
    flat, targets = _rows(self, target)
    losses, shares, _ = _evaluate(flat, targets, weight, ignore_index, label_smoothing, reduction)
    return _finish(losses, shares, target.shape, reduction, self.dtype)


def cross_entropy_loss(
    self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = _MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """cross entropy, differentiable in the logits"""
    _check(self, target, weight, label_smoothing)
    if weight is not None and weight.requires_grad:
        raise Unsupported("a gradient of the weights, which torch refuses in its own words")
    weight = None if weight is None else weight.contiguous()
    return _CrossEntropy.apply(self, target, weight, reduction, ignore_index, label_smoothing)
