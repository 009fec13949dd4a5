"""The page on adding a format, tried as it is written: its modules are installed and used."""

from __future__ import annotations

import pathlib
import re
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trireme.hub.safetensors import read_safetensors
from trireme.hub.schemes import join
from trireme.hub.weights import Weight
from trireme.ops import Ops
from trireme.quant import choose, decode

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "add-a-format.md"


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's two modules, with the entry points it gives them."""
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    tables = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, code in zip(("nibbles", "signs"), codes, strict=True):
        (tmp_path / f"{name}.py").write_text(code)
    folder = tmp_path / "page-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: page\nVersion: 1.0\n")
    points = "".join(tables).replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    (folder / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("nibbles", "signs"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("installed")
def test_a_format_of_a_plug_in(tmp_path: pathlib.Path) -> None:
    numbers = torch.randint(-8, 8, (6, 10))
    step = torch.rand(6)
    low, high = (numbers & 15)[:, ::2], (numbers & 15)[:, 1::2]
    save_file({"a.nibbles": (low | high << 4).to(torch.uint8), "a.step": step}, tmp_path / "x.safetensors")
    (matrix,) = join(read_safetensors(tmp_path / "x.safetensors"), {}).values()
    values = numbers.float() * step.unsqueeze(1)
    assert matrix.name == "a.weight" and torch.equal(decode(matrix, torch.float32), values)
    cut = matrix.rows(slice(1, 5)).columns(slice(3, 8))
    assert torch.equal(decode(cut, torch.float32), values[1:5, 3:8])
    picked = matrix.rows(np.array([4, 0]))
    assert torch.equal(decode(picked, torch.float32), values[[4, 0]])


@pytest.mark.usefixtures("installed")
def test_a_method_of_a_plug_in() -> None:
    values = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    part = Weight("w", "F32", values)
    method = choose("signs", [part], {}).load([part], None, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 8)
    weight = torch.from_numpy(np.sign(values) * np.abs(values).mean(1, keepdims=True))
    torch.testing.assert_close(method.linear(Ops(), x), x @ weight.T)
    torch.testing.assert_close(method.logits(Ops(), x), x @ weight.T)
    torch.testing.assert_close(method.embed(Ops(), torch.tensor([2])), weight[2:3])
    assert method.num_bytes() == 4 * 8 + 4 * 4
