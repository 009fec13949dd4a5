"""GGUF block decoders against the independent `gguf` package, on random bytes of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trireme.backends.cpu.methods import Packed
from trireme.backends.cpu.weights import KIND_OF_GGUF
from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.hub.weights import Weight
from trireme.quant import decode
from trireme.quant import gguf as decoders

reference = pytest.importorskip("gguf")

# Where each block keeps its f16 scales: random bytes there would be infinities and not-a-numbers.
SCALE_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "Q1_0": (0,),
    "MXFP4": (),
    "NVFP4": (),
}


def random_rows(kind: str, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Rows of random blocks with finite scales of either sign."""
    generator = np.random.default_rng(seed)
    size = decoders.BLOCKS[kind][1]
    raw = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for offset in SCALE_OFFSETS[kind]:
        scales = generator.uniform(-2, 2, (rows, blocks, 1)).astype("<f2")
        raw[:, :, offset : offset + 2] = scales.view(np.uint8)
    if kind == "IQ1_M":  # its scale is spread over four numbers: keep it below one
        raw[:, :, 55] &= 0x3F
    if kind == "NVFP4":  # its scales have no sign
        raw[:, :, :4] &= 0x7F
    return raw.reshape(rows, blocks * size)


def expected(kind: str, raw: np.ndarray) -> torch.Tensor:
    if kind == "Q1_0":  # the package has no reference for it
        blocks = raw.reshape(len(raw), -1, 18)
        bits = np.unpackbits(blocks[:, :, 2:], axis=-1, bitorder="little").astype(np.float32)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").astype(np.float32)
        return torch.from_numpy(((2 * bits - 1) * scales).reshape(len(raw), -1))
    values = reference.quants.dequantize(raw, reference.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(values))


def test_every_kind_is_covered() -> None:
    assert tuple(SCALE_OFFSETS) == decoders.KINDS == tuple(decoders.BLOCKS)


@pytest.mark.parametrize("kind", decoders.KINDS)
def test_block_sizes(kind: str) -> None:
    assert decoders.BLOCKS[kind] == reference.GGML_QUANT_SIZES[reference.GGMLQuantizationType[kind]]


@pytest.mark.parametrize("rows, blocks", [(1, 1), (1, 7), (3, 1), (130, 9)])
@pytest.mark.parametrize("kind", decoders.KINDS)
def test_equals_the_reference_bit_for_bit(kind: str, rows: int, blocks: int) -> None:
    raw = random_rows(kind, rows, blocks, seed=rows)
    values = decoders.decode_blocks(kind, torch.from_numpy(raw))
    assert values.dtype == torch.float32
    assert values.shape == (rows, blocks * decoders.BLOCKS[kind][0])
    assert values.is_contiguous()
    assert torch.equal(values, expected(kind, raw))


@pytest.mark.parametrize("chunk_values", [1, 32, 768])
@pytest.mark.parametrize("kind", decoders.KINDS)
def test_chunks_do_not_show(kind: str, chunk_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_rows(kind, 5, 3)
    monkeypatch.setattr(decoders, "CHUNK_VALUES", chunk_values)
    assert torch.equal(decoders.decode_blocks(kind, torch.from_numpy(raw)), expected(kind, raw))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", decoders.KINDS)
def test_bytes_at_an_odd_address(kind: str, rows: int) -> None:
    raw = random_rows(kind, rows, 1)
    file = torch.cat([torch.zeros(1, dtype=torch.uint8), torch.from_numpy(raw).flatten()])
    assert torch.equal(decoders.decode_blocks(kind, file[1:].view(rows, -1)), expected(kind, raw))


@pytest.mark.parametrize("kind", decoders.KINDS)
def test_a_slice_of_columns(kind: str) -> None:
    raw = random_rows(kind, 6, 4)
    values, size = decoders.BLOCKS[kind]
    middle = torch.from_numpy(raw)[:, size : 3 * size]
    assert torch.equal(decoders.decode_blocks(kind, middle), expected(kind, raw)[:, values : 3 * values])


@pytest.mark.parametrize("kind", decoders.KINDS)
def test_the_input_is_left_alone(kind: str) -> None:
    raw = torch.from_numpy(random_rows(kind, 1, 1))
    before = raw.clone()
    decoders.decode_blocks(kind, raw)
    assert torch.equal(raw, before)


def test_every_entry_of_the_iq2_codebook() -> None:
    """64 runs name the 256 entries in turn, and their 28 sign bits pass through all 128 patterns twice."""
    raw = np.zeros((1, 8, 66), dtype=np.uint8)
    raw[:, :, :2] = np.array([1.0], dtype="<f2").view(np.uint8)
    runs = np.zeros((64, 8), dtype=np.uint8)
    entries = np.arange(256, dtype=np.uint32).reshape(64, 4)
    runs[:, :4] = entries
    words = np.bitwise_or.reduce((entries & 127) << np.array([0, 7, 14, 21], dtype=np.uint32), axis=1)
    runs[:, 4:] = words.astype("<u4")[:, None].view(np.uint8)
    raw[:, :, 2:] = runs.reshape(1, 8, 64)
    flat = raw.reshape(1, -1)
    assert torch.equal(decoders.decode_blocks("IQ2_XXS", torch.from_numpy(flat)), expected("IQ2_XXS", flat))


@pytest.mark.parametrize("kind", decoders.IN_GROUPS)
def test_numbers_and_scales_are_those_of_the_blocks(kind: str) -> None:
    raw = random_rows(kind, 5, 3)
    if kind == "MXFP4":
        raw.reshape(5, 3, -1)[:, :, 0] %= 255  # the last power stands for no number
    found = decoders.in_groups(kind, torch.from_numpy(raw))
    assert found.group == 32 and found.codes.element_size() == 1
    assert torch.equal(found.values(), expected(kind, raw))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", [kind for kind in decoders.KINDS if kind != "NVFP4"])  # whose scales are always finite
def test_scales_that_are_no_numbers_are_refused(kind: str, bad: float) -> None:
    """By the tensor's name, wherever the scale is; and nothing that is a number is refused."""
    good = random_rows(kind, 6, 4)
    if kind == "MXFP4":
        good.reshape(6, 4, -1)[:, :, 0] %= 255
    good_weight = Weight("blk.0.ffn_up.weight", kind, good)
    decode(good_weight, torch.float32)
    size = decoders.BLOCKS[kind][1]
    for offset in SCALE_OFFSETS[kind] or ((0,) if kind == "MXFP4" else (48,)):
        raw = good.copy()
        block = raw[4, 2 * size : 3 * size]
        if kind == "MXFP4":
            block[0] = 255
        elif kind == "IQ1_M":  # four bits in the high half of every second byte
            nibbles = int(np.array(bad, dtype="<f2").view("<u2"))
            for place in range(4):
                block[49 + 2 * place] = block[49 + 2 * place] & 15 | (nibbles >> 4 * place & 15) << 4
        else:
            block[offset : offset + 2] = np.array([bad], dtype="<f2").view(np.uint8)
        assert not torch.isfinite(decoders.decode_blocks(kind, torch.from_numpy(raw))).all() or kind == "MXFP4"
        with pytest.raises(BadCheckpoint, match=r"blk\.0\.ffn_up\.weight"):
            decode(Weight("blk.0.ffn_up.weight", kind, raw), torch.float32)
        if kind in KIND_OF_GGUF:
            with pytest.raises(BadCheckpoint, match=r"blk\.0\.ffn_up\.weight"):
                Packed.load([Weight("blk.0.ffn_up.weight", kind, raw)], None, torch.float32, torch.device("cpu"))


def test_no_rows() -> None:
    assert decoders.decode_blocks("Q4_K", torch.empty(0, 288, dtype=torch.uint8)).shape == (0, 512)


def test_unknown_kind() -> None:
    with pytest.raises(UnsupportedModel, match="Q9_Z"):
        decoders.decode_blocks("Q9_Z", torch.zeros(1, 50, dtype=torch.uint8))


@pytest.mark.parametrize("kind", decoders.KINDS)
def test_rows_that_are_not_whole_blocks(kind: str) -> None:
    size = decoders.BLOCKS[kind][1]
    with pytest.raises(BadCheckpoint, match=kind):
        decoders.decode_blocks(kind, torch.zeros(2, size + 1, dtype=torch.uint8))


@pytest.mark.parametrize("raw", [torch.zeros(18, dtype=torch.uint8), torch.zeros(1, 18, dtype=torch.int8)])
def test_not_rows_of_bytes(raw: torch.Tensor) -> None:
    with pytest.raises(BadCheckpoint, match="Q4_0"):
        decoders.decode_blocks("Q4_0", raw)
