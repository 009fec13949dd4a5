"""Functions shared by the decoders of packed blocks: cut bytes out of blocks, unpack small numbers, apply scales.

Knows no layout.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cut(blocks: Tensor, begin: int, end: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Bytes [begin, end) of every block, dense and aligned, read as dtype."""
    # A clone even when dense: the bytes of a mapped file may start at any address, which `view` refuses.
    return blocks[:, begin:end].clone(memory_format=torch.contiguous_format).view(dtype)


def half(blocks: Tensor, begin: int) -> Tensor:
    """The f16 at a byte offset of every block, as float32 [blocks, 1]."""
    return cut(blocks, begin, begin + 2, torch.float16).float()


def fields(packed: Tensor, groups: int, bits: int) -> Tensor:
    """Every byte cut into 8 / bits fields, low bits first, all first fields of a group before all its second ones.

    packed: [blocks, groups * width] uint8; result: [blocks, groups * (8 / bits) * width] uint8
    """
    # Shifts eight bytes at a time. The mask removes bits that a shift carries from another byte or from the sign.
    words = packed.view(torch.int64).view(len(packed), groups, -1)
    mask = ((1 << bits) - 1) * 0x0101010101010101
    result = torch.empty(len(packed), groups, 8 // bits, words.shape[-1], dtype=torch.int64, device=packed.device)
    torch.bitwise_and(words, mask, out=result[:, :, 0])
    for index in range(1, 8 // bits):
        torch.bitwise_and(words >> index * bits, mask, out=result[:, :, index])
    return result.view(len(packed), -1).view(torch.uint8)


def spread_bits(packed: Tensor) -> Tensor:
    """Bit i of each block's bits, low end first, as byte i.  packed: [blocks, n] uint8; result: [blocks, 8n] of 0 and 1"""
    # Each byte is repeated eight times, and bit k kept of copy k.
    kept = (packed.to(torch.int64) * 0x0101010101010101) & (0x8040201008040201 - (1 << 64))
    return kept.view(torch.uint8).ne(0).view(torch.uint8)


def scale(codes: Tensor, scales: Tensor, out: Tensor, shift: Tensor | None = None) -> None:
    """out = codes * scales + shift, scales and shift over equal runs.  codes, out: [blocks, values]; scales: [blocks, runs]"""
    runs = out.view(len(out), scales.shape[1], -1)
    out.copy_(codes)
    runs.mul_(scales.unsqueeze(-1))
    if shift is not None:
        runs.add_(shift.unsqueeze(-1))


def look_up(values: tuple[int, ...], codes: Tensor) -> Tensor:
    """values[codes] as int8, the shape of codes."""
    table = torch.tensor(values, dtype=torch.int8, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)
