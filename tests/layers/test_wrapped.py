"""A layer that wraps another takes effect on every backend: no fused step goes past it."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive
from tiny_models import LENGTH, prompt
from torch import Tensor

from trireme.backends import reason_against
from trireme.backends.cuda.ops import CudaOps
from trireme.layers import Env, GatedMLP, HeadNorm, Linear
from trireme.ops import Ops
from trireme.quant import Dense

PROJECTIONS = ("self_attn.qkv", "self_attn.out", "mlp.gate_up", "mlp.down")


class Shifted(Linear):
    """A projection and something besides, as an adapter is."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 0.5


class ShiftedNorm(HeadNorm):
    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().__call__(x) * 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("qwen3", tmp_path_factory.mktemp("qwen3"))


def wrap(drive: Drive, path: str) -> None:
    """In the second block alone."""
    layer: Any = drive.worker.model.model.layers[1]
    for name in path.split("."):
        layer = getattr(layer, name)
    layer.__class__ = Shifted if isinstance(layer, Linear) else ShiftedNorm


@pytest.mark.parametrize("path", [*PROJECTIONS, "self_attn.q_norm", "self_attn.k_norm"])
@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_wrapped_layer_is_called(backend: str, path: str, folder: pathlib.Path) -> None:
    if reason_against(backend):
        pytest.skip(f"{backend}: {reason_against(backend)}")
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": LENGTH, "quantize": "none", "graphs": False}
    logits = {}
    for name, wrapped in (("reference", False), ("reference", True), (backend, True)):
        drive = Drive(folder, backend=name, **settings)
        if wrapped:
            wrap(drive, path)
        run = drive.run("a", prompt(9), max_tokens=1)
        logits[name, wrapped] = torch.stack([run.logits[position].cpu() for position in range(9)])
    assert not torch.allclose(logits["reference", True], logits["reference", False], atol=0.05), "wrapping it shows"
    torch.testing.assert_close(logits[backend, True], logits["reference", True], atol=2e-3, rtol=2e-3)


class Device:
    """What layers need of a backend, with the ops of one."""

    layers: dict = {}
    methods: dict = {}
    coarse_few_rows = False
    device = torch.device("cpu")

    def __init__(self, ops: Ops):
        self.ops = ops


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are interpreted where there is no GPU")
@pytest.mark.parametrize("shifted", [None, "gate_up", "down"])
def test_wrapped_projections_of_a_feed_forward_on_interpreted_kernels(shifted: str | None) -> None:
    """Few rows of halves, which the GPU's ops compute with their gate in one kernel."""
    torch.manual_seed(1)
    weights = {"gate_up": torch.randn(2 * 128, 256) * 0.1, "down": torch.randn(256, 128) * 0.1}
    x, results = torch.randn(3, 256).bfloat16(), []
    for ops in (Ops(), CudaOps()):
        env = Env(Device(ops), torch.bfloat16)
        mlp = GatedMLP(env, 256, 128)
        for name, weight in weights.items():
            getattr(mlp, name).weight = Dense(weight.bfloat16(), None)
            if name == shifted:
                getattr(mlp, name).__class__ = Shifted
        results.append(mlp(x).float())
    torch.testing.assert_close(results[1], results[0], atol=0.05, rtol=0.05)
