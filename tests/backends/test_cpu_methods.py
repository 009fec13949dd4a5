"""Large matrices are packed piece by piece: the same weights, in the same places."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch

from trireme.backends import reason_against
from trireme.hub.weights import map_file, weight_from_bytes

if reason_against("cpu"):
    pytest.skip(str(reason_against("cpu")), allow_module_level=True)

from trireme.backends.cpu import methods
from trireme.backends.cpu.methods import METHODS


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
