"""Small packers of published formats: known numbers in, the tensors of a file and the values they mean out.

Each writes bit by bit what the format's own documents say, apart from the code that reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]  # tensors by the end of their names, the matrix in float32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def bit_stream(numbers: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] numbers one after the other in words of 32 bits, low bits first."""
    digits = (numbers[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)) & 1
    flat = digits.reshape(len(numbers), -1, 32)
    return (flat << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] numbers, as many whole ones in a word as fit, low bits first."""
    per = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per))).reshape(len(numbers), -1, per).astype(np.uint64)
    return (padded << np.arange(0, per * bits, bits, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _drawn(rows: int, columns: int, group: int, bits: int, symmetric: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Codes, zeros and scales as quantizing weights around nothing gives them."""
    random = np.random.default_rng(seed)
    groups, top = columns // group, (1 << bits) - 1
    middle = 1 << (bits - 1)
    zeros = np.full((rows, groups), middle)
    if not symmetric:
        zeros = np.clip(middle + random.integers(-1, 2, (rows, groups)), 0, top)
    spread = random.normal(0.0, top / 6, (rows, columns)).round().astype(int)
    codes = np.clip(spread + zeros.repeat(group, 1), 0, top)
    scales = torch.from_numpy(random.uniform(0.002, 0.03, (rows, groups)).astype(np.float32)).half()
    return codes, zeros, scales


def _values(codes: np.ndarray, zeros: np.ndarray, scales: Tensor, of: np.ndarray) -> Tensor:
    return torch.from_numpy((codes - zeros[:, of]).astype(np.float32)) * scales.float()[:, of]


def gptq(
    rows: int, columns: int, *, bits: int = 4, group: int = 32, symmetric: bool = True, ordered: bool = False, version: int = 1
) -> Packed:
    codes, zeros, scales = _drawn(rows, columns, group, bits, symmetric)
    of = np.arange(columns) // group
    if ordered:
        of = np.random.default_rng(1).permutation(of)
    # version 1 stores one less, all numbers of a word (of three for 3 bits) at once
    stored = zeros.T - (1 if version == 1 else 0)
    tensors = {
        ".qweight": _tensor(bit_stream(codes.T.T, bits).T),
        ".qzeros": _tensor(bit_stream(stored, bits)),
        ".scales": scales.t().contiguous(),
        ".g_idx": torch.from_numpy(of.astype(np.int32)),
    }
    return tensors, _values(codes, zeros, scales, of)


def awq(rows: int, columns: int, group: int = 32) -> Packed:
    codes, zeros, scales = _drawn(rows, columns, group, 4, False)

    def pack(numbers: np.ndarray) -> Tensor:  # [n, rows]: eight rows in a word, in AWQ's order
        return _tensor(words(numbers.reshape(len(numbers), -1, 8)[:, :, list(AWQ_ORDER)].reshape(len(numbers), -1), 4))

    tensors = {".qweight": pack(codes.T), ".qzeros": pack(zeros.T), ".scales": scales.t().contiguous()}
    return tensors, _values(codes, zeros, scales, np.arange(columns) // group)


def packed_words(
    rows: int, columns: int, *, bits: int = 4, group: int = 32, symmetric: bool = True, ordered: bool = False
) -> Packed:
    """compressed-tensors' pack-quantized."""
    codes, zeros, scales = _drawn(rows, columns, group, bits, symmetric)
    of = np.arange(columns) // group
    tensors = {
        ".weight_packed": _tensor(words(codes, bits)),
        ".weight_scale": scales.bfloat16(),
        ".weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = _tensor(words(zeros.T, bits).T)
    if ordered:
        of = np.random.default_rng(1).permutation(of)
        tensors[".weight_g_idx"] = torch.from_numpy(of.astype(np.int32))
    return tensors, _values(codes, zeros, scales.bfloat16(), of)


def int8(rows: int, columns: int, scale_shape: tuple[int, ...], given: bool = False) -> Packed:
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    scale = torch.rand(scale_shape, generator=torch.Generator().manual_seed(3)) * 0.002 + 0.0002
    spread = scale if scale.dim() < 2 or scale.shape[1] == 1 else scale.repeat_interleave(columns // scale.shape[1], 1)
    tensors = {".weight": codes, ".weight_scale": scale}
    if given:  # activations' scale and zero, measured when the model was quantized
        tensors |= {".input_scale": torch.tensor([0.03]), ".input_zero_point": torch.tensor([3], dtype=torch.int8)}
    return tensors, codes.float() * spread


def fp8(rows: int, columns: int, scale_shape: tuple[int, ...], block: tuple[int, int] | None = None, given: bool = False) -> Packed:
    codes = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape, generator=torch.Generator().manual_seed(3)) * 0.01 + 0.001
    spread = scale if scale.dim() < 2 or scale.shape[1] == 1 else scale.repeat_interleave(columns // scale.shape[1], 1)
    if block:
        spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    tensors = {".weight": codes, ".weight_scale_inv" if block else ".weight_scale": scale}
    if given:
        tensors[".input_scale"] = torch.tensor(0.03)
    return tensors, codes.float() * spread


def _e2m1(codes: np.ndarray) -> Tensor:
    table = np.array(E2M1 + [-value for value in E2M1], dtype=np.float32)
    return torch.from_numpy(table[codes])


def _low_first(codes: np.ndarray) -> Tensor:
    return _tensor((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def nvfp4(rows: int, columns: int, maker: str) -> Packed:
    codes = np.random.default_rng(4).integers(0, 16, (rows, columns))
    scale = (torch.rand(rows, columns // 16, generator=torch.Generator().manual_seed(5)) * 400 + 1).to(torch.float8_e4m3fn)
    if maker == "modelopt":
        whole = torch.tensor(0.0004)
        tensors = {".weight": _low_first(codes), ".weight_scale": scale, ".weight_scale_2": whole, ".input_scale": whole}
        wide = scale.float() * whole
    else:
        whole = torch.tensor([2500.0])
        tensors = {".weight_packed": _low_first(codes), ".weight_scale": scale, ".weight_global_scale": whole}
        tensors[".input_global_scale"] = whole
        wide = scale.float() / whole
    return tensors, _e2m1(codes) * wide.repeat_interleave(16, 1)


def mxfp4(rows: int, columns: int, blocks: bool) -> Packed:
    codes = np.random.default_rng(4).integers(0, 16, (rows, columns))
    powers = np.random.default_rng(5).integers(112, 124, (rows, columns // 32))
    values = _e2m1(codes) * torch.from_numpy(np.exp2(powers - 127.0).astype(np.float32)).repeat_interleave(32, 1)
    scale = _tensor(powers.astype(np.uint8))
    if blocks:
        return {"_blocks": _low_first(codes).view(rows, -1, 16), "_scales": scale}, values
    return {".weight_packed": _low_first(codes), ".weight_scale": scale}, values


NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip


FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25)


def nf4(rows: int, columns: int, run: int = 64, nested: bool = True, kind: str = "nf4") -> Packed:
    """bitsandbytes' floats of four bits: NF4, or FP4 with a sign as its highest bit."""
    codes = np.random.default_rng(6).integers(0, 16, rows * columns)
    state = {"shape": [rows, columns], "blocksize": run, "dtype": "float16", "quant_type": kind}
    table = torch.tensor(NF4 if kind == "nf4" else [*FP4, *(-value for value in FP4)])
    tensors = {".weight": _tensor((codes[::2] << 4 | codes[1::2]).astype(np.uint8)).unsqueeze(1), ".weight.quant_map": table}
    count = rows * columns // run
    if nested:
        inner = torch.linspace(-1, 1, 256)
        bytes_ = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
        factors = torch.rand(-(-count // 256), generator=torch.Generator().manual_seed(8)) * 0.01
        state |= {"nested_blocksize": 256, "nested_offset": 0.02}
        tensors |= {".weight.absmax": bytes_, ".weight.nested_absmax": factors, ".weight.nested_quant_map": inner}
        scales = inner[bytes_.int()] * factors.repeat_interleave(256)[:count] + 0.02
    else:
        scales = torch.rand(count, generator=torch.Generator().manual_seed(8))
        tensors[".weight.absmax"] = scales
    text = json.dumps(state).encode()
    tensors[f".weight.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    values = (table[torch.from_numpy(codes)].view(-1, run) * scales.unsqueeze(1)).view(rows, columns)
    return tensors, values


def bitsandbytes_int8(rows: int, columns: int) -> Packed:
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    most = torch.rand(rows, generator=torch.Generator().manual_seed(3)) + 0.1
    tensors = {".weight": codes, ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (most / 127.0).unsqueeze(1)


Packer = Callable[[int, int], Packed]

# name: (packer of a matrix, the kind it is read as)
FORMATS: dict[str, tuple[Packer, str]] = {
    **{
        f"gptq {bits} bit": (lambda n, k, bits=bits: gptq(n, k, bits=bits), f"INT{bits}") for bits in (2, 3, 4, 8)
    },
    **{
        f"gptq {bits} bit with zeros, version {version}": (
            lambda n, k, bits=bits, version=version: gptq(n, k, bits=bits, symmetric=False, version=version),
            f"INT{bits}",
        )
        for bits in (3, 4, 8)
        for version in ((1, 2) if bits == 4 else (1,))  # of 8 bits the setting is believed, which no file of these has
    },
    "gptq version 2": (lambda n, k: gptq(n, k, version=2), "INT4"),
    "gptq whole columns": (lambda n, k: gptq(n, k, group=k), "INT4"),
    "gptq in an order": (lambda n, k: gptq(n, k, ordered=True, symmetric=False), "INT4"),
    "gptq 3 bit in an order": (lambda n, k: gptq(n, k, bits=3, ordered=True), "INT3"),
    "awq": (awq, "INT4"),
    "awq whole columns": (lambda n, k: awq(n, k, k), "INT4"),
    "words 4": (lambda n, k: packed_words(n, k), "INT4"),
    "words 4 with zeros": (lambda n, k: packed_words(n, k, symmetric=False), "INT4"),
    "words 4 in an order": (lambda n, k: packed_words(n, k, ordered=True), "INT4"),
    "words 8": (lambda n, k: packed_words(n, k, bits=8, group=k), "INT8"),
    "words 3": (lambda n, k: packed_words(n, k, bits=3), "INT3"),
    "int8 by row": (lambda n, k: int8(n, k, (n, 1)), "I8C"),
    "int8, one scale": (lambda n, k: int8(n, k, ()), "I8C"),
    "int8 given": (lambda n, k: int8(n, k, (n, 1), given=True), "I8C"),
    "int8 groups": (lambda n, k: int8(n, k, (n, k // 32)), "INT8"),
    "fp8, one scale": (lambda n, k: fp8(n, k, ()), "F8T"),
    "fp8 given": (lambda n, k: fp8(n, k, (1,), given=True), "F8T"),
    "fp8 by row": (lambda n, k: fp8(n, k, (n, 1)), "F8C"),
    "fp8 groups": (lambda n, k: fp8(n, k, (n, k // 32)), "F8G"),
    "fp8 blocks": (lambda n, k: fp8(n, k, (-(-n // 128), -(-k // 128)), (128, 128)), "F8B"),
    "nvfp4 of modelopt": (lambda n, k: nvfp4(n, k, "modelopt"), "NVFP4"),
    "nvfp4": (lambda n, k: nvfp4(n, k, "compressed-tensors"), "NVFP4"),
    "mxfp4": (lambda n, k: mxfp4(n, k, False), "MXFP4"),
    "mxfp4 blocks": (lambda n, k: mxfp4(n, k, True), "MXFP4"),
    "nf4": (nf4, "NF4"),
    "fp4 of bitsandbytes": (lambda n, k: nf4(n, k, kind="fp4"), "FP4"),
    "nf4 plain": (lambda n, k: nf4(n, k, nested=False), "NF4"),
    "bitsandbytes int8": (bitsandbytes_int8, "I8C"),
}  # fmt: skip
