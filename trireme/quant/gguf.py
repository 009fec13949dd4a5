"""GGUF block decoders: packed bytes of one quantised type in, float32 values out.

Knows how each block is laid out and nothing of files, tensor names or models.

A block holds a fixed number of values of one row. What is marked f16 is a little-endian half; `a | b << n` joins bit fields.
All sums and products are float32 and rounded one by one, in the order written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trireme.blocks import BLOCKS
from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.quant import codebooks
from trireme.quant.blocks import cut, fields, half, look_up, scale, spread_bits
from trireme.quant.grouped import E2M1, Grouped

KINDS: tuple[str, ...] = tuple(BLOCKS)

# Values decoded at a time: few enough that temporaries (some 10 bytes a value at most) are small beside a large tensor, enough
# that the threads' barrier after each op is rare. On 2 shared cores 2^18 was no faster, and at times many times slower.
CHUNK_VALUES = 1 << 22

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def decode_blocks(kind: str, raw: Tensor) -> Tensor:
    """The values of packed rows.  raw: [rows, bytes_per_row] uint8; result: [rows, columns] float32 on the same device"""
    if kind not in BLOCKS:
        raise UnsupportedModel(f"Tensor type {kind} is not known here.", f"use a file quantised as one of {', '.join(KINDS)}.")
    values, size = BLOCKS[kind]
    if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] % size:
        raise BadCheckpoint(
            f"{kind} data must be rows of whole {size}-byte blocks, found {raw.dtype} of shape {list(raw.shape)}.",
            "fetch the file again; it is truncated or its tensor types are wrong.",
        )
    rows, per_row = raw.shape[0], raw.shape[1] // size
    blocks = raw.reshape(rows * per_row, size)
    out = torch.empty(rows * per_row, values, dtype=torch.float32, device=raw.device)
    step = max(1, CHUNK_VALUES // values)
    for begin in range(0, len(blocks), step):
        _DECODERS[kind](blocks[begin : begin + step], out[begin : begin + step])
    return out.view(rows, per_row * values)


# Where a block keeps halves that scale or shift its values
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,),
}  # fmt: skip
# A scale is no finite number where all of these bits are set: (byte, bits) of a half's exponent, or of one that lies in two bytes
_EXPONENTS = {kind: tuple(((at + 1, 0x7C),) for at in places) for kind, places in _HALVES.items()} | {
    "IQ1_M": (((55, 0x70), (53, 0xC0)),),
    "MXFP4": (((0, 0xFF),),),
}


def check_scales(name: str, kind: str, raw: np.ndarray) -> None:
    """Refuses blocks of which a scale is infinite or not a number.  raw: bytes of whole blocks"""
    blocks = raw.reshape(-1, BLOCKS[kind][1])
    for exponent in _EXPONENTS.get(kind, ()):
        if np.logical_and.reduce([blocks[:, byte] & bits == bits for byte, bits in exponent]).any():
            raise BadCheckpoint(f"A scale of {name} is not a finite number.", "fetch the model again")


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales s and minima m of Q4_K and Q5_K, from their 12 bytes p.

    i < 4:  s[i] = p[i] & 63                                m[i] = p[i + 4] & 63
    i ≥ 4:  s[i] = p[i + 4] & 15 | (p[i - 4] >> 6) << 4     m[i] = p[i + 4] >> 4 | (p[i] >> 6) << 4
    """
    low, middle, high = packed.split(4, dim=1)
    scales = torch.cat([low & 63, high & 15 | (low >> 6) << 4], 1)
    minima = torch.cat([middle & 63, high >> 4 | (middle >> 6) << 4], 1)
    return scales, minima


# --- blocks of 32 -----------------------------------------------------------------------------------------------------------


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """d f16 | q 16 bytes: low nibbles are values 0-15, high nibbles 16-31.    y = d (q - 8)"""
    codes = fields(cut(blocks, 2, 18), 1, 4).view(torch.int8).sub_(8)
    scale(codes, half(blocks, 0), out)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """d f16 | m f16 | q 16 bytes as in Q4_0.    y = d q + m"""
    scale(fields(cut(blocks, 4, 20), 1, 4), half(blocks, 0), out, half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """d f16 | h 32 bits, bit i for value i | q 16 bytes as in Q4_0.    y = d ((q | h << 4) - 16)"""
    codes = spread_bits(cut(blocks, 2, 6)).mul_(16).bitwise_or_(fields(cut(blocks, 6, 22), 1, 4))
    scale(codes.view(torch.int8).sub_(16), half(blocks, 0), out)


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """d f16 | m f16 | h 32 bits as in Q5_0 | q 16 bytes as in Q4_0.    y = d (q | h << 4) + m"""
    codes = spread_bits(cut(blocks, 4, 8)).mul_(16).bitwise_or_(fields(cut(blocks, 8, 24), 1, 4))
    scale(codes, half(blocks, 0), out, half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """d f16 | q 32 int8.    y = d q"""
    scale(cut(blocks, 2, 34, torch.int8), half(blocks, 0), out)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """d f16 | q 16 bytes as in Q4_0.    y = d V[q], V the 16 values of _IQ4_VALUES"""
    scale(look_up(_IQ4_VALUES, fields(cut(blocks, 2, 18), 1, 4)), half(blocks, 0), out)


# --- blocks of 256 ----------------------------------------------------------------------------------------------------------


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    """s 16 bytes | q 64 bytes | d f16 | e f16; run r is values [16 r, 16 r + 16).    y = (d (s[r] & 15)) q - e (s[r] >> 4)

    q: each half of the bytes holds 128 values, value 32 k + j in bits 2k, 2k + 1 of its byte j.
    """
    packed = cut(blocks, 0, 16)
    shift = (half(blocks, 82) * (packed >> 4)).neg_()
    scale(fields(cut(blocks, 16, 80), 2, 2), half(blocks, 80) * (packed & 15), out, shift)


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    """h 32 bytes | q 64 bytes as in Q2_K | p 12 bytes | d f16; runs of 16.    y = (d (s[r] - 32)) ((q | h << 2) - 4)

    h: value 32 k + j has bit k of byte j.  s[r]: low four bits from p[r] & 15 for r < 8 and p[r - 8] >> 4 after,
    high two from bits 2 (r div 4) and above of p[8 + r mod 4].
    """
    codes = fields(cut(blocks, 0, 32), 1, 1).mul_(4).bitwise_or_(fields(cut(blocks, 32, 96), 2, 2))
    low, high = cut(blocks, 96, 104), cut(blocks, 104, 108)
    scales = torch.cat([low & 15, low >> 4], 1) | torch.cat([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], 1)
    scale(codes.view(torch.int8).sub_(4), half(blocks, 108) * scales.view(torch.int8).sub_(32), out)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """d f16 | e f16 | s, m 12 bytes, see _six_bit_pairs | q 128 bytes; runs of 32.    y = (d s[r]) q - e m[r]

    q: each 32 bytes hold 64 values, the low nibbles first.
    """
    scales, minima = _six_bit_pairs(cut(blocks, 4, 16))
    codes = fields(cut(blocks, 16, 144), 4, 4)
    scale(codes, half(blocks, 0) * scales, out, (half(blocks, 2) * minima).neg_())


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """d f16 | e f16 | s, m 12 bytes as in Q4_K | h 32 bytes as in Q3_K | q 128 bytes as in Q4_K.

    y = (d s[r]) (q | h << 4) - e m[r]
    """
    scales, minima = _six_bit_pairs(cut(blocks, 4, 16))
    codes = fields(cut(blocks, 16, 48), 1, 1).mul_(16).bitwise_or_(fields(cut(blocks, 48, 176), 4, 4))
    scale(codes, half(blocks, 0) * scales, out, (half(blocks, 2) * minima).neg_())


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """q 128 bytes | h 64 bytes, laid out as q in Q2_K | s 16 int8 | d f16; runs of 16.    y = (d s[r]) ((q | h << 4) - 32)

    q: each 64 bytes hold 128 values, the low nibbles first.
    """
    codes = fields(cut(blocks, 128, 192), 2, 2).mul_(16).bitwise_or_(fields(cut(blocks, 0, 128), 2, 4))
    scales = half(blocks, 208) * cut(blocks, 192, 208, torch.int8)
    scale(codes.view(torch.int8).sub_(32), scales, out)


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """d f16 | h u16 | l 4 bytes | q 128 bytes in groups of 16 as in IQ4_NL; runs of 32.    y = (d (s[r] - 32)) V[q]

    s[r] = nibble r of l, low first, | bits 2r, 2r + 1 of h << 4
    """
    low, high = cut(blocks, 4, 8).unsqueeze(-1), cut(blocks, 2, 4).unsqueeze(-1)
    low = torch.cat([low & 15, low >> 4], -1).flatten(1)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    scales = (low | high << 4).view(torch.int8).sub_(32)
    scale(look_up(_IQ4_VALUES, fields(cut(blocks, 8, 136), 8, 4)), half(blocks, 0) * scales, out)


def _tq1_0(blocks: Tensor, out: Tensor) -> None:
    """q 48 bytes | h 4 bytes | d f16.    y = d (t - 1), t the first ternary digits of a byte over 256

    Of q, all first digits of 32 bytes come before their second ones, and so on to the fifth; then 16 bytes alike; then h, four
    of each.
    """
    digits = []
    for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        left = cut(blocks, begin, end)
        for _ in range(count):
            digits.append((left.int() * 3 >> 8).to(torch.int8))
            left = left * 3  # as a byte: what is before the point falls off
    scale(torch.cat(digits, 1).sub_(1), half(blocks, 52), out)


def _tq2_0(blocks: Tensor, out: Tensor) -> None:
    """q 64 bytes, as in Q2_K | d f16.    y = d (q - 1)"""
    scale(fields(cut(blocks, 0, 64), 2, 2).view(torch.int8).sub_(1), half(blocks, 64), out)


def _q1_0(blocks: Tensor, out: Tensor) -> None:
    """d f16 | a bit for each value, low first.    y = d where it is set, else -d"""
    scale(spread_bits(cut(blocks, 2, 18)).view(torch.int8).mul_(2).sub_(1), half(blocks, 0), out)


_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    """e one byte | q 16 bytes as in Q4_0.    y = 2^(e - 128) V[q], V the doubled floats of four bits"""
    power = cut(blocks, 0, 1).int()
    bits = torch.where(power < 2, 0x00200000 << power.clamp_max(1), (power - 1) << 23)
    scale(look_up(_E2M1_TWICE, fields(cut(blocks, 1, 17), 1, 4)), bits.view(torch.float32), out)


def _nvfp4(blocks: Tensor, out: Tensor) -> None:
    """s 4 floats of eight bits (e4m3, without a sign) | q 4 times 8 bytes, low nibbles first; runs of 16.    y = (s[r] / 2) V[q]"""
    packed = cut(blocks, 0, 4)
    scales = torch.where(packed == 127, 0.0, packed.view(torch.float8_e4m3fn).float())
    scale(look_up(_E2M1_TWICE, fields(cut(blocks, 4, 36), 4, 4)), scales * 0.5, out)


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ1_S": codebooks.iq1_s,
    "IQ1_M": codebooks.iq1_m,
    "IQ2_XXS": codebooks.iq2_xxs,
    "IQ2_XS": codebooks.iq2_xs,
    "IQ2_S": codebooks.iq2_s,
    "IQ3_XXS": codebooks.iq3_xxs,
    "IQ3_S": codebooks.iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q1_0": _q1_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}

# --- blocks as numbers and scales -------------------------------------------------------------------------------------------


def _q4_0_numbers(blocks: Tensor) -> Grouped:
    scales = half(blocks, 0)
    return Grouped(fields(cut(blocks, 2, 18), 1, 4), scales, 32, torch.full_like(scales, 8.0))


def _q8_0_numbers(blocks: Tensor) -> Grouped:
    return Grouped(cut(blocks, 2, 34, torch.int8), half(blocks, 0), 32)


def _mxfp4_numbers(blocks: Tensor) -> Grouped:
    power = cut(blocks, 0, 1).int()
    scales = torch.where(power == 0, 1 << 22, power << 23).view(torch.float32)
    return Grouped(fields(cut(blocks, 1, 17), 1, 4), scales, 32, None, None, torch.tensor(E2M1, device=blocks.device))


# The kinds whose blocks of 32 are numbers, with one scale and perhaps a whole zero, as kernels of published formats take them
IN_GROUPS: dict[str, Callable[[Tensor], Grouped]] = {"Q4_0": _q4_0_numbers, "Q8_0": _q8_0_numbers, "MXFP4": _mxfp4_numbers}


def in_groups(kind: str, raw: Tensor) -> Grouped:
    """Packed rows as numbers and scales.  raw: [rows, bytes_per_row] uint8"""
    found, rows = IN_GROUPS[kind](raw.reshape(-1, BLOCKS[kind][1])), len(raw)
    found.codes, found.scales = found.codes.view(rows, -1), found.scales.view(rows, -1)
    found.zeros = None if found.zeros is None else found.zeros.view(rows, -1)
    return found
