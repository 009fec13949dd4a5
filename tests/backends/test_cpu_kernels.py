"""The C kernels against double-precision references, on every instruction set this machine can run."""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.backends.cpu import library
from trireme.backends.cpu.library import KV_KINDS
from trireme.backends.cpu.program import Program, Sequences, Transform
from trireme.backends.cpu.weights import PackedWeight
from trireme.errors import BackendUnavailable, UnsupportedModel
from trireme.ops import CacheSpec, Choosing, KVCache, kv_kinds

try:
    ISAS = library.available_isas()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

FLOAT_KINDS = ("f32", "bf16", "f16", "q4", "q4_min", "q8", "nf4")
SHAPES = ((1, 1, 64), (1, 50, 100), (2, 16, 32), (3, 33, 576), (5, 64, 192), (16, 31, 96), (37, 70, 200), (70, 40, 320))


# Users of a CPU get its best instruction set; the others are wide.
@pytest.fixture(params=[*ISAS[:1], *(pytest.param(isa, marks=pytest.mark.wide) for isa in ISAS[1:])], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library.set_isa(request.param)
    library.set_threads(2)
    torch.manual_seed(0)
    yield request.param
    library.set_isa("auto")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def multiply(weight: PackedWeight, x: torch.Tensor, **options: object) -> torch.Tensor:
    output = torch.full((len(x), weight.rows + 3), 7.0)
    program = Program()
    program.linear(weight, x, output[:, : weight.rows], **options)  # type: ignore[arg-type]
    program.run()
    assert (output[:, weight.rows :] == 7).all(), "wrote past the row"
    return output[:, : weight.rows]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def tolerance(kind: str) -> float:
    return 1e-6 if kind == "f32" else 0.012  # activations are rounded to 8 bits: about 0.5 % each on noise


def bound(kind: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What rounding alone may change: half an int8 step of the row per weight, or half a bf16 step of both factors."""
    x, weight = x.double().abs(), weight.double().abs()
    if kind == "f32":
        return 2e-6 * x @ weight.T
    return x.amax(-1, keepdim=True) / 253 * weight.sum(-1) + 0.0079 * x @ weight.T


# --- weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_packing_floats_stays_near(kind: str) -> None:
    weight = torch.randn(37, 200)
    limit = {"f32": 0.0, "bf16": 0.004, "f16": 0.0005, "q8": 0.01, "q4": 0.13, "q4_min": 0.12, "nf4": 0.12}[kind]
    assert relative(PackedWeight.from_floats(kind, weight).floats(), weight) <= limit


def half(raw: np.ndarray) -> np.ndarray:
    return raw.copy().view(np.float16).astype(np.float64)


def decode_block(kind: str, raw: np.ndarray) -> np.ndarray:
    """One GGUF block as doubles, value by value."""
    if kind in ("q4_0", "q4_1", "q5_0"):
        at = {"q4_0": 2, "q4_1": 4, "q5_0": 6}[kind]
        q = np.concatenate([raw[at:] & 15, raw[at:] >> 4]).astype(np.int64)
        if kind == "q5_0":
            q |= np.unpackbits(raw[2:6], bitorder="little").astype(np.int64) << 4
        return half(raw[:2]) * (q - {"q4_0": 8, "q4_1": 0, "q5_0": 16}[kind]) + (half(raw[2:4]) if kind == "q4_1" else 0)
    if kind == "q8_0":
        return half(raw[:2]) * raw[2:].view(np.int8)
    if kind in ("iq4_nl", "mxfp4"):
        at, table = (2, IQ4) if kind == "iq4_nl" else (1, E2M1)
        scale = half(raw[:2]) if kind == "iq4_nl" else 2.0 ** (float(raw[0]) - 127)
        return scale * table[np.concatenate([raw[at:] & 15, raw[at:] >> 4])]
    return decode_super_block(kind, raw)


IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_super_block(kind: str, raw: np.ndarray) -> np.ndarray:
    values = np.empty(256)
    for i in range(256):
        if kind == "q4_k":
            group, packed = i // 32, raw[4:16].astype(int)
            if group < 4:
                scale, minimum = packed[group] & 63, packed[group + 4] & 63
            else:
                scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
                minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
            q = int(raw[16 + i // 64 * 32 + i % 32]) >> (4 if i % 64 >= 32 else 0) & 15
            values[i] = half(raw[:2])[0] * scale * q - half(raw[2:4])[0] * minimum
        elif kind == "iq4_xs":
            group, k = i // 32, i % 32
            scale = raw[4 + group // 2] >> 4 * (group % 2) & 15 | (raw[2:4].view(np.uint16)[0] >> 2 * group & 3) << 4
            values[i] = half(raw[:2])[0] * (int(scale) - 32) * IQ4[raw[8 + 16 * group + k % 16] >> (0 if k < 16 else 4) & 15]
        else:
            part, k = i % 128 // 32, i % 32
            low = int(raw[i // 128 * 64 + part % 2 * 32 + k]) >> (4 if part >= 2 else 0) & 15
            high = int(raw[128 + i // 128 * 32 + k]) >> 2 * part & 3
            values[i] = half(raw[208:210])[0] * int(raw[192 + i // 16].astype(np.int8)) * ((low | high << 4) - 32)
    return values


GGUF = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q8_0": (32, 34), "q5_0": (32, 22), "q4_k": (256, 144), "q6_k": (256, 210),
    "iq4_nl": (32, 18), "iq4_xs": (256, 136), "mxfp4": (32, 17),
}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes with sane scales, and what they mean."""
    values, size = GGUF[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    if kind == "mxfp4":
        raw[:, :, 0] = generator.integers(118, 125, raw.shape[:2])
    for at in {"q4_1": (0, 2), "q4_k": (0, 2), "q6_k": (208,), "mxfp4": ()}.get(kind, (0,)):
        scales = generator.uniform(-0.02, 0.02, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    meaning = np.stack([np.concatenate([decode_block(kind, block) for block in row]) for row in raw])
    return torch.from_numpy(raw.reshape(rows, -1)), torch.from_numpy(meaning)


@pytest.mark.parametrize("kind", GGUF)
def test_gguf_blocks_keep_every_weight(kind: str) -> None:
    blocks, meaning = random_blocks(kind, 19, 512)
    packed = PackedWeight.from_gguf(kind, blocks, 512)
    lost = 2.0**-11 if kind == "iq4_xs" else 3e-7  # its scales are products, and kept as halves
    assert torch.allclose(packed.floats().double(), meaning, rtol=lost, atol=1e-7)


@pytest.mark.parametrize("kind", GGUF)
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_gguf_products(kind: str, rows: int) -> None:
    blocks, meaning = random_blocks(kind, 45, 768)
    x = torch.randn(rows, 768)
    assert relative(multiply(PackedWeight.from_gguf(kind, blocks, 768), x), x.double() @ meaning.T) < 0.012


def test_extreme_bytes_do_not_saturate() -> None:
    raw = np.full((16, 4, 34), 0x80, dtype=np.uint8)  # Q8_0 weights of -128, which no quantiser writes but a file may hold
    raw[:, :, :2] = np.float16(0.5).reshape(1).view(np.uint8)
    packed = PackedWeight.from_gguf("q8_0", torch.from_numpy(raw.reshape(16, -1)), 128)
    for rows in (1, 40):
        x = torch.ones(rows, 128)
        assert torch.allclose(multiply(packed, x), torch.full((rows, 16), -64.0 * 128), rtol=1e-5)
        assert torch.allclose(multiply(packed, -x), torch.full((rows, 16), 64.0 * 128), rtol=1e-5)


def test_fused_projections_are_filled_in_pieces() -> None:
    parts = [torch.randn(n, 96) for n in (20, 7, 9)]
    packed = PackedWeight("q8", 36, 96)
    for first, part in zip((0, 20, 27), parts, strict=True):
        packed.put_floats(first, part)
    assert torch.equal(packed.floats(), PackedWeight.from_floats("q8", torch.cat(parts)).floats())


def test_packing_from_halves_equals_packing_from_floats() -> None:
    weight = torch.randn(20, 70)
    for dtype in (torch.float16, torch.bfloat16):
        narrow = weight.to(dtype)
        assert torch.equal(PackedWeight.from_floats("q8", narrow).floats(), PackedWeight.from_floats("q8", narrow.float()).floats())


def test_impossible_packing_is_refused() -> None:
    with pytest.raises(UnsupportedModel):
        PackedWeight("q4", 16, 64).put_gguf(0, "q4_1", torch.zeros(16, 40, dtype=torch.uint8))


# --- matrix products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(kind: str, shape: tuple[int, int, int]) -> None:
    rows, out, width = shape
    generator = torch.Generator().manual_seed(rows)
    weight = PackedWeight.from_floats(kind, torch.randn(out, width, generator=generator))
    x = torch.randn(rows, width, generator=generator)
    actual, expected = multiply(weight, x), x.double() @ weight.floats().double().T
    assert ((actual.double() - expected).abs() <= bound(kind, x, weight.floats())).all()
    if out * rows > 30:
        assert relative(actual, expected) < tolerance(kind)


@pytest.mark.parametrize("kind", [*FLOAT_KINDS, "q4_k", "q6_k"])
def test_products_of_more_weights_and_columns_than_are_decoded_at_a_time(kind: str) -> None:
    library.set_threads(1)
    rows, columns = 13 * 16 + 5, 2048 + 512  # 2048 columns of 12 tiles are decoded together
    if kind in FLOAT_KINDS:
        weight = PackedWeight.from_floats(kind, torch.randn(rows, columns - 30))
    else:
        values, size = GGUF[kind]
        blocks = torch.randint(0, 60, (rows, columns // values * size), dtype=torch.uint8)  # as halves, small and finite
        weight = PackedWeight.from_gguf(kind, blocks, columns)
    x = torch.randn(67, weight.columns)
    assert relative(multiply(weight, x), x.double() @ weight.floats().double().T) < 0.012


@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("rows", [1, 20, 48])
@pytest.mark.parametrize(("biased", "accumulate"), [(True, True), (True, False), (False, True)])
def test_bias_and_accumulation(kind: str, rows: int, biased: bool, accumulate: bool) -> None:
    weight, bias = PackedWeight.from_floats(kind, torch.randn(35, 64)), torch.randn(35)
    x, output = torch.randn(rows, 64), torch.randn(rows, 35)
    expected = multiply(weight, x) + bias * biased + output * accumulate
    program = Program()
    program.linear(weight, x, output, bias=bias if biased else None, accumulate=accumulate)
    program.run()
    assert torch.allclose(output, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["q4_min", "bf16"])
@pytest.mark.parametrize("rows", [16, 300, 513])
def test_rows_in_parts_equal_rows_at_once(kind: str, rows: int) -> None:
    """With many threads for few weights, the rows of a product are shared out as well."""
    weight, x, outputs = PackedWeight.from_floats(kind, torch.randn(100, 128)), torch.randn(rows, 128), []
    for threads in (1, 16):
        library.set_threads(threads)
        outputs.append(multiply(weight, x))
    assert torch.equal(*outputs)


def test_no_rows_is_no_work() -> None:
    program = Program()
    program.linear(PackedWeight.from_floats("q4", torch.randn(16, 64)), torch.empty(0, 64), torch.empty(0, 16))
    program.run()


def test_zero_input_gives_zero() -> None:
    for kind in FLOAT_KINDS:
        weight = PackedWeight.from_floats(kind, torch.randn(16, 64))
        assert torch.equal(multiply(weight, torch.zeros(3, 64)), torch.zeros(3, 16))


def test_rows_do_not_depend_on_their_neighbours(isa: str) -> None:
    """One row alone equals the same row among others, where both take the same path."""
    weight, x = PackedWeight.from_floats("q4_min", torch.randn(48, 128)), torch.randn(13, 128)
    together = multiply(weight, x)
    for row in range(13):
        assert torch.allclose(multiply(weight, x[row : row + 1])[0], together[row], atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 50), out=st.integers(1, 60), width=st.integers(1, 300), kind=st.sampled_from(FLOAT_KINDS))
def test_any_size(rows: int, out: int, width: int, kind: str) -> None:
    x, floats = torch.randn(rows, width), torch.randn(out, width)
    weight = PackedWeight.from_floats(kind, floats)
    expected = x.double() @ weight.floats().double().T
    assert ((multiply(weight, x).double() - expected).abs() <= bound(kind, x, weight.floats())).all()


# --- norms, activations, embedding, choosing ---------------------------------------------------------------------------------


def transform_reference(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x, functional = x.double(), torch.nn.functional
    if kind == "none":
        return x
    if kind == "rms_norm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1) + bias.double()
    if kind == "layer_norm":
        return functional.layer_norm(x, x.shape[-1:], weight.double() + 1, bias.double(), 1e-5)
    if kind.endswith("_mul"):
        gate, up = x.chunk(2, -1)
        return transform_reference(kind[:-4], gate, weight, bias) * up
    if kind == "relu_squared":
        return functional.relu(x).square()
    if kind == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    return {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu}[kind](x)


@pytest.mark.parametrize("kind", library.TRANSFORMS)
@pytest.mark.parametrize("width", [3, 64, 77])
def test_row_maps(kind: str, width: int) -> None:
    x = torch.randn(5, 2 * width if kind.endswith("_mul") else width) * 4
    weight, bias = torch.randn(width), torch.randn(width)
    output, summed = torch.empty(5, width), torch.ones(5, width)
    program, transform = Program(), Transform(kind, weight, bias, 1e-5, 1.0)
    program.row_map(transform, x, output)
    program.row_map(transform, x, summed, accumulate=True)
    residual, after = torch.randn(x.shape), torch.empty(5, width)
    added = (residual + x).double()
    program.row_map(transform, x, after, residual=residual) if not kind.endswith("_mul") else None
    program.run()
    expected = transform_reference(kind, x, weight, bias)
    assert torch.allclose(output.double(), expected, rtol=2e-5, atol=2e-5)
    assert torch.allclose(summed.double(), expected + 1, rtol=2e-5, atol=2e-5)
    if not kind.endswith("_mul"):
        assert torch.equal(residual.double(), added)
        assert torch.allclose(after.double(), transform_reference(kind, added, weight, bias), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["rms_norm", "silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("rows", [1, 40])
def test_transform_before_a_product(kind: str, rows: int) -> None:
    width = 100
    x = torch.randn(rows, 2 * width if kind.endswith("_mul") else width)
    norm, bias = torch.randn(width), torch.zeros(width)
    weight = PackedWeight.from_floats("q8", torch.randn(40, width))
    expected = transform_reference(kind, x, norm, bias) @ weight.floats().double().T
    assert relative(multiply(weight, x, transform=Transform(kind, norm, bias, 1e-5, 1.0)), expected) < 0.012


@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_embedding_gathers_packed_rows(kind: str) -> None:
    table, tokens = PackedWeight.from_floats(kind, torch.randn(70, 48)), ints(3, 69, 0, 3)
    output, program = torch.empty(4, 48), Program()
    program.embedding(table, tokens, output, scale=2.0)
    program.run()
    assert torch.equal(output, table.floats()[tokens.long()] * 2)


def test_gather_and_top_k() -> None:
    source, picked = torch.randn(6, 50), torch.empty(3, 50)
    source[4, 7] = source[4, 9] = 9.0  # equals: the lower id first
    broken, broken_id = torch.randn(2, 50), torch.empty(2, 1, dtype=torch.int32)
    broken[0, 33] = broken[1, 49] = math.nan  # as torch has it: what is no number is largest
    best, best_id = torch.empty(3, 1), torch.empty(3, 1, dtype=torch.int32)
    five, five_ids = torch.empty(3, 5), torch.empty(3, 5, dtype=torch.int32)
    program = Program()
    index = torch.tensor([4, 0, 5], dtype=torch.int32)
    program.gather(source, index, picked)
    program.top_k(picked, best, best_id)
    program.top_k(picked, five, five_ids)
    ignored = torch.empty(2, 1)
    program.top_k(broken, ignored, broken_id)
    program.run()
    expected = source[[4, 0, 5]]
    assert torch.equal(picked, expected)
    assert broken_id[:, 0].tolist() == [33, 49]
    values, ids = expected.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best_id[:, 0].long(), ids[:, 0]) and torch.equal(best, values[:, :1])
    assert torch.equal(five_ids.long(), ids[:, :5]) and torch.equal(five, values[:, :5])


# --- rope and attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 48, 64])
def test_rope_writes_rotated_keys_into_slots(interleaved: bool, rotary: int) -> None:
    tokens, heads, kv_heads, width = 5, 6, 2, 64
    projected = torch.randn(tokens, (heads + 2 * kv_heads) * width)
    query, key, value = projected.clone().split([heads * width, kv_heads * width, kv_heads * width], -1)
    angles = torch.outer(torch.arange(40.0), 10000 ** (-torch.arange(0, rotary, 2) / rotary))
    positions, slots = ints(7, 0, 39, 3, 4), ints(9, 2, -1, 5, 0)
    keys, values = torch.zeros(12, kv_heads, width), torch.zeros(12, kv_heads, width)
    work = torch.cat([query, key, value], -1)
    q, k, v = (part.unflatten(-1, (-1, width)) for part in work.split([heads * width, kv_heads * width, kv_heads * width], -1))
    program = Program()
    table = torch.cat([angles.cos(), angles.sin()], -1)
    program.rope_store(q, k, v, positions, slots, table, KVCache(keys, values), interleaved=interleaved)
    program.run()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        x = x.double().unflatten(-1, (-1, width)).clone()
        angle = angles[positions.long()].double()[:, None]
        first = slice(0, rotary, 2) if interleaved else slice(0, rotary // 2)
        second = slice(1, rotary, 2) if interleaved else slice(rotary // 2, rotary)
        a, b = x[..., first].clone(), x[..., second].clone()
        x[..., first], x[..., second] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return x

    assert torch.allclose(q.double(), rotated(query), atol=1e-5)
    expected_keys, expected_values = torch.zeros(12, kv_heads, width).double(), torch.zeros(12, kv_heads, width).double()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_keys[slot], expected_values[slot] = rotated(key)[i], value.double().unflatten(-1, (-1, width))[i]
    assert torch.allclose(keys.double(), expected_keys, atol=1e-5) and torch.allclose(values.double(), expected_values)


def test_rope_with_norms_and_int8_cache() -> None:
    tokens, heads, kv_heads, width = 3, 4, 2, 32
    q, k, v = torch.randn(tokens, heads, width), torch.randn(tokens, kv_heads, width), torch.randn(tokens, kv_heads, width)
    keys, values = torch.zeros(4, kv_heads, width, dtype=torch.int8), torch.zeros(4, kv_heads, width, dtype=torch.int8)
    scales, norms = (torch.zeros(4, kv_heads), torch.zeros(4, kv_heads)), (torch.randn(width), torch.randn(width))
    plain_q, plain_k, plain_v = q.double(), k.double(), v.double()
    program = Program()
    both = Transform(weight=norms[0], bias=norms[1], epsilon=1e-6)
    positions, slots = ints(0, 1, 2), ints(3, 1, 0)
    program.rope_store(q, k, v, positions, slots, None, KVCache(keys, values, scales, kind="int8"), both)
    program.run()
    zero = torch.zeros(width)
    expected_k = transform_reference("rms_norm", plain_k, norms[1] - 1, zero)
    assert torch.allclose(q.double(), transform_reference("rms_norm", plain_q, norms[0] - 1, zero), rtol=1e-4, atol=1e-4)
    for token, slot in enumerate((3, 1, 0)):
        for cache, scale, expected in ((keys, scales[0], expected_k), (values, scales[1], plain_v)):
            step = expected[token].abs().amax(-1, keepdim=True) / 127
            assert torch.allclose(scale[slot].double()[:, None], step, rtol=1e-5)
            assert ((cache[slot].double() * step - expected[token]).abs() <= 0.501 * step).all(), "not the nearest byte"


@pytest.mark.parametrize("kind", ["fp8", "int4", "int8, scaled"])
@pytest.mark.parametrize("width", [64, 80, 20])
def test_kept_as_the_plain_body_keeps_it(kind: str, width: int, isa: str) -> None:
    """To the bit: every number of fp8, numbers between two of them, zeros, and what is no number."""
    fp8 = torch.arange(256).to(torch.uint8).view(kv_kinds.FP8).float()
    found = torch.cat([fp8, (fp8[1:] + fp8[:-1]) / 2, torch.randn(5 * width), 600 * torch.randn(width), torch.zeros(width)])
    found = torch.cat([found, torch.randn(width) * 1e-3, torch.full((width,), 0.3)])
    x = found[: len(found) // (3 * width) * 3 * width].view(-1, 3, width)
    made = [cache_of(kind, torch.zeros_like(x), torch.zeros_like(x)) for _ in range(2)]
    made[0].put(x, x, torch.arange(len(x)))
    slots, program = torch.arange(len(x), dtype=torch.int32), Program()
    query, key, value = (x.clone() for _ in range(3))
    program.rope_store(query, key, value, slots, slots, None, made[1])
    program.run()
    for plain, ours in zip(made[0].at(slots.long()), made[1].at(slots.long()), strict=True):
        assert torch.equal(plain.nan_to_num(7e7), ours.nan_to_num(7e7))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **o: object) -> torch.Tensor:
    """One sequence, in double: q [n, heads, d], k and v [context, kv_heads, d]."""
    n, heads, context = q.shape[0], q.shape[1], k.shape[0]
    k, v = (t.double().repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * o["scale"]
    if o.get("softcap"):
        scores = o["softcap"] * torch.tanh(scores / o["softcap"])
    distance = torch.arange(context)[None] - torch.arange(context - n, context)[:, None]
    if o.get("slopes") is not None:
        scores = scores + o["slopes"].double()[:, None, None] * distance
    hidden = distance > 0 if o.get("causal", True) else torch.zeros_like(distance, dtype=torch.bool)
    at = torch.arange(context)
    if o.get("chunked"):
        hidden = hidden | (at[None] // o["window"] < at[context - n :, None] // o["window"])
    elif o.get("window"):
        hidden = hidden | (distance <= -o["window"])
    scores = scores.masked_fill(hidden, -math.inf)
    if o.get("sinks") is not None:
        scores = torch.cat([scores, o["sinks"].double()[:, None, None].expand(heads, n, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :context], v)


PAGE = 4
LENGTHS = ((1, 1), (1, 5), (3, 70), (1, 700), (130, 130), (40, 200))  # (new tokens, context) of each sequence
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "window": {"window": 33},
    "chunks": {"window": 33, "chunked": True},
    "chunks, softcap": {"window": 64, "chunked": True, "softcap": 8.0},
    "softcap": {"softcap": 5.0},
    "slopes": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.06, 0.03, 0.01])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0, 1.0, 2.0])},
    "everything": {"window": 50, "softcap": 8.0, "slopes": torch.linspace(0.01, 0.3, 6)},
    "both ways": {"causal": False},
}


def cache_of(kind: str, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
    """Keys and values kept as this kind by the plain body; an fp8 cache has factors of its own, and so has a scaled one of int8."""
    heads, width = keys.shape[1:]
    kind, _, scaled = kind.partition(", ")
    zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)  # noqa: E731
    cache = KVCache.allocate(CacheSpec((heads, width), (heads, width), kind), len(keys), torch.float32, zeros)
    if kind == "fp8" or scaled:
        cache.factors = torch.linspace(0.01, 0.3, heads), torch.linspace(0.5, 0.02, heads)
    cache.put(keys, values, torch.arange(len(keys)))
    return cache


def run_attention(lengths: tuple[tuple[int, int], ...], kv_heads: int, width: int, kind: str, **options: object) -> float:
    """The largest error over all sequences, with pages scattered and in order."""
    generator = torch.Generator().manual_seed(1)
    heads = 6
    pages = [-(-context // PAGE) for _, context in lengths]
    order = torch.randperm(2 * sum(pages), generator=generator)[: sum(pages)].int()
    order[: sum(pages) // 2] = order[: sum(pages) // 2].sort().values  # scattered pages and rising ones
    keys, values = (torch.randn(2 * sum(pages) * PAGE, kv_heads, width, generator=generator) for _ in range(2))
    cache = cache_of(kind, keys, values)
    plain = cache.at(torch.arange(len(keys)))
    news, contexts = [n for n, _ in lengths], [c for _, c in lengths]
    wide = torch.randn(sum(news), heads * width + 5, generator=generator)
    query = wide[:, : heads * width].unflatten(-1, (heads, width))
    output, program = torch.empty(sum(news), heads * width), Program()
    table = torch.zeros(len(lengths) + 1, max(pages), dtype=torch.int32)
    for row, part in enumerate(order.split(pages)):
        table[row + 1, : len(part)] = part
    starts = torch.tensor([0, *np.cumsum(news)], dtype=torch.int32)
    page_rows = torch.arange(1, len(lengths) + 1, dtype=torch.int32)
    sequences = Sequences(starts, ints(*contexts), table, page_rows, PAGE)
    program.attention(query, output, cache, sequences, width**-0.5, **options)  # type: ignore[arg-type]
    program.run()
    worst = 0.0
    for row, (new, context) in enumerate(lengths):
        slots = (table[row + 1, :, None] * PAGE + torch.arange(PAGE)).flatten()[:context]
        mine = slice(int(starts[row]), int(starts[row]) + new)
        expected = attend(query[mine], plain[0][slots], plain[1][slots], scale=width**-0.5, **options)
        worst = max(worst, float((output[mine].unflatten(-1, (heads, width)) - expected).abs().max()))
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KV_KINDS)
def test_attention(variant: str, kind: str) -> None:
    assert run_attention(LENGTHS, 2, 64, kind, **VARIANTS[variant]) < 2e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_rounded_attention(variant: str, isa: str) -> None:
    """AMX multiplies prompt chunks as bf16 where it may."""
    assert run_attention(LENGTHS, 2, 64, "plain", rounded=True, **VARIANTS[variant]) < (0.02 if isa == "amx" else 2e-5)


@pytest.mark.parametrize(("kv_heads", "width"), [(6, 64), (1, 80), (3, 128), (2, 20), (2, 256)])
def test_attention_shapes(kv_heads: int, width: int, isa: str) -> None:
    assert run_attention(((1, 90), (17, 100)), kv_heads, width, "plain") < 2e-5
    assert run_attention(((1, 90), (17, 100)), kv_heads, width, "plain", rounded=True) < (0.02 if isa == "amx" else 2e-5)


@pytest.mark.parametrize("threads", [1, 5])
def test_long_contexts_are_split_among_threads(threads: int) -> None:
    library.set_threads(threads)
    assert run_attention(((1, 3000), (2, 40)), 2, 64, "plain") < 2e-5
    assert run_attention(((1, 3000),), 2, 64, "plain", window=700, sinks=VARIANTS["sinks"]["sinks"]) < 2e-5


@pytest.mark.parametrize("kind", KV_KINDS)
@pytest.mark.parametrize(("kv_heads", "width"), [(6, 64), (3, 64), (1, 64), (6, 256), (2, 20)])
def test_kv_heads_of_single_queries_go_together(kv_heads: int, width: int, kind: str) -> None:
    """Beside a prompt and other queries, split and not, with fewer heads together than there are where their rows are wide."""
    library.set_threads(2)
    assert run_attention(((1, 700), (3, 290), (1, 5), (1, 256), (40, 40)), kv_heads, width, kind) < 2e-5
    assert run_attention(((1, 900),), kv_heads, width, kind, **VARIANTS["everything"]) < 2e-5


# --- the pool and the build -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_thread_counts_agree(threads: int) -> None:
    weight, x = PackedWeight.from_floats("q4", torch.randn(200, 64)), torch.randn(9, 64)
    expected = multiply(weight, x)
    library.set_threads(threads)
    for _ in range(20):
        assert torch.equal(multiply(weight, x), expected)


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="cannot run"):
        library.set_isa("mmx")


def test_a_forked_child_computes(isa: str) -> None:
    if isa != ISAS[0]:
        pytest.skip("once is enough")
    code = """
import os, torch
from trireme.backends.cpu.weights import PackedWeight
from trireme.backends.cpu.library import set_threads
set_threads(2)
weight = torch.randn(40, 64)
PackedWeight.from_floats("q4", weight)
child = os.fork()
if child == 0:
    os._exit(0 if PackedWeight.from_floats("f32", weight).floats().equal(weight) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    root = pathlib.Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


def weights_kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Each token's weight by the definition, in double precision: k best, then the share p, then the least likely cut off."""
    weights = np.exp((logits - logits.max()) / temperature)
    ranked = np.argsort(-logits, kind="stable")
    kept = np.zeros(len(logits))
    best = ranked[: top_k or None]
    whole, before = weights[best].sum(), 0.0
    for token in best:
        if token == best[0] or (before < top_p * whole and weights[token] >= min_p):
            kept[token] = weights[token]
        before += weights[token]
    return kept


@pytest.mark.parametrize("width", [1, 5, 300, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
def test_sampling_by_the_definition(width: int, spread: float) -> None:
    """The token's share of the cumulated weight holds the random number, but for what rounding moves."""
    rows, random = 48, np.random.default_rng(width)
    logits = (random.standard_normal((rows, width)) * spread).astype(np.float32)
    logits[::4] = np.round(logits[::4])  # many equals
    if width > 5:
        logits[1::3, ::2] = -np.inf
    temperature = random.choice([0.1, 0.7, 1.0, 3.0], rows).astype(np.float32)
    top_k = random.choice([0, 1, 3, 40, width], rows).astype(np.int32)
    top_p, min_p = (random.choice(choices, rows).astype(np.float32) for choices in ([0.0, 0.3, 0.9, 1.0], [0.0, 0.0, 0.05, 1.0]))
    uniform = random.choice([0.0, 0.25, 0.5, 1 - 2**-24], rows).astype(np.float32)
    chosen, program = torch.full((rows,), -7), Program()
    columns = (torch.from_numpy(x) for x in (temperature, top_k, top_p, min_p))
    program.sample(torch.from_numpy(logits), Choosing(*columns), torch.from_numpy(uniform), chosen)
    program.run()
    for row, token in enumerate(chosen.tolist()):
        kept = weights_kept(logits[row].astype(float), temperature[row], top_k[row], top_p[row], min_p[row])
        passed = np.cumsum(kept) / kept.sum()
        assert kept[token] > 0
        assert passed[token] - kept[token] / kept.sum() - 1e-5 <= uniform[row] <= passed[token] + 1e-5


def test_sampling_of_rows_that_cannot_be_sampled() -> None:
    logits = torch.randn(5, 100)
    logits[0, 50], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    chosen, program = torch.full((5,), -7), Program()
    temperature = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    by = Choosing(temperature, ints(0, 0, 0, 0, 1), torch.ones(5), torch.zeros(5))
    program.sample(logits, by, torch.full((5,), 0.5), chosen)
    program.run()
    assert chosen.tolist() == [-1, -1, -1, int(logits[3].argmax()), int(logits[4].argmax())]
