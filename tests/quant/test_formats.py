"""Published formats of quantized matrices: decoded exactly, cut anywhere, refused where they are ill-formed."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.quant import packers
from trireme.errors import BadCheckpoint, TriremeError, UnsupportedModel
from trireme.hub.composite import Composite
from trireme.hub.safetensors import read_safetensors
from trireme.hub.schemes import join
from trireme.quant import decode

BASE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 160, 192  # more than a block of 128, and no multiple of it


def stored(tmp_path: pathlib.Path, tensors: dict[str, Tensor], settings: dict[str, Any] | None = None) -> Composite:
    """The one matrix of a file with these tensors."""
    file = tmp_path / "model.safetensors"
    save_file({BASE + end: value.clone(memory_format=torch.contiguous_format) for end, value in tensors.items()}, file)
    joined = join(read_safetensors(file), settings or {})
    (found,) = joined.values()
    assert isinstance(found, Composite)
    return found


@pytest.mark.parametrize("name", packers.FORMATS)
def test_decoded_exactly(name: str, tmp_path: pathlib.Path) -> None:
    packer, kind = packers.FORMATS[name]
    tensors, values = packer(ROWS, COLUMNS)
    matrix = stored(tmp_path, tensors)
    assert matrix.kind == kind and matrix.shape == (ROWS, COLUMNS) and matrix.name.startswith(BASE)
    assert torch.equal(decode(matrix, torch.float32), values)


@pytest.mark.parametrize("name", packers.FORMATS)
def test_cut_anywhere(name: str, tmp_path: pathlib.Path) -> None:
    """Rows and columns of ranks, of pieces, and in an order; also where a group, a block or a word is cut."""
    tensors, values = packers.FORMATS[name][0](ROWS, COLUMNS)
    matrix = stored(tmp_path, tensors)
    some = np.array([5, 131, 4, 77, 159])
    for rows in (slice(0, 80), slice(53, 107), slice(140, 160), some):
        for columns in (slice(0, 64), slice(64, 192), slice(33, 97), slice(190, 192)):
            for cut in (matrix.rows(rows).columns(columns), matrix.columns(columns).rows(rows)):
                assert cut.shape == tuple(values[rows, columns].shape)
                assert torch.equal(decode(cut, torch.float32), values[rows, columns]), (rows, columns)
    again = matrix.rows(slice(20, 120)).rows(np.array([3, 99, 50])).columns(slice(10, 150)).columns(slice(7, 100))
    assert torch.equal(decode(again, torch.float32), values[20:120][[3, 99, 50], 17:110])


def test_a_stack_is_read_by_part(tmp_path: pathlib.Path) -> None:
    one, two = packers.mxfp4(64, 96, True), packers.mxfp4(64, 96, True)
    two[0]["_scales"] += 1
    tensors = {end: torch.stack([one[0][end], two[0][end]]) for end in one[0]}
    matrix = stored(tmp_path, tensors)
    assert matrix.shape == (2, 64, 96)
    assert torch.equal(decode(matrix.part(0), torch.float32), one[1])
    assert torch.equal(decode(matrix.part(1).rows(slice(7, 30)).columns(slice(32, 64)), torch.float32), 2 * one[1][7:30, 32:64])


def test_zeros_are_told_by_the_values(tmp_path: pathlib.Path) -> None:
    """What the config says of them is wrong in many files."""
    for symmetric in (True, False):
        for version in (1, 2):
            tensors, values = packers.gptq(ROWS, COLUMNS, version=version, symmetric=symmetric)
            for said in ("gptq", "gptq_v2"):
                matrix = stored(tmp_path, tensors, {"checkpoint_format": said})
                assert torch.equal(decode(matrix, torch.float32), values), (symmetric, version, said)


def test_zeros_that_borrow(tmp_path: pathlib.Path) -> None:
    """A zero of 0 is stored as one less by borrowing from the next number of its word."""
    tensors, _ = packers.gptq(64, 64, symmetric=False)
    zeros = np.random.default_rng(0).integers(0, 16, (2, 64))
    zeros[:, ::5] = 0
    plain = packers.words(zeros, 4).view(np.uint32).astype(np.int64)
    tensors[".qzeros"] = torch.from_numpy(((plain - 0x11111111) & 0xFFFFFFFF).astype(np.uint32).view(np.int32))
    tensors[".qweight"].zero_()
    scales = tensors[".scales"].float().t()
    want = -(torch.from_numpy(zeros.T).float() * scales).repeat_interleave(32, 1)
    assert torch.equal(decode(stored(tmp_path, tensors), torch.float32), want)


def nothing(tensors: dict[str, Tensor]) -> None:
    """Leaves them as they are."""


def truncated(tensors: dict[str, Tensor]) -> None:
    tensors[".qweight"] = tensors[".qweight"][:-1]


def no_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[".scales"]


def bits_of_five(tensors: dict[str, Tensor]) -> None:
    tensors[".qzeros"] = tensors[".qzeros"][:, :-1].repeat(1, 2)[:, :25]


def not_a_number(tensors: dict[str, Tensor]) -> None:
    next(t for end, t in tensors.items() if "scale" in end).view(-1)[3] = float("nan")


def no_order(tensors: dict[str, Tensor]) -> None:
    tensors[".g_idx"][:40] = 0


def beyond(tensors: dict[str, Tensor]) -> None:
    tensors[".g_idx"][7] = 6


def misshapen(tensors: dict[str, Tensor]) -> None:
    tensors[".weight_scale"] = tensors[".weight_scale"][:-1]


def wrong_block(tensors: dict[str, Tensor]) -> None:
    tensors[".weight_scale_inv"] = torch.ones(3, 2)


def five_groups(tensors: dict[str, Tensor]) -> None:
    tensors[".scales"], tensors[".qzeros"] = tensors[".scales"][:5], tensors[".qzeros"][:5]
    del tensors[".g_idx"]


BAD: list[tuple[Any, Any, str]] = [
    (packers.gptq, truncated, ".scales"),
    (packers.gptq, no_scales, ".scales"),
    (packers.gptq, bits_of_five, ".qzeros"),
    (packers.gptq, not_a_number, BASE),
    (packers.gptq, no_order, ".g_idx"),
    (packers.gptq, beyond, ".g_idx"),
    (packers.gptq, five_groups, ".scales"),
    (packers.packed_words, misshapen, ".weight_scale"),
    (packers.packed_words, not_a_number, BASE),
    (lambda n, k: packers.fp8(n, k, (2, 2), (128, 128)), wrong_block, ".weight_scale_inv"),
    (lambda n, k: packers.fp8(n, k, (n, 1)), not_a_number, BASE),
    (lambda n, k: packers.nvfp4(n, k, "modelopt"), misshapen, ".weight_scale"),
]


@pytest.mark.parametrize("packer, spoil, named", BAD, ids=[f"{n}-{spoil.__name__}" for n, (_, spoil, _) in enumerate(BAD)])
def test_bad_input_is_one_line_with_the_tensors_name(packer: Any, spoil: Any, named: str, tmp_path: pathlib.Path) -> None:
    tensors, _ = packer(ROWS, COLUMNS)
    spoil(tensors)
    with pytest.raises(BadCheckpoint) as caught:
        decode(stored(tmp_path, tensors), torch.float32)
    assert BASE in str(caught.value) and named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"transform_config": {"config_groups": {}}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"format": "marlin-24"},
        {"auto_map": {"AutoQuantizer": "mine.py"}},
    ],
)
def test_refused_by_name(settings: dict[str, Any], tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedModel):
        stored(tmp_path, packers.packed_words(ROWS, COLUMNS)[0], settings)


def test_group_that_does_not_divide(tmp_path: pathlib.Path) -> None:
    tensors, _ = packers.gptq(ROWS, COLUMNS, group=96)
    with pytest.raises(TriremeError, match="groups of 128"):
        stored(tmp_path, tensors, {"group_size": 128})


def test_what_is_one_tensor_stays(tmp_path: pathlib.Path) -> None:
    save_file({"a.weight": torch.ones(4, 4), "a.bias": torch.ones(4), "b": torch.ones(2)}, tmp_path / "x.safetensors")
    weights = read_safetensors(tmp_path / "x.safetensors")
    assert join(weights, {}) == weights


def test_scales_of_keys_and_values_are_passed_over(tmp_path: pathlib.Path) -> None:
    tensors = packers.fp8(ROWS, COLUMNS, ())[0] | {".k_scale": torch.tensor(0.1), ".v_scale": torch.tensor([0.2])}
    assert stored(tmp_path, tensors).kind == "F8T"
