"""The kinds that keys and values are kept as: what the kept numbers stand for, and the bytes they take.

    plain   x in the activations' type
    int8    x = q * scale             a scale in float32 for each token and head, or the head's factor in its place
    fp8     x = q * factor            q: float8 e4m3; a factor for each head of the layer, or 1; larger numbers are clamped
    int4    x = q * scale + low       a scale and a low, both float16, for each group of 32 numbers of a head; q is 0 to 15

Two numbers of int4 share a byte: byte i of a head of n numbers has number i in its low four bits, and number i + n / 2 in its high
ones. The last group of a head may be shorter than 32. Knows heads of numbers; nothing of slots, pages or layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.errors import BadConfig

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0  # larger numbers are clamped to this
GROUP = 32  # numbers of a head with one scale of int4
_LEAST = 1e-30  # the smallest scale of int8, so that a head of zeros is divided by a number


def check_head(kind: str, width: int) -> None:
    """Refuses a kind that cannot keep heads of so many numbers."""
    if kind == "int4" and width % 2:
        raise BadConfig(f"int4 KV keeps two numbers a byte; the model has heads of {width}.", "use --kv-dtype int8")


def groups_of(width: int) -> int:
    """How many groups of int4 a head has."""
    return -(-width // GROUP)


def stored(kind: str, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """How many numbers of which type a head of `width` numbers takes, scales apart."""
    if kind == "int4":
        return width // 2, torch.uint8
    return width, {"int8": torch.int8, "fp8": FP8}.get(kind, dtype)


def scales_of(kind: str, width: int) -> tuple[tuple[int, ...], torch.dtype] | None:
    """The shape and type of the scales that lie beside each slot's head; None if the kind has none there."""
    if kind == "int4":
        return (groups_of(width), 2), torch.float16
    return ((), torch.float32) if kind == "int8" else None


def bytes_of_head(kind: str, width: int, dtype: torch.dtype) -> int:
    """What a head of one token takes, scales included."""
    count, kept = stored(kind, width, dtype)
    beside = {"int8": 4, "int4": 4 * groups_of(width)}.get(kind, 0)
    return count * kept.itemsize + beside


def pack(kind: str, x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """x [tokens, heads, width] as it is kept, and the scales that lie beside it.  factor: [heads], of fp8 and int8"""
    if kind == "int8" and factor is not None:
        codes = (x.float() / factor.unsqueeze(-1)).round().clamp(-128, 127).nan_to_num(0.0).to(torch.int8)
        return codes, factor.expand(x.shape[:-1]).masked_fill(x.isnan().any(-1), float("nan"))
    if kind == "int8":
        codes, scale = int8(x)
        return codes, scale.squeeze(-1)
    if kind == "fp8":
        values = x if factor is None else x.float() / factor.unsqueeze(-1)
        return values.clamp(-FP8_MOST, FP8_MOST).to(FP8), None
    if kind == "int4":
        return _pack_int4(x)
    return x, None


def unpack(kind: str, kept: Tensor, scales: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """The numbers that are kept."""
    if kind == "int8":
        assert scales is not None
        return kept * scales.unsqueeze(-1)
    if kind == "fp8":
        values = kept.view(FP8).float()
        return values if factor is None else values * factor.unsqueeze(-1)
    if kind == "int4":
        assert scales is not None
        numbers = torch.cat([kept & 15, kept >> 4], -1).float()
        scale, low = (part.repeat_interleave(GROUP, -1)[..., : numbers.shape[-1]] for part in scales.float().unbind(-1))
        return numbers * scale + low
    return kept


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of each row of the last axis: x = codes * scale.  scale: [..., 1] float32"""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127.0).clamp_min(_LEAST)
    return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def _pack_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, groups_of(width) * GROUP - width), value=float("nan"))
    groups = padded.unflatten(-1, (-1, GROUP))
    inside = torch.arange(groups.shape[-2] * GROUP, device=x.device).view(-1, GROUP) < width
    low = groups.masked_fill(~inside, float("inf")).amin(-1)
    high = groups.masked_fill(~inside, float("-inf")).amax(-1)
    scales = torch.stack([(high - low) / 15.0, low], -1).half()  # codes are chosen for the scale and low as they are kept
    scale, low = scales.float().unsqueeze(-2).unbind(-1)
    codes = torch.where(scale > 0, (groups - low) / scale, 0.0).nan_to_num(0.0).round().clamp(0, 15)
    first, second = codes.flatten(-2)[..., :width].to(torch.uint8).chunk(2, -1)
    return first | second << 4, scales
