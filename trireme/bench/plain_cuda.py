"""The products of the GPU's weight methods in plain torch, on the GPU. Knows how methods round; nothing of kernels or models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from trireme.backends.base import Backend
from trireme.backends.cuda.backend import Cuda
from trireme.backends.cuda.methods import Quantized, Scaled
from trireme.bench.plain import Plain
from trireme.config import DeviceOptions
from trireme.ops import Ops
from trireme.quant import Stored, WeightMethod, choose, decode
from trireme.quant.choose import METHODS
from trireme.quant.joined import Joined
from trireme.quant.online import kind_for, quantize

HALF = torch.bfloat16  # the type of activations for which matrices are kept in fewer bits


class PlainQuantized(Plain):
    option: ClassVar[str]
    native: ClassVar[Mapping[str, type[WeightMethod]]]

    def __init__(self, values: list[Tensor], made: list[Quantized | None], bias: Tensor | None):
        super().__init__(values, bias)
        self.made = made  # what the device keeps of each matrix; None where it keeps floats

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> PlainQuantized:
        whole = choose(cls.option, parts, cls.native).load(parts, None, HALF, device)
        if isinstance(whole, Joined):
            each = [cls.load([part], None, dtype, device) for part in parts]
            return cls([value for one in each for value in one.values], [made for one in each for made in one.made], bias)
        if isinstance(whole, Quantized):
            return cls([_values(whole, device)], [whole], bias)
        return cls([torch.cat([_floats(part, cls.option, device) for part in parts])], [None], bias)

    def product(self, i: int, x: Tensor) -> Tensor:
        method = self.made[i]
        if method is not None and method.order is not None:
            x = x.index_select(1, method.order)
        return (rounded(x, method.weight.codes.dtype) if isinstance(method, Scaled) else x) @ self.values[i].t()


def _floats(part: Stored, option: str, device: torch.device) -> Tensor:
    """The values of a matrix, which the option may round."""
    values = decode(part, torch.float32, device)
    return values if option in ("auto", "none") else quantize(values, kind_for(option, part.shape)).values()


def _values(method: Quantized, device: torch.device) -> Tensor:
    """The values of a kept matrix, its columns in the order in which it is kept."""
    method.dtype = torch.float32
    return method.embed(Ops(), torch.arange(method.weight.rows, device=device))


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """Each row in eight bits, int8 or fp8, times its scale."""
    size = x.abs().amax(1, keepdim=True).clamp_min(1e-12) / (127.0 if kind == torch.int8 else 448.0)
    numbers = x / size
    numbers = (numbers + 0.5 * numbers.sign()).trunc() if kind == torch.int8 else numbers.to(kind).float()
    return numbers * size


class PlainCuda(Backend):
    """The plain bodies of all ops on the GPU."""

    def __init__(self, options: DeviceOptions, rank: int = 0):
        super().__init__(options, rank)
        real = Cuda(options, rank)
        self.device, self.kv_kinds = real.device, real.kv_kinds
        self.methods = {name: plain_method(name, real.methods) for name in ("auto", *METHODS)}


def plain_method(option: str, native: Mapping[str, type[WeightMethod]]) -> type[WeightMethod]:
    """The plain form of what the option chooses among a device's methods."""
    return type(f"Plain{option.capitalize()}", (PlainQuantized,), {"option": option, "native": native})
