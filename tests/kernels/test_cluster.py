"""Long rows held by clusters: the same as torch in higher precision on a chip that has them; that they compile is seen anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from trireme.kernels import chips
from trireme.kernels.rowwise import norms, softmax

HALF, HALF16, FULL = torch.bfloat16, torch.float16, torch.float32
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from trireme.kernels.rowwise import cluster

def compiled(kernel, types, warps, **constants):
    names = list(kernel.jit.signature.parameters)
    types = {name: types[name] for name in names if name in types}
    signature = {name: types.get(name, "constexpr") for name in names}
    known = {(names.index(name),): value for name, value in constants.items()}
    multiples = {"length", "share", "y_outer", "y_step"}
    even = {(names.index(name),): [["tt.divisibility", 16]] for name in types if types[name][0] == "*" or name in multiples}
    source = GluonASTSource(kernel.jit, signature, known, even)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_ctas": cluster.BLOCKS})
    assert "st.async" in built.asm["ptx"] and any(copy in built.asm["ptx"] for copy in ("cp.async.cg", "cp.async.bulk.tensor"))
    assert built.metadata.shared <= 227 * 1024
    assert all(f"griddepcontrol.{step}" in built.asm["ptx"] for step in ("wait", "launch_dependents"))

for kind, vector in (("bf16", 8), ("fp32", 4)):
    described, kind = f"tensordesc<{kind}[1, 4096, 32],{cluster._tile_layout(128 // vector)!r}>", "*" + kind
    drawn = {"counter": "*i32"} | {name: "i32" for name in ("rows", "items", "abreast")}
    types = {name: kind for name in ("x", "weight", "bias", "y", "means", "scales")}
    types |= {name: "i32" for name in ("length", "share", "groups", "channel")} | {"eps": "fp32"} | drawn
    for each in (False, True):
        compiled(cluster._norm, types, 4, EACH=each, CHUNKS=16, VECTOR=vector, WARPS=4, EARLY=True)
    types = {"y": kind, "x": described} | {name: "i32" for name in ("strips", "y_outer", "y_step")}
    for log in (False, True):
        compiled(cluster._softmax, types | drawn, 4, LOG=log, LINES=128, VECTOR=vector, WARPS=4, EARLY=True)
print("compiled")
"""


def on_a_chip(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(not chips.current().clusters, reason="no chip with clusters")(test))


def test_kernels_compile_for_hopper() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr[-3000:]


def near(result: torch.Tensor, truth: torch.Tensor) -> None:
    """Within a unit and a half of the last place, of what float32 sums of this length allow."""
    last = torch.finfo(result.dtype).eps if result.dtype is not FULL else 1e-5
    torch.testing.assert_close(result.double(), truth, rtol=1.5 * last, atol=last)


def taken(function: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What `cluster` answers from now on: whether it took a call."""
    from trireme.kernels.rowwise import cluster

    original, answers = getattr(cluster, function), list[bool]()
    monkeypatch.setattr(cluster, function, lambda *args: answers.append(original(*args)) or answers[-1])
    return answers


@on_a_chip
@pytest.mark.parametrize("dtype", [HALF, HALF16, FULL], ids=str)
@pytest.mark.parametrize("length", [32768, 65536, 131072, 262144])
@pytest.mark.parametrize("weighted", [True, False])
def test_layer_norm(dtype: torch.dtype, length: int, weighted: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = taken("normalise", monkeypatch)
    x = torch.randn(5, length, device=device).mul(2).add(3).to(dtype)
    x[1, 0], x[2, :7], x[3] = 3e4, -2e4, 29999.0
    weight, bias = (torch.randn(length, device=device).to(dtype) if weighted else None for _ in range(2))
    y, means, scales = norms.native_layer_norm(x, [length], weight, bias, 1e-5)
    assert answers == [length * dtype.itemsize <= 8 * 65536]
    wide = x.double()
    near(y, F.layer_norm(wide, [length], *(None if w is None else w.double() for w in (weight, bias)), 1e-5))
    mean = wide.mean(1, keepdim=True)
    torch.testing.assert_close(means.double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scales.double(), (wide.var(1, correction=0, keepdim=True) + 1e-5).rsqrt(), rtol=1e-4, atol=0)
    alone = norms.native_layer_norm(x[4:], [length], weight, bias, 1e-5)[0]
    assert torch.equal(alone, y[4:]), "one row by itself"


@on_a_chip
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_group_norm(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's groups many times over, two of them with what is no number, and others than clusters take."""
    answers = taken("normalise", monkeypatch)
    cases = {(32, 64, 128, 128): (8, True), (4, 64, 128, 128): (8, True), (2, 32, 64, 64): (4, True), (2, 30, 64, 64): (3, False)}
    for shape, (groups, takes) in cases.items():  # the first has more groups than clusters run at once
        x = torch.randn(shape, device=device).to(dtype)
        x[0, 0, 0, 0], x[1, 9, 3, 3] = float("nan"), float("inf")
        weight, bias = torch.randn(2, shape[1], device=device).to(dtype)
        truth = F.group_norm(x.double(), groups, weight.double(), bias.double())
        for _ in range(20):
            y = norms.native_group_norm(x, weight, bias, shape[0], shape[1], shape[2] * shape[3], groups, 1e-5)[0]
        near(torch.nan_to_num(y), torch.nan_to_num(truth))
        assert torch.equal(y.isnan(), truth.isnan())
        if dtype is HALF:
            assert set(answers[-20:]) == {takes}, shape


@on_a_chip
@pytest.mark.parametrize("dtype", [HALF, HALF16, FULL], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_softmax(dtype: torch.dtype, log: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = taken("soften", monkeypatch)
    function = softmax.log_softmax_forward if log else softmax.softmax_forward
    cases = {(24, 4096, 256): True, (3, 2048, 64): True, (3, 1024, 64): False, (2, 4096, 256): True, (2, 2500, 64): False}
    cases[1, 8192, 32] = dtype != FULL
    for shape, takes in cases.items():
        x = torch.randn(shape, device=device).mul(4).to(dtype)
        x[0, :, 1], x[0, 5, 2], x[0, :600, 3] = float("-inf"), float("inf"), float("-inf")
        x[0, 7, 4], x[0, 3, 5] = float("nan"), 60000.0
        truth = (x.double().log_softmax if log else x.double().softmax)(1)
        for _ in range(20):
            y = function(x, 1)
        assert torch.equal(y.isnan(), truth.isnan()), shape
        near(torch.nan_to_num(y, posinf=1, neginf=-1), torch.nan_to_num(truth, posinf=1, neginf=-1))
        assert set(answers[-20:]) == {takes}, shape
    x = torch.randn(2, 2048, 96, device=device).to(dtype)
    near(function(x, 1, torch.float32), (x.double().log_softmax if log else x.double().softmax)(1))
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)  # long rows, each of its own
    near(function(turned, 1), (x.double().log_softmax if log else x.double().softmax)(1))
    spread = x[:1].expand(3, 2048, 96)  # one memory for all, which no descriptor has
    near(function(spread, 1), (spread.double().log_softmax if log else spread.double().softmax)(1))


@on_a_chip
def test_two_streams_and_two_graphs(device: str) -> None:
    """Clusters draw their rows from a counter of their stream, or of their graph: calls may overlap and be recorded."""
    x = torch.randn(32, 4096, 128, device=device).to(HALF)
    truth = softmax.softmax_forward(x, 1)
    near(truth, x.double().softmax(1))
    graphs, streams = [torch.cuda.CUDAGraph() for _ in range(2)], [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    recorded, results = [], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            recorded += [softmax.softmax_forward(x, 1) for _ in range(3)]
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(softmax.softmax_forward(x, 1))
    torch.cuda.synchronize()
    assert all(torch.equal(y, truth) for y in recorded + results)


@on_a_chip
def test_rows_of_one_value_and_of_the_lowest(device: str) -> None:
    """A row that is masked with the type's lowest number is as even as any other of one value."""
    for dtype in (HALF, HALF16, FULL):
        x = torch.zeros(2, 4096, 32, device=device, dtype=dtype)
        x[0], x[1, :, 1], x[1, :, 2] = torch.finfo(dtype).min, torch.finfo(dtype).max, -5.0
        near(softmax.softmax_forward(x, 1), torch.full(x.shape, 1 / 4096, dtype=torch.float64, device=device))
