"""torch's own kernels, taken before ours replace them. Knows operators by their aten names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trireme.kernels import chips


def overload_of(name: str) -> Any:
    """torch's operator of an aten name such as `add.Tensor`."""
    base, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), kind or "default")


def derived_again(compute: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor | None], grad: torch.Tensor) -> list[Any]:
    """Gradients of a definition by torch's operators, for whoever derives them once more; ours have no derivatives."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(compute(), wanted, grad, create_graph=True))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


@functools.cache
def original(name: str) -> Callable[..., Any]:
    """torch's kernel of an operator on this chip; whoever replaces it asks here first, so that it stays reachable."""
    key = chips.current().dispatch_key
    kernel = torch.library.get_kernel(overload_of(name), key)
    return functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)))
