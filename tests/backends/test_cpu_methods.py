"""Weight methods of the CPU: pieces make the whole, and tables of sixteen values keep their four bits."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.quant.packers import FORMATS
from tests.quant.test_made import READ, joined
from trireme.backends import reason_against
from trireme.hub.safetensors import read_safetensors
from trireme.hub.schemes import join
from trireme.hub.weights import map_file, weight_from_bytes
from trireme.quant import decode
from trireme.quant.online import quantize

if reason_against("cpu"):
    pytest.skip(str(reason_against("cpu")), allow_module_level=True)

from trireme.backends.cpu import methods
from trireme.backends.cpu.methods import METHODS
from trireme.backends.cpu.ops import CpuOps


@pytest.mark.parametrize("method", ["auto", "none", "int8", "int4"])
def test_pieces_make_the_whole(method: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    stored = []
    for i, rows in enumerate((70, 33)):
        values = random.standard_normal((rows, 64), dtype=np.float32)
        (tmp_path / str(i)).write_bytes(values.tobytes())
        stored.append(weight_from_bytes(str(i), "F32", values.shape, map_file(tmp_path / str(i))))
    stored[1] = stored[1].rows(random.permutation(33))
    options = (None, torch.float32, torch.device("cpu"))
    whole = METHODS[method].load(stored, *options)
    monkeypatch.setattr(methods, "PIECE", 64 * 32)
    pieces = METHODS[method].load(stored, *options)
    assert len(whole.weights) == len(pieces.weights) == 1
    assert torch.equal(whole.weights[0].data, pieces.weights[0].data)
    expected = np.concatenate([part.raw() for part in stored])
    assert np.abs(pieces.weights[0].floats().numpy() - expected).max() < (0.3 if method == "int4" else 0.03)


def matrix_of(tmp_path: pathlib.Path, tensors: dict[str, torch.Tensor]) -> Any:
    plain = {f"m{end}": tensor.clone(memory_format=torch.contiguous_format) for end, tensor in tensors.items()}
    save_file(plain, tmp_path / "model.safetensors")
    (found,) = join(read_safetensors(tmp_path / "model.safetensors"), {}).values()
    return found


@pytest.mark.parametrize(
    "name, kind, far",
    [
        ("mxfp4", "mxfp4", 0.0),
        ("mxfp4 blocks", "mxfp4", 0.0),
        ("nf4", "nf4", 0.004),
        ("nf4 plain", "nf4", 0.004),
        ("fp4 of bitsandbytes", "fp4", 0.004),
    ],
)
def test_tables_stay_four_bits(name: str, kind: str, far: float, tmp_path: pathlib.Path) -> None:
    """Exact for floats of four bits, near for NF4, whose values become whole numbers of eight bits; also of a rank's columns."""
    tensors, values = FORMATS[name][0](48, 192)
    if name == "mxfp4":  # a group of zeros may have the smallest of all scales
        tensors[".weight_packed"][3, 16:32] = 0
        tensors[".weight_scale"][3, 1] = 0
        values[3, 32:64] = 0
    stored = matrix_of(tmp_path, tensors)
    for part, wanted in ((stored, values), (stored.columns(slice(64, 160)), values[:, 64:160])):
        made = METHODS["auto"].load([part], None, torch.float32, torch.device("cpu"))
        assert [weight.kind for weight in made.weights] == [kind] and made.title == f"packed as {kind}"
        assert made.weights[0].nbytes <= 48 * (-(-part.shape[1] // 64) * 64) * 4.5 / 8
        got = made.weights[0].floats()
        assert (got - wanted).abs().max() <= far * values.abs().max() and (got - wanted).norm() <= far * wanted.norm()


@pytest.mark.parametrize("name", READ)
def test_what_the_makers_wrote(name: str) -> None:
    """Matrices by the formats' own libraries: products are those of the values that the libraries say."""
    matrix, _ = joined(name)
    if len(matrix.shape) > 2:  # a stack; each of its matrices is read as one
        matrix = matrix.part(0)
    made, wanted = METHODS["auto"].load([matrix], None, torch.float32, torch.device("cpu")), decode(matrix, torch.float32)
    x = torch.randn(3, matrix.shape[1], generator=torch.Generator().manual_seed(1))
    got, meant = made.linear(CpuOps(), x), x @ wanted.t()
    assert (got - meant).norm() <= 0.015 * meant.norm()  # activations are rounded to eight bits


def test_a_table_of_its_own_is_not_taken_for_another(tmp_path: pathlib.Path) -> None:
    tensors, _ = FORMATS["nf4 plain"][0](48, 192)
    other = tensors[".weight.quant_map"].clone()
    other[7] = 0.05
    made = METHODS["auto"].load(
        [matrix_of(tmp_path, tensors | {".weight.quant_map": other})], None, torch.float32, torch.device("cpu")
    )
    assert [weight.kind for weight in made.weights] == ["q8"]


@pytest.mark.parametrize("name", ["mxfp4", "fp8"])
def test_quantized_at_load_as_everywhere(name: str, tmp_path: pathlib.Path) -> None:
    values = np.random.default_rng(1).standard_normal((70, 96), dtype=np.float32)
    (tmp_path / "m").write_bytes(values.tobytes())
    stored = weight_from_bytes("m", "F32", values.shape, map_file(tmp_path / "m"))
    made = METHODS[name].load([stored], None, torch.float32, torch.device("cpu"))
    wanted = quantize(torch.from_numpy(values), name).values()
    torch.testing.assert_close(made.weights[0].floats(), wanted, rtol=0.0 if name == "mxfp4" else 2.0**-8, atol=0.0)


def test_halves_stay_halves(tmp_path: pathlib.Path) -> None:
    values = np.random.default_rng(1).standard_normal((70, 96)).astype(np.float16)
    (tmp_path / "m").write_bytes(values.tobytes())
    made = METHODS["auto"].load(
        [weight_from_bytes("m", "F16", values.shape, map_file(tmp_path / "m"))], None, torch.float32, torch.device("cpu")
    )
    assert made.title == "packed as f16" and made.num_bytes() == 80 * 128 * 2
    assert np.array_equal(made.weights[0].floats().numpy(), values.astype(np.float32))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_act_order_keeps_four_bits(rows: int, tmp_path: pathlib.Path) -> None:
    """The columns of a group are brought together, and what is multiplied is put in the same order; after a norm or a gate too."""
    tensors, values = FORMATS["gptq in an order"][0](48, 128)
    made = METHODS["auto"].load([matrix_of(tmp_path, tensors)], None, torch.float32, torch.device("cpu"))
    assert made.title == "packed as q4_min"
    assert (made.weights[0].floats() - values).abs().max() < 1e-3 * values.abs().max()
    x, ops = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)), CpuOps()
    for got, taken in (
        (made.linear(ops, x[:, 128:]), x[:, 128:]),
        (made.of_gated(ops, x, "silu"), torch.nn.functional.silu(x[:, :128]) * x[:, 128:]),
    ):
        wanted = taken.double() @ values.double().t()
        assert (got - wanted).norm() < 0.012 * wanted.norm()


def test_a_cut_through_the_groups_of_an_order_has_eight_bits(tmp_path: pathlib.Path) -> None:
    tensors, values = FORMATS["gptq in an order"][0](48, 128)
    cut = matrix_of(tmp_path, tensors).columns(slice(0, 64))
    made = METHODS["auto"].load([cut], None, torch.float32, torch.device("cpu"))
    assert made.title == "packed as q8" and (made.weights[0].floats() - values[:, :64]).norm() < 0.01 * values[:, :64].norm()
