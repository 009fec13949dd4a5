"""The GPU's weight methods against the decoded weights: formats as they are stored, cut, in an order, and quantized at load."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from tests.quant.packers import FORMATS
from tests.quant.test_made import READ, joined
from trireme.backends.cuda.methods import FLOATS, WHOLE, Packed, Quantized, Scaled
from trireme.backends.cuda.ops import CudaOps
from trireme.bench.plain_cuda import plain_method
from trireme.blocks import BLOCKS
from trireme.hub.composite import Composite
from trireme.hub.safetensors import read_safetensors
from trireme.hub.schemes import join
from trireme.hub.weights import Weight
from trireme.kernels import chips
from trireme.kernels.steps import packed
from trireme.ops import Ops
from trireme.quant import Decoded, Stored, WeightMethod, choose, decode

DEVICE = torch.device("cpu" if chips.current().interpreted else "cuda")
METHODS = WHOLE | FLOATS
OPS = CudaOps()
ROWS, COLUMNS = 32, 256

NATIVE = {
    "gptq 4 bit": Packed, "gptq 4 bit with zeros, version 1": Packed, "gptq 3 bit": Packed, "gptq in an order": Packed,
    "awq": Packed, "words 4 with zeros": Packed, "mxfp4": Packed, "gptq 8 bit": Packed, "words 8": Packed, "int8 by row": Scaled,
    "int8 groups": Packed, "fp8, one scale": Scaled, "fp8 by row": Scaled, "fp8 blocks": Scaled, "nf4": Decoded, "nvfp4": Decoded,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(4)


def stored(tmp_path: pathlib.Path, name: str) -> Composite:
    file = tmp_path / "model.safetensors"
    tensors = FORMATS[name][0](ROWS, COLUMNS)[0]
    save_file({"m" + end: value.clone(memory_format=torch.contiguous_format) for end, value in tensors.items()}, file)
    (found,) = join(read_safetensors(file), {}).values()
    assert isinstance(found, Composite)
    return found


def close(method: WeightMethod, x: Tensor, dense: Tensor, bias: Tensor, loss: float) -> None:
    wanted = x.double() @ dense.double().t() + bias.double()
    found = method.linear(OPS, x)
    assert found.dtype == x.dtype and float((found.double() - wanted).norm() / wanted.norm()) < loss


@pytest.mark.parametrize("name", NATIVE)
def test_formats(name: str, tmp_path: pathlib.Path) -> None:
    matrix, bias = stored(tmp_path, name), torch.randn(2 * ROWS, device=DEVICE).bfloat16()
    torch.manual_seed(1)
    parts = [matrix, matrix.rows(np.arange(ROWS)[::-1].copy())]
    method = choose("auto", parts, METHODS).load(parts, bias, torch.bfloat16, DEVICE)
    assert type(method) is NATIVE[name]
    dense = torch.cat([decode(part, torch.float32, DEVICE) for part in parts])
    loss = 0.06 if matrix.kind in ("I8C", "F8T", "F8C", "F8B") else 0.01  # whose activations are rounded to eight bits
    if isinstance(method, Decoded):
        assert method.title == f"dense, no kernel takes its {matrix.kind}"
    else:
        close(method, torch.randn(3, COLUMNS, device=DEVICE).bfloat16(), dense, bias, loss)
    assert method.num_bytes() < 2 * dense.numel() or type(method) is Decoded


@pytest.mark.parametrize("name", READ)
def test_what_the_makers_wrote(name: str) -> None:
    """Matrices by the formats' own libraries: products are those of the values that the libraries say."""
    matrix, _ = joined(name)
    if len(matrix.shape) > 2:  # a stack; each of its matrices is read as one
        matrix = matrix.part(0)
    method = choose("auto", [matrix], METHODS).load([matrix], None, torch.bfloat16, DEVICE)
    dense = decode(matrix, torch.float32, DEVICE)
    loss = 0.06 if isinstance(method, Scaled) else 0.01
    close(method, torch.randn(3, matrix.shape[1], device=DEVICE).bfloat16(), dense, torch.zeros(len(dense), device=DEVICE), loss)


@pytest.mark.parametrize("kind, title", [("Q4_0", "packed"), ("Q8_0", "packed"), ("MXFP4", "packed"), ("Q4_K", "dense")])
def test_blocks_of_gguf(kind: str, title: str) -> None:
    """What the kernels have stays packed, also of chosen rows and of a rank's columns; other blocks are decoded, which is said."""
    values, size = BLOCKS[kind]
    raw = np.random.default_rng(3).integers(0, 100, (ROWS, 2 * COLUMNS // values * size), dtype=np.uint8)
    raw.reshape(-1, size)[:, 1 if kind != "MXFP4" else 0] = 33 if kind != "MXFP4" else 120  # scales near 0.01
    whole = Weight("m", kind, raw)
    parts: list[Stored] = [whole.columns(slice(0, COLUMNS)), whole.columns(slice(0, COLUMNS)).rows(np.arange(ROWS)[::-1].copy())]
    bias = torch.randn(2 * ROWS, device=DEVICE).bfloat16()
    method = choose("auto", parts, METHODS).load(parts, bias, torch.bfloat16, DEVICE)
    assert method.title == (title if title == "packed" else f"dense, no kernel takes its {kind}")
    dense = torch.cat([decode(part, torch.float32, DEVICE) for part in parts])
    close(method, torch.randn(3, COLUMNS, device=DEVICE).bfloat16(), dense, bias, 0.01)
    if title == "packed":
        assert method.num_bytes() <= dense.numel() * (1.1 if kind == "Q8_0" else 0.6)
        found = method.embed(OPS, torch.tensor([3, 30], device=DEVICE))
        assert float((found.float() - dense[[3, 30]]).norm() / dense[[3, 30]].norm()) < 0.004


@pytest.mark.parametrize("name", ["gptq 4 bit", "fp8 by row", "int8 groups"])
def test_logits_are_wide(name: str, tmp_path: pathlib.Path) -> None:
    matrix = stored(tmp_path, name)
    method = choose("auto", [matrix], METHODS).load([matrix], None, torch.bfloat16, DEVICE)
    x = torch.randn(1, COLUMNS, device=DEVICE).bfloat16()
    found, wanted = method.logits(OPS, x), x.double() @ decode(matrix, torch.float64, DEVICE).t()
    assert found.dtype == torch.float32 and float((found.double() - wanted).norm() / wanted.norm()) < 0.06


def test_many_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product unpacks weights itself up to as many rows as suit the chip; with more of them they are decoded first."""
    decoded: list[int] = []
    dense, most = packed.dense, packed.most_rows()
    monkeypatch.setattr(packed, "dense", lambda weight, dtype: decoded.append(1) or dense(weight, dtype))
    for name in ("gptq 4 bit", "int8 groups"):
        matrix = stored(tmp_path, name)
        method = choose("auto", [matrix], METHODS).load([matrix], None, torch.bfloat16, DEVICE)
        for rows in (most, most + 1):
            x = torch.randn(rows, COLUMNS, device=DEVICE).bfloat16()
            close(method, x, decode(matrix, torch.float32, DEVICE), torch.zeros(ROWS, device=DEVICE), 0.01)
            assert len(decoded) == (rows > most)
        decoded.clear()


def test_a_cut_through_a_group_is_decoded(tmp_path: pathlib.Path) -> None:
    matrix = stored(tmp_path, "gptq 4 bit").columns(slice(16, 144))
    method = choose("auto", [matrix], METHODS).load([matrix], None, torch.bfloat16, DEVICE)
    assert type(method) is Decoded
    assert torch.equal(method.weight, decode(matrix, torch.bfloat16, DEVICE))


def test_stacked_matrices_of_several_kinds(tmp_path: pathlib.Path) -> None:
    """Each runs natively, though no method takes them together; what no kernel takes is dense beside them."""
    names, parts = ("gptq 4 bit", "words 4 with zeros", "fp8 by row", "nf4"), []
    for name in names:
        (tmp_path / name).mkdir()
        parts.append(stored(tmp_path / name, name))
    bias = torch.randn(len(parts) * ROWS, device=DEVICE).bfloat16()
    method = choose("auto", parts, METHODS).load(parts, bias, torch.bfloat16, DEVICE)
    assert method.title == "packed and scaled and dense, no kernel takes its NF4"
    dense = torch.cat([decode(part, torch.float32, DEVICE) for part in parts])
    assert method.num_bytes() < 4 * dense.numel()
    x = torch.randn(3, COLUMNS, device=DEVICE).bfloat16()
    close(method, x, dense, bias, 0.06)
    assert method.logits(OPS, x).dtype == torch.float32
    again = choose("auto", parts, METHODS).load(parts, bias, torch.bfloat16, DEVICE)
    assert method.take(again) is (DEVICE.type != "cpu")


@pytest.mark.parametrize("kind, loss", [("int8", 0.03), ("fp8", 0.06), ("int4", 0.12), ("mxfp4", 0.2)])
def test_quantized_at_load(kind: str, loss: float) -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    part, x = Weight("m", "F32", values), torch.randn(3, COLUMNS, device=DEVICE).bfloat16()
    method = choose(kind, [part], METHODS).load([part], None, torch.bfloat16, DEVICE)
    assert type(method) in (Packed, Scaled)
    close(method, x, torch.from_numpy(values).to(DEVICE), torch.zeros(ROWS, device=DEVICE), loss)
    for table, lost in ((part, loss), (Weight("t", "F32", np.tile(values, (100, 1))), 0.06)):  # the second is a vocabulary
        found = (
            choose(kind, [table], METHODS)
            .load([table], None, torch.bfloat16, DEVICE)
            .embed(OPS, torch.tensor([3, 30], device=DEVICE))
        )
        wanted = torch.from_numpy(values[[3, 30]]).to(DEVICE)
        assert float((found.float() - wanted).norm() / wanted.norm()) < lost


PLAIN = ["gptq 4 bit with zeros, version 1", "gptq in an order", "mxfp4", "int8 by row", "fp8 blocks", "nf4"]


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_form_rounds_as_the_kernels_do(name: str, tmp_path: pathlib.Path) -> None:
    """What `bench quality --plain` compares with: products that differ by what 16 bits lose, and embeddings that are exact."""
    matrix, bias = stored(tmp_path, name), torch.randn(ROWS, device=DEVICE)
    options = [matrix], bias, torch.bfloat16, DEVICE
    native, plain = choose("auto", [matrix], METHODS).load(*options), plain_method("auto", METHODS).load(*options)
    x = torch.randn(3, COLUMNS, device=DEVICE).bfloat16()
    found, wanted = native.linear(OPS, x).float(), plain.linear(Ops(), x.float())
    assert float((found - wanted).norm() / wanted.norm()) < 0.004
    ids = torch.tensor([3, 30], device=DEVICE)
    if not isinstance(native, Quantized) or native.order is None:  # no vocabulary has an order
        assert torch.equal(plain.embed(Ops(), ids), decode(matrix, torch.float32, DEVICE)[ids])


def test_the_plain_form_of_several_kinds(tmp_path: pathlib.Path) -> None:
    """Each part is rounded as its own kind is."""
    names, parts = ("gptq 4 bit", "int8 by row", "nf4"), []
    for name in names:
        (tmp_path / name).mkdir()
        parts.append(stored(tmp_path / name, name))
    options = parts, torch.randn(len(parts) * ROWS, device=DEVICE), torch.bfloat16, DEVICE
    native, plain = choose("auto", parts, METHODS).load(*options), plain_method("auto", METHODS).load(*options)
    x = torch.randn(3, COLUMNS, device=DEVICE).bfloat16()
    found, wanted = native.linear(OPS, x).float(), plain.linear(Ops(), x.float())
    for mine, other in zip(found.split(ROWS, -1), wanted.split(ROWS, -1), strict=True):
        assert float((mine - other).norm() / other.norm()) < 0.004


@pytest.mark.parametrize("option", ["int8", "int4", "fp8", "mxfp4"])
def test_the_plain_form_of_what_is_quantized_at_load(option: str) -> None:
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2))
    parts: list[Stored] = [Weight("m", "F32", values.numpy())]
    options = parts, None, torch.bfloat16, DEVICE
    native, plain = choose(option, parts, METHODS).load(*options), plain_method(option, METHODS).load(*options)
    x = torch.randn(3, COLUMNS, device=DEVICE).bfloat16()
    found, wanted = native.linear(OPS, x).float(), plain.linear(Ops(), x.float())
    assert float((found - wanted).norm() / wanted.norm()) < 0.004
