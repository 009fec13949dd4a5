"""How a set of tensors is walked together: broadcast, ordered by stride, collapsed to the fewest dimensions.
Knows shapes and strides, never types or values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trireme.kernels.launch import Unsupported

_NARROW = 2**31 - 2**16  # offsets up to here fit 32 bits, even those of the block that reaches past the end
_plans: dict[tuple[object, ...], Plan] = {}
_MOST_PLANS = 4096


@dataclass(frozen=True)
class Plan:
    """The walk: collapsed sizes, and for every operand (inputs, then outputs) one stride per size, flattened."""

    shape: tuple[int, ...]
    out_stride: tuple[int, ...]
    count: int
    dense: bool
    wide: bool  # offsets need 64 bits
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def crossed(self) -> bool:
        """Whether the last dimension is contiguous for some, while neighbours of others lie along another one."""
        rank = len(self.sizes)
        walks = [self.strides[at : at + rank] for at in range(0, len(self.strides), rank)]
        nearest = [min((abs(stride) for stride in walk if stride), default=0) for walk in walks]
        return any(w[-1] == 1 for w in walks) and any(near < w[-1] for near, w in zip(nearest, walks, strict=True))


def plan_layout(inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None, outputs: int = 1) -> Plan:
    """The plan for these tensors and given or `outputs` new outputs, remembered by shapes and strides."""
    operands = [*inputs, *outs] if outs is not None else inputs
    key = (outs is None, outputs, *[(x.shape, x.stride()) for x in operands])
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(inputs, outs, outputs)
    return plan


def _plan(inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor] | None, outputs: int) -> Plan:
    shape = tuple(torch.broadcast_shapes(*[x.shape for x in inputs])) if inputs else tuple(outs[0].shape) if outs else ()
    if outs is not None and any(tuple(out.shape) != shape for out in outs):
        raise Unsupported(f"out= must have the broadcast shape {shape}")
    count = 1
    for size in shape:
        count *= size
    walks = [x.expand(shape).stride() for x in inputs]
    if outs is None:
        out_stride = _output_stride(shape, inputs, walks)
        walks += [out_stride] * outputs
    else:
        out_stride = outs[0].stride()
        walks += [out.stride() for out in outs]
    order = _order(shape, walks[-1:] + walks[:-1])
    sizes, strides = _collapse([shape[d] for d in order], [[walk[d] for d in order] for walk in walks])
    dense = len(sizes) == 1 and all(walk == [1] for walk in strides)
    flat = tuple(stride for walk in strides for stride in walk)
    return Plan(shape, tuple(out_stride), count, dense, _is_wide(count, sizes, strides), tuple(sizes), flat)


def overlap_in_part(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors share some of their memory but do not lie alike; of those with gaps, as torch does, we do not ask."""
    if not x.numel() or not y.numel() or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    alike = x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
    if alike or not (fills(x.shape, x.stride()) and fills(y.shape, y.stride())):
        return False
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


def plan_reversed(x: torch.Tensor, out: torch.Tensor, dims: Sequence[int]) -> Plan:
    """A walk over `out` that takes `x` backwards along `dims`, starting at its last element there."""
    shape = tuple(x.shape)
    back = [-stride if d in dims else stride for d, stride in enumerate(x.stride())]
    order = _order(shape, [out.stride()])
    sizes, strides = _collapse([shape[d] for d in order], [[walk[d] for d in order] for walk in (back, out.stride())])
    flat = tuple(stride for walk in strides for stride in walk)
    return Plan(shape, out.stride(), x.numel(), False, _is_wide(x.numel(), sizes, strides), tuple(sizes), flat)


def _is_wide(count: int, sizes: Sequence[int], walks: Sequence[Sequence[int]]) -> bool:
    """Whether the elements, or how far they lie apart, outgrow 32 bits."""
    return max([count, *(sum((n - 1) * abs(s) for n, s in zip(sizes, walk, strict=True)) for walk in walks)]) > _NARROW


def _output_stride(shape: tuple[int, ...], inputs: Sequence[torch.Tensor], walks: list[tuple[int, ...]]) -> tuple[int, ...]:
    """torch's rule: keep the layout of dense inputs that agree, else order dimensions as the inputs do."""
    if all(x.shape == shape and x.is_contiguous() for x in inputs):
        return _contiguous(shape)
    first = inputs[0]
    if all(x.shape == shape and x.stride() == first.stride() for x in inputs) and fills(shape, first.stride()):
        return first.stride()
    order = _order(shape, walks)
    stride = [0] * len(shape)
    step = 1
    for d in reversed(order):
        stride[d] = step
        step *= max(shape[d], 1)
    return tuple(stride)


def fills(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements cover a block of memory without gaps or overlap."""
    step = 1
    for own, size in sorted((own, size) for own, size in zip(stride, shape, strict=True) if size != 1):
        if own != step:
            return False
        step *= size
    return True


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        stride[d] = stride[d + 1] * max(shape[d + 1], 1)
    return tuple(stride)


def _order(shape: tuple[int, ...], walks: Sequence[Sequence[int]]) -> list[int]:
    """Dimensions from the largest stride to the smallest, by the first operand that distinguishes two of them."""
    order = list(range(len(shape)))
    for i in range(1, len(order)):
        at = i
        while at > 0 and _swaps(order[at - 1], order[at], shape, walks):
            order[at - 1], order[at] = order[at], order[at - 1]
            at -= 1
    return order


def _swaps(left: int, right: int, shape: tuple[int, ...], walks: Sequence[Sequence[int]]) -> bool:
    for walk in walks:
        if walk[left] == 0 or walk[right] == 0:
            continue
        if walk[left] != walk[right]:
            return walk[left] < walk[right]
        if shape[left] != shape[right]:
            return shape[left] < shape[right]
    return False


def _collapse(sizes: list[int], walks: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Drops dimensions of size 1 and merges neighbours that every operand walks as one."""
    keep = [d for d, size in enumerate(sizes) if size != 1]
    if not keep:
        return [1], [[1] for _ in walks]
    new_sizes = [sizes[keep[0]]]
    new_walks = [[walk[keep[0]]] for walk in walks]
    for d in keep[1:]:
        if all(merged[-1] == walk[d] * sizes[d] for merged, walk in zip(new_walks, walks, strict=True)):
            new_sizes[-1] *= sizes[d]
            for merged, walk in zip(new_walks, walks, strict=True):
                merged[-1] = walk[d]
        else:
            new_sizes.append(sizes[d])
            for merged, walk in zip(new_walks, walks, strict=True):
                merged.append(walk[d])
    return new_sizes, new_walks


def normalise(dims: Sequence[int] | int | None, rank: int) -> list[int]:
    """Sorted non-negative dimensions; None and the empty list mean all."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return list(range(rank))
    result = []
    for dim in dims:
        if not -max(rank, 1) <= dim < max(rank, 1):
            bounds = f"[{-max(rank, 1)}, {max(rank, 1) - 1}]"
            raise IndexError(f"Dimension out of range (expected to be in range of {bounds}, but got {dim})")
        result.append(dim % max(rank, 1))
    if len(set(result)) != len(result):
        raise RuntimeError(f"dim {result} appears multiple times in the list of dims")
    return sorted(d for d in result if d < rank)
