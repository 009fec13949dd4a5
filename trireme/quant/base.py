"""The two forms of weights: tensors stored in a checkpoint, and the weight methods that linear layers compute with.

Knows storage types and the op table; nothing of models or files.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from trireme.blocks import BLOCKS
from trireme.errors import UnsupportedModel
from trireme.ops import Ops
from trireme.quant.gguf import IN_GROUPS, check_scales, decode_blocks, in_groups
from trireme.quant.grouped import KINDS, Grouped, composite, grouped


class Stored(Protocol):
    """One tensor of a checkpoint, still on disk. Selecting is lazy; `raw` reads only what is selected.

    Described here, where it is used: `hub`, which makes it, may not import torch, and `layers` may not import `hub`.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str: ...

    @property
    def offset(self) -> float: ...

    @property
    def origin(self) -> str | None:
        """Identifies the stored bytes: while this text is the same, the values are the same. None if there is no identity."""

    def rows(self, index: slice | np.ndarray) -> Stored: ...

    def columns(self, span: slice) -> Stored: ...

    def turned(self) -> Stored:
        """A matrix that is stored [in, out], as [out, in]."""

    def raw(self) -> np.ndarray: ...

    def release(self) -> None:
        """Gives back the memory that reading took; the tensor can be read again."""


class Noise:
    """A random tensor in place of a stored one, made directly on the device. The same name always gives the same values."""

    kind, offset, origin = "RANDOM", 0.0, None

    def __init__(self, name: str, shape: tuple[int, ...]):
        self.name, self.shape = name, shape

    def rows(self, index: slice | np.ndarray) -> Noise:
        length = len(range(*index.indices(self.shape[0]))) if isinstance(index, slice) else len(index)
        return Noise(f"{self.name}/{index if isinstance(index, slice) else length}", (length, *self.shape[1:]))

    def columns(self, span: slice) -> Noise:
        return Noise(f"{self.name}|{span}", (*self.shape[:-1], len(range(*span.indices(self.shape[-1])))))

    def turned(self) -> Noise:
        return Noise(self.name, self.shape[::-1])

    def raw(self) -> np.ndarray:
        raise TypeError(f"{self.name} is random: it has no bytes")

    def release(self) -> None:
        """Nothing was read."""


_NUMPY_AS_TORCH = {"BF16": torch.bfloat16}
HOW_ELSE = f"use a model in float32, float16 or bfloat16, or a GGUF file of one of {', '.join(BLOCKS)}"
# Kinds that can be decoded to values. Plain integers and plain fp8 cannot, because their scales are in other tensors.
QUANTIZED: frozenset[str] = frozenset({*BLOCKS, *KINDS})
DECODED: frozenset[str] = frozenset({"F64", "F32", "F16", "BF16", *QUANTIZED})


def decode(stored: Stored, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The values of a stored tensor."""
    if stored.kind not in DECODED and stored.kind != "RANDOM":
        raise UnsupportedModel(f"{stored.name} is stored as {stored.kind}, which is not decoded here.", HOW_ELSE)
    if torch.device(device).type == "meta":  # a model of shapes alone
        return torch.empty(stored.shape, dtype=dtype, device=device)
    if stored.kind == "RANDOM":
        generator = torch.Generator(device).manual_seed(zlib.crc32(stored.name.encode()))
        values = torch.empty(stored.shape, dtype=dtype, device=device)
        if len(stored.shape) == 1:  # norm weights and biases: near one keeps a deep random model's activations in range
            return values.fill_(1.0)
        return values.normal_(0.0, 0.02, generator=generator)
    whole = composite(stored)
    if whole is not None and torch.device(device).type == "meta":  # only shapes are needed
        return torch.empty(whole.shape, dtype=dtype, device=device)
    if whole is not None:
        return grouped(whole, device).values().to(dtype)
    raw = torch.from_numpy(stored.raw())
    if stored.kind in BLOCKS:
        check_scales(stored.name, stored.kind, raw.numpy())
        values = decode_blocks(stored.kind, raw.reshape(-1, raw.shape[-1])).reshape(stored.shape)
    else:
        values = raw.view(_NUMPY_AS_TORCH[stored.kind]) if stored.kind in _NUMPY_AS_TORCH else raw
    if stored.offset:
        values = values.float() + stored.offset
    # A vector that stayed in its mapped file would keep megabytes around it in memory.
    values = values.to(device=device, dtype=dtype, copy=len(stored.shape) == 1)
    stored.release()
    return values


def numbers_of(stored: Stored, device: torch.device | str = "cpu") -> Grouped | None:
    """The numbers and scales of a quantized matrix; None for one that is stored as something else."""
    whole = composite(stored)
    if whole is not None:
        return grouped(whole, device)
    if stored.kind not in IN_GROUPS or stored.offset:
        return None
    raw = stored.raw()
    check_scales(stored.name, stored.kind, raw)
    found = in_groups(stored.kind, torch.from_numpy(raw).to(device).view(len(raw), -1))
    stored.release()
    return found


class WeightMethod(Protocol):
    """The weights of one linear layer, in a form its ops can multiply by. `parts` are stacked as rows. Whoever writes a method
    inherits from this: what has a body here needs none there."""

    title: str = "a form of its own"  # the name of this form of weights, for display
    takes_gated: ClassVar[bool] = False  # whether `of_gated` costs nothing beside the product

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> WeightMethod: ...

    @classmethod
    def title_of(cls, part: Stored) -> str:
        """What the title is for a layer of this matrix."""
        return cls.title

    def linear(self, ops: Ops, x: Tensor) -> Tensor: ...

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        """Rows by id, so that a model that ties embedding and head keeps one matrix and never decodes it whole."""
        ...

    def take(self, new: WeightMethod) -> bool:
        """Copies the values of `new`, a method of the same class, into its own tensors, whose addresses captured steps hold.
        Returns False if it cannot; then `new` must replace it."""
        return False

    def num_bytes(self) -> int: ...

    def logits(self, ops: Ops, x: Tensor) -> Tensor:
        """As linear, in float32."""
        return self.linear(ops, x).float()

    def gated(self, ops: Ops, x: Tensor, kind: str) -> Tensor:
        """activation(gate) * up of the product, whose first half is the gate."""
        return ops.gated(self.linear(ops, x), kind)

    def of_gated(self, ops: Ops, x: Tensor, kind: str) -> Tensor:
        """The product with activation(gate) * up of x, whose first half is the gate."""
        return self.linear(ops, ops.gated(x, kind))

    @classmethod
    def stack(cls, matrices: list[list[Stored]], biases: list[Tensor | None], dtype: torch.dtype, device: torch.device) -> Stack:
        """Several matrices of one shape, each for its own group of rows; each is given as `load` takes one."""
        return Stack([cls.load(parts, bias, dtype, device) for parts, bias in zip(matrices, biases, strict=True)])


def take_tensors(old: object, new: object) -> bool:
    """`take` for a method whose values are tensors in its attributes, or in records that these hold. Returns False on a CPU, where
    tensors may map a file, and where anything but the tensors' values differs."""
    pairs = _tensors_of_both(old, new)
    for held, value in pairs or ():
        held.copy_(value)
    return pairs is not None


def _tensors_of_both(old: object, new: object) -> list[tuple[Tensor, Tensor]] | None:
    mine, theirs = vars(old), vars(new)
    if type(old) is not type(new) or mine.keys() != theirs.keys():
        return None
    found: list[tuple[Tensor, Tensor]] = []
    for name, held in mine.items():
        value = theirs[name]
        if isinstance(held, Tensor) and isinstance(value, Tensor):
            if held.device.type == "cpu" or (value.shape, value.dtype) != (held.shape, held.dtype):
                return None
            found.append((held, value))
        elif dataclasses.is_dataclass(held):
            inner = _tensors_of_both(held, value)
            if inner is None:
                return None
            found += inner
        elif isinstance(held, Tensor) or isinstance(value, Tensor) or held != value:
            return None
    return found


class Stack:
    """Weights of several linear layers of one shape. Each of them multiplies one of the consecutive groups of rows."""

    def __init__(self, methods: list[WeightMethod]):
        self.methods = methods

    def linear(self, ops: Ops, x: Tensor, sizes: Tensor) -> Tensor:
        """The products of sizes[i] rows with matrix i, one after the other.  sizes: [matrices]"""
        pieces = x.split([int(size) for size in sizes])
        return ops.concat([method.linear(ops, piece) for method, piece in zip(self.methods, pieces, strict=True)])

    def num_bytes(self) -> int:
        return sum(method.num_bytes() for method in self.methods)


class DenseStack(Stack):
    """Unquantized weights: [matrices, out, in] in the activations' type."""

    def __init__(self, methods: list[Dense]):
        super().__init__(list(methods))
        self.weight = torch.stack([method.weight for method in methods])
        for method, weight in zip(methods, self.weight, strict=True):
            method.weight = weight

    def linear(self, ops: Ops, x: Tensor, sizes: Tensor) -> Tensor:
        y = ops.grouped_linear(x, self.weight, sizes)
        biases = [method.bias for method in self.methods if isinstance(method, Dense) and method.bias is not None]
        return y + torch.stack(biases).repeat_interleave(sizes.to(y.device), 0) if biases else y


class Dense(WeightMethod):
    """Unquantized weights: [out, in] in the activations' type."""

    title = "dense"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Dense:
        if len(parts) == 1:
            return cls(decode(parts[0], dtype, device), bias)
        rows = sum(part.shape[0] for part in parts)
        weight = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype, device=device)
        for target, part in zip(weight.split([part.shape[0] for part in parts]), parts, strict=True):
            target.copy_(decode(part, dtype, device))  # one part at a time: the peak stays near what is kept
        return cls(weight, bias)

    @classmethod
    def stack(cls, matrices: list[list[Stored]], biases: list[Tensor | None], dtype: torch.dtype, device: torch.device) -> Stack:
        return DenseStack([cls.load(parts, bias, dtype, device) for parts, bias in zip(matrices, biases, strict=True)])

    def linear(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def logits(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.logits(x, self.weight)

    def gated(self, ops: Ops, x: Tensor, kind: str) -> Tensor:
        return ops.gated_linear(x, self.weight, self.bias, kind)

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.weight)

    def take(self, new: WeightMethod) -> bool:
        return take_tensors(self, new)

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weight, self.bias) if t is not None)


class Decoded(Dense):
    """Quantized weights of a kind that no kernel of the backend multiplies by: decoded to dense ones when they are loaded."""

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Dense:
        made = super().load(parts, bias, dtype, device)
        made.title = _no_kernel(parts)
        return made

    @classmethod
    def title_of(cls, part: Stored) -> str:
        return _no_kernel([part])


def _no_kernel(parts: list[Stored]) -> str:
    kinds = sorted({part.kind for part in parts} & QUANTIZED)
    return f"dense, no kernel takes its {' and '.join(kinds)}" if kinds else Dense.title
