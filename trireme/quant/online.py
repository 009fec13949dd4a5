"""Quantizes float matrices at load, into the same form as published quantized ones. Knows values; nothing of devices' kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.quant.base import Dense, Stored, WeightMethod, decode
from trireme.quant.grouped import E2M1, Grouped

GROUP4 = 128  # columns of whole numbers of four bits that share a scale and a zero
GROUP_MX = 32
FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0
LEAST = 1e-30


def quantize(values: Tensor, kind: str) -> Grouped:
    """A float32 matrix as "int8" (a scale for each row), "fp8" (the same), "int4" (groups with zeros) or "mxfp4"."""
    return _KINDS[kind](values)


def _int8(values: Tensor) -> Grouped:
    scales = (values.abs().amax(1, keepdim=True) / 127.0).clamp_min(LEAST)
    return Grouped((values / scales).round_().clamp_(-127, 127).to(torch.int8), scales, values.shape[1])


def _fp8(values: Tensor) -> Grouped:
    scales = (values.abs().amax(1, keepdim=True) / FP8_MOST).clamp_min(LEAST)
    return Grouped((values / scales).clamp_(-FP8_MOST, FP8_MOST).to(FP8), scales, values.shape[1])


def _int4(values: Tensor) -> Grouped:
    """int4 in groups. Zero is always one of the sixteen values of a group, so that zero weights stay zero."""
    group = GROUP4 if values.shape[1] % GROUP4 == 0 else _most_even(values.shape[1])
    runs = values.view(len(values), -1, group)
    least, most = runs.amin(-1).clamp_max(0.0), runs.amax(-1).clamp_min(0.0)
    scales = ((most - least) / 15.0).half().float().clamp_min(2.0**-24)
    zeros = (-least / scales).round_().clamp_(0, 15)
    codes = ((runs / scales.unsqueeze(-1)).round_() + zeros.unsqueeze(-1)).clamp_(0, 15).to(torch.uint8)
    return Grouped(codes.view(values.shape), scales, group, zeros)


def _most_even(columns: int) -> int:
    """The largest power of two up to the group size that divides the columns; all columns if that is too small."""
    power = columns & -columns
    return min(power, GROUP4) if power >= 16 else columns


def _mxfp4(values: Tensor) -> Grouped:
    """The scale of 32 numbers is the power of two that brings the largest of them between 4 and 8."""
    group = GROUP_MX if values.shape[1] % GROUP_MX == 0 else values.shape[1]
    runs = values.view(len(values), -1, group)
    scales = torch.exp2(runs.abs().amax(-1).clamp_min(LEAST).log2().floor_().sub_(2).clamp_(-24, 15))
    table = torch.tensor(E2M1, device=values.device)
    edges = (table[1:8] + table[:7]) / 2
    scaled = (runs / scales.unsqueeze(-1)).view(values.shape)
    codes = torch.bucketize(scaled.abs(), edges).to(torch.uint8) + 8 * (scaled < 0).to(torch.uint8)
    return Grouped(codes, scales, group, None, None, table)


_KINDS = {"int8": _int8, "int4": _int4, "fp8": _fp8, "mxfp4": _mxfp4}
VOCABULARY = 12  # a matrix with this many times more rows than columns holds token embeddings; no other layer comes near
_EIGHT = {"int4": "int8", "mxfp4": "fp8"}  # the kind for a vocabulary, which loses much accuracy in four bits


def kind_for(kind: str, shape: tuple[int, ...]) -> str:
    """The kind for a matrix of that shape where the user asked for `kind`."""
    return _EIGHT.get(kind, kind) if shape[0] > VOCABULARY * shape[1] else kind


class Rounded(Dense):
    """Weights that were quantized to a kind and decoded again, for devices that have no kernel for that kind."""

    title, kind = "dense, rounded", ""

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Dense:
        rounded = [quantize(decode(part, torch.float32, device), kind_for(cls.kind, part.shape)).values() for part in parts]
        return cls(torch.cat([values.to(dtype) for values in rounded]), bias)


def rounded(kind: str) -> type[WeightMethod]:
    return type(f"Rounded{kind.capitalize()}", (Rounded,), {"kind": kind})
