"""Comparing an operator of the library with torch: types and shapes with torch's own answer, values with float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trireme.kernels.launch import Unsupported

# Operators that hand some arguments on to torch's kernel: large float32 products, norms of odd order in float64.
LEFT_TO_TORCH = ("mm", "addmm", "norm", "bmm")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Applies `function` to every tensor inside lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return [map_tensors(function, x) for x in value]
    if isinstance(value, dict):
        return {key: map_tensors(function, x) for key, x in value.items()}
    return value


def widen(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in tensors_of(item)]
    return [] if value is None else [torch.tensor(value)]


def check(
    name: str, ours: Any, theirs: Any, args: tuple[Any, ...], kwargs: dict[str, Any], length: int = 1, layout: bool = False
) -> None:
    """Asserts that `ours` equals `theirs`; `length` is how many terms a result sums, which widens the tolerance."""
    try:
        got = tensors_of(ours(*args, **kwargs))
    except Unsupported:
        assert name.split()[0] in LEFT_TO_TORCH, f"{name}: not covered"
        return
    expected = tensors_of(theirs(*args, **kwargs))
    wide_kwargs = {k: torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v for k, v in kwargs.items()}
    precise = tensors_of(theirs(*map_tensors(widen, list(args)), **map_tensors(widen, wide_kwargs)))
    assert len(got) == len(expected), f"{name}: {len(got)} results instead of {len(expected)}"
    for mine, torchs, exact in zip(got, expected, precise, strict=True):
        assert mine.dtype == torchs.dtype, f"{name}: {mine.dtype} instead of {torchs.dtype}"
        assert mine.shape == torchs.shape, f"{name}: shape {tuple(mine.shape)} instead of {tuple(torchs.shape)}"
        if layout:
            assert mine.stride() == torchs.stride(), f"{name}: strides {mine.stride()} instead of {torchs.stride()}"
        if not mine.is_floating_point():
            torch.testing.assert_close(mine, torchs, rtol=0, atol=0, msg=lambda m: f"{name}: {m}")
            continue
        # float16 sums may overflow in torch's own answer, so the exact values are rounded to the type first.
        exact = exact.to(mine.dtype).double()
        scale = TOLERANCE[mine.dtype] * max(1.0, length**0.5 / 4)
        finite = exact[exact.isfinite()].abs()
        size = float(finite.max()) if finite.numel() else 1.0
        torch.testing.assert_close(
            mine.double(),
            exact,
            rtol=scale,
            atol=scale * max(min(size, 1e4), 1e-3) / 4,
            equal_nan=True,
            msg=lambda m: f"{name}: {m}",
        )
