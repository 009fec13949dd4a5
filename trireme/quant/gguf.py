"""GGUF block decoders: packed bytes of one quantised type in, float32 values out.

Knows how each block is laid out and nothing of files, tensor names or models.

A block holds a fixed number of values of one row. What is marked f16 is a little-endian half; `a | b << n` joins bit fields.
All sums and products are float32 and rounded one by one, in the order written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trireme.errors import BadCheckpoint, UnsupportedModel

# values per block, bytes per block
BLOCKS: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ2_XXS": (256, 66),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
KINDS: tuple[str, ...] = tuple(BLOCKS)

# Values decoded at a time: few enough that temporaries (some 10 bytes a value at most) are small beside a large tensor, enough
# that the threads' barrier after each op is rare. On 2 shared cores 2^18 was no faster, and at times many times slower.
CHUNK_VALUES = 1 << 22

# IQ2_XXS: each entry is 8 ternary digits, lowest first, standing for 8, 25, 43. As numbers the entries rise and are all even:
# these are the steps from each to the next, halved, one byte each, the first from 0.
_IQ2_STEPS = (
    "00010101010101030102010101030302010301030604010302070f06060109120d01030501030102060501030603010206070a01050c0109"
    "0f090302010306020103010b0c0c1c05230103050409060302070306090405180519030602060a15101107220103090e0d0222171601030b"
    "080401190418012801030907140e0a300c06183f1a01030302010303040205010309090e04020c040c04050f030612080b051e2901030902"
    "191502051c10090302030112030c0d172328010c2513150503101e1e2703090c0f141c0f12022b0117436b01030a0e0e0606202401030207"
    "091210110b0a0913292c25030603170b141d190a052c5a1649110b0f25308418"
)
_IQ2_MAGNITUDES = (8, 25, 43)
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


# --- pieces the layouts share -----------------------------------------------------------------------------------------------


def _cut(blocks: Tensor, begin: int, end: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Bytes [begin, end) of every block, dense and aligned, read as dtype."""
    # A clone even when dense: the bytes of a mapped file may start at any address, which `view` refuses.
    return blocks[:, begin:end].clone(memory_format=torch.contiguous_format).view(dtype)


def _half(blocks: Tensor, begin: int) -> Tensor:
    """The f16 at a byte offset of every block, as float32 [blocks, 1]."""
    return _cut(blocks, begin, begin + 2, torch.float16).float()


def _fields(packed: Tensor, groups: int, bits: int) -> Tensor:
    """Every byte cut into 8 / bits fields, low bits first, all first fields of a group before all its second ones.

    packed: [blocks, groups * width] uint8; result: [blocks, groups * (8 / bits) * width] uint8
    """
    # Eight bytes at a time: what a shift carries across byte borders, or from the sign, the mask removes.
    words = packed.view(torch.int64).view(len(packed), groups, -1)
    mask = ((1 << bits) - 1) * 0x0101010101010101
    result = torch.empty(len(packed), groups, 8 // bits, words.shape[-1], dtype=torch.int64, device=packed.device)
    torch.bitwise_and(words, mask, out=result[:, :, 0])
    for index in range(1, 8 // bits):
        torch.bitwise_and(words >> index * bits, mask, out=result[:, :, index])
    return result.view(len(packed), -1).view(torch.uint8)


def _spread_bits(packed: Tensor) -> Tensor:
    """Bit i of each block's bits, low end first, as byte i.  packed: [blocks, n] uint8; result: [blocks, 8n] of 0 and 1"""
    # Each byte is repeated eight times, and bit k kept of copy k.
    kept = (packed.to(torch.int64) * 0x0101010101010101) & (0x8040201008040201 - (1 << 64))
    return kept.view(torch.uint8).ne(0).view(torch.uint8)


def _scale(codes: Tensor, scales: Tensor, out: Tensor, shift: Tensor | None = None) -> None:
    """out = codes * scales + shift, scales and shift over equal runs.  codes, out: [blocks, values]; scales: [blocks, runs]"""
    runs = out.view(len(out), scales.shape[1], -1)
    out.copy_(codes)
    runs.mul_(scales.unsqueeze(-1))
    if shift is not None:
        runs.add_(shift.unsqueeze(-1))


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales s and minima m of Q4_K and Q5_K, from their 12 bytes p.

    i < 4:  s[i] = p[i] & 63                                m[i] = p[i + 4] & 63
    i ≥ 4:  s[i] = p[i + 4] & 15 | (p[i - 4] >> 6) << 4     m[i] = p[i + 4] >> 4 | (p[i] >> 6) << 4
    """
    low, middle, high = packed.split(4, dim=1)
    scales = torch.cat([low & 63, high & 15 | (low >> 6) << 4], 1)
    minima = torch.cat([middle & 63, high >> 4 | (middle >> 6) << 4], 1)
    return scales, minima


def _look_up(values: tuple[int, ...], codes: Tensor) -> Tensor:
    """values[codes] as int8, the shape of codes."""
    table = torch.tensor(values, dtype=torch.int8, device=codes.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


# --- blocks of 32 -----------------------------------------------------------------------------------------------------------


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """d f16 | q 16 bytes: low nibbles are values 0-15, high nibbles 16-31.    y = d (q - 8)"""
    codes = _fields(_cut(blocks, 2, 18), 1, 4).view(torch.int8).sub_(8)
    _scale(codes, _half(blocks, 0), out)


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """d f16 | m f16 | q 16 bytes as in Q4_0.    y = d q + m"""
    _scale(_fields(_cut(blocks, 4, 20), 1, 4), _half(blocks, 0), out, _half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """d f16 | h 32 bits, bit i for value i | q 16 bytes as in Q4_0.    y = d ((q | h << 4) - 16)"""
    codes = _spread_bits(_cut(blocks, 2, 6)).mul_(16).bitwise_or_(_fields(_cut(blocks, 6, 22), 1, 4))
    _scale(codes.view(torch.int8).sub_(16), _half(blocks, 0), out)


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """d f16 | m f16 | h 32 bits as in Q5_0 | q 16 bytes as in Q4_0.    y = d (q | h << 4) + m"""
    codes = _spread_bits(_cut(blocks, 4, 8)).mul_(16).bitwise_or_(_fields(_cut(blocks, 8, 24), 1, 4))
    _scale(codes, _half(blocks, 0), out, _half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """d f16 | q 32 int8.    y = d q"""
    _scale(_cut(blocks, 2, 34, torch.int8), _half(blocks, 0), out)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """d f16 | q 16 bytes as in Q4_0.    y = d V[q], V the 16 values of _IQ4_VALUES"""
    _scale(_look_up(_IQ4_VALUES, _fields(_cut(blocks, 2, 18), 1, 4)), _half(blocks, 0), out)


# --- blocks of 256 ----------------------------------------------------------------------------------------------------------


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    """s 16 bytes | q 64 bytes | d f16 | e f16; run r is values [16 r, 16 r + 16).    y = (d (s[r] & 15)) q - e (s[r] >> 4)

    q: each half of the bytes holds 128 values, value 32 k + j in bits 2k, 2k + 1 of its byte j.
    """
    packed = _cut(blocks, 0, 16)
    shift = (_half(blocks, 82) * (packed >> 4)).neg_()
    _scale(_fields(_cut(blocks, 16, 80), 2, 2), _half(blocks, 80) * (packed & 15), out, shift)


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    """h 32 bytes | q 64 bytes as in Q2_K | p 12 bytes | d f16; runs of 16.    y = (d (s[r] - 32)) ((q | h << 2) - 4)

    h: value 32 k + j has bit k of byte j.  s[r]: low four bits from p[r] & 15 for r < 8 and p[r - 8] >> 4 after,
    high two from bits 2 (r div 4) and above of p[8 + r mod 4].
    """
    codes = _fields(_cut(blocks, 0, 32), 1, 1).mul_(4).bitwise_or_(_fields(_cut(blocks, 32, 96), 2, 2))
    low, high = _cut(blocks, 96, 104), _cut(blocks, 104, 108)
    scales = torch.cat([low & 15, low >> 4], 1) | torch.cat([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], 1)
    _scale(codes.view(torch.int8).sub_(4), _half(blocks, 108) * scales.view(torch.int8).sub_(32), out)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """d f16 | e f16 | s, m 12 bytes, see _six_bit_pairs | q 128 bytes; runs of 32.    y = (d s[r]) q - e m[r]

    q: each 32 bytes hold 64 values, the low nibbles first.
    """
    scales, minima = _six_bit_pairs(_cut(blocks, 4, 16))
    codes = _fields(_cut(blocks, 16, 144), 4, 4)
    _scale(codes, _half(blocks, 0) * scales, out, (_half(blocks, 2) * minima).neg_())


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """d f16 | e f16 | s, m 12 bytes as in Q4_K | h 32 bytes as in Q3_K | q 128 bytes as in Q4_K.

    y = (d s[r]) (q | h << 4) - e m[r]
    """
    scales, minima = _six_bit_pairs(_cut(blocks, 4, 16))
    codes = _fields(_cut(blocks, 16, 48), 1, 1).mul_(16).bitwise_or_(_fields(_cut(blocks, 48, 176), 4, 4))
    _scale(codes, _half(blocks, 0) * scales, out, (_half(blocks, 2) * minima).neg_())


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """q 128 bytes | h 64 bytes, laid out as q in Q2_K | s 16 int8 | d f16; runs of 16.    y = (d s[r]) ((q | h << 4) - 32)

    q: each 64 bytes hold 128 values, the low nibbles first.
    """
    codes = _fields(_cut(blocks, 128, 192), 2, 2).mul_(16).bitwise_or_(_fields(_cut(blocks, 0, 128), 2, 4))
    scales = _half(blocks, 208) * _cut(blocks, 192, 208, torch.int8)
    _scale(codes.view(torch.int8).sub_(32), scales, out)


def _iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """d f16 | h u16 | l 4 bytes | q 128 bytes in groups of 16 as in IQ4_NL; runs of 32.    y = (d (s[r] - 32)) V[q]

    s[r] = nibble r of l, low first, | bits 2r, 2r + 1 of h << 4
    """
    low, high = _cut(blocks, 4, 8).unsqueeze(-1), _cut(blocks, 2, 4).unsqueeze(-1)
    low = torch.cat([low & 15, low >> 4], -1).flatten(1)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    scales = (low | high << 4).view(torch.int8).sub_(32)
    _scale(_look_up(_IQ4_VALUES, _fields(_cut(blocks, 8, 136), 8, 4)), _half(blocks, 0) * scales, out)


def _iq2_xxs(blocks: Tensor, out: Tensor) -> None:
    """d f16 | 8 runs of 32 values: i 4 bytes, w u32.    y = (d (1/2 + (w >> 28)) / 4) G[i[k]] sign, k the run's group of 8

    G: the 256 rows of 8 magnitudes in _IQ2_STEPS.  Signs of group k: bits 7k to 7k + 6 of w, set for minus, for its first seven
    values; the eighth is minus where that makes the number of minuses even.
    """
    # Both tables hold a group as the eight bytes of one int64, so that a look-up moves whole groups.
    magnitudes, signs = (table.to(blocks.device) for table in (_IQ2_GRID, _IQ2_SIGNS))
    runs = _cut(blocks, 2, 66).view(-1, 8)
    groups = magnitudes.index_select(0, runs[:, :4].int().flatten())
    words = _cut(runs, 4, 8, torch.int32)
    flips = torch.cat([words >> shift & 127 for shift in (0, 7, 14, 21)], 1)
    codes = groups.view(torch.int8).mul_(signs.index_select(0, flips.flatten()).view(torch.int8))
    factors = (words >> 28 & 15).view(-1, 8) + 0.5
    _scale(codes.view(len(blocks), -1), (_half(blocks, 0) * factors).mul_(0.25), out)


def _iq2_grid() -> Tensor:
    """The magnitudes of IQ2_XXS: [256] int64, eight int8 each."""
    steps = torch.frombuffer(bytearray.fromhex(_IQ2_STEPS), dtype=torch.uint8)
    numbers = 2 * steps.long().cumsum(0)
    digits = numbers[:, None] // 3 ** torch.arange(8) % 3
    return torch.tensor(_IQ2_MAGNITUDES, dtype=torch.int8)[digits].view(torch.int64).flatten()


def _iq2_signs() -> Tensor:
    """The signs of IQ2_XXS: [128] int64, eight int8 of 1 or -1 each."""
    minus = torch.arange(128)[:, None] >> torch.arange(7) & 1
    minus = torch.cat([minus, minus.sum(1, keepdim=True) % 2], 1)
    return (1 - 2 * minus).to(torch.int8).view(torch.int64).flatten()


_IQ2_GRID, _IQ2_SIGNS = _iq2_grid(), _iq2_signs()

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
    "IQ2_XXS": _iq2_xxs,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
