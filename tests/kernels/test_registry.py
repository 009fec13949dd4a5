"""enable, only_enable, disable, use: what is ours, what stays torch's, and that gradients survive."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.fx.experimental.proxy_tensor
import torch.nn.functional as F

from trireme import kernels
from trireme.kernels.aten import registry


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    kernels.disable()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of our operators as they are called."""
    seen: list[str] = []
    original = registry._guarded

    def spy(operator: registry.Operator):
        inner = original(operator)

        def call(*args: object, **kwargs: object):
            seen.append(operator.name)
            return inner(*args, **kwargs)

        return call

    monkeypatch.setattr(registry, "_guarded", spy)
    return seen


def test_the_list_is_complete() -> None:
    assert len(kernels.OPERATORS) == 87
    rows = kernels.describe()
    assert {(row["name"], row["overload"]) for row in rows} >= {("add", "Tensor"), ("softmax", "int"), ("mm", "default")}


def test_only_what_is_enabled_is_ours(calls: list[str], device: str) -> None:
    x = torch.ones(4, device=device)
    kernels.only_enable(["add", "aten::mul.Tensor"])
    assert kernels.enabled() == ["add.Tensor", "mul.Tensor"]
    x + x, x * 2, x - x
    assert calls == ["add.Tensor", "mul.Tensor"]
    kernels.disable()
    x + x
    assert len(calls) == 2


def test_use_nests_and_restores(device: str) -> None:
    with kernels.use(exclude=["mm", "add"]):
        assert len(kernels.enabled()) == 85
        with kernels.use(include=["mm"]):
            assert kernels.enabled() == ["mm"]
        assert len(kernels.enabled()) == 85
    assert kernels.enabled() == []
    with pytest.raises(RuntimeError, match="inside"), kernels.use():
        raise RuntimeError("inside")
    assert kernels.enabled() == []


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no operator named 'conv3d'"):
        kernels.only_enable(["conv3d"])
    with pytest.raises(ValueError, match="did you mean softmax"):
        kernels.only_enable(["sofmax"])
    with pytest.raises(TypeError, match="expected names of operators"):
        kernels.only_enable(3)


def test_names_as_torch_writes_them() -> None:
    for names in ("mm", ["mm.default"], ["aten::mm"], [torch.ops.aten.mm.default]):
        kernels.only_enable(names)
        assert kernels.enabled() == ["mm"]
    for names in (["max.default"], [torch.ops.aten.max.default]):
        kernels.only_enable(names)
        assert kernels.enabled() == ["max"]
    kernels.only_enable(["max"])
    assert kernels.enabled() == ["max", "max.dim"]


def test_no_chip_and_no_interpreter(device: str) -> None:
    script = "from trireme import kernels\ntry:\n    kernels.enable()\nexcept RuntimeError as error:\n    print(error)"
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert "TRITON_INTERPRET=1" in done.stdout, done.stderr[-2000:]


def test_views_that_are_negated_when_read(device: str) -> None:
    x = torch.randn(4, 8, device=device)
    negated = torch._neg_view(x)
    weight = torch.ones(8, device=device)
    normed = lambda t: F.rms_norm(t, [8], weight)  # noqa: E731
    for function in (lambda t: t.softmax(-1), lambda t: t.log_softmax(-1), normed, lambda t: t + 1, torch.exp):
        expected = function(-x)
        with kernels.use():
            for _ in range(5):  # of both, so that one could be taken for the other
                torch.testing.assert_close(function(negated), expected)
                function(x)


def test_derivatives_carried_forward(device: str) -> None:
    x, direction = torch.randn(4, 8, device=device), torch.randn(4, 8, device=device)
    weight = torch.ones(8, device=device)
    for function in (lambda t: t.softmax(-1), lambda t: F.rms_norm(t, [8], weight), torch.exp):
        tangents = []
        for ours in (False, True):
            for _ in range(5):
                with kernels.use() if ours else contextlib.nullcontext(), torch.autograd.forward_ad.dual_level():
                    y = function(torch.autograd.forward_ad.make_dual(x, direction))
                    tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
                    tangents.append(tangent.clone())
                with kernels.use() if ours else contextlib.nullcontext():
                    function(x)
        for tangent in tangents:
            torch.testing.assert_close(tangent, tangents[0])


@pytest.mark.gpu
def test_memory_of_the_host_is_refused_as_torch_does(device: str) -> None:
    x, host = torch.randn(8, 8, device=device), torch.randn(8, 8)
    with kernels.use():
        for _ in range(4):
            for function in (torch.mm, torch.add, lambda a, b: F.rms_norm(a, [8], b[0])):
                with pytest.raises(RuntimeError, match="device"):
                    function(x, host)
            assert torch.equal(torch.mm(x, x).isfinite(), torch.ones_like(x, dtype=torch.bool))


def test_what_a_kernel_does_not_cover_stays_torchs(device: str) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j], device=device)
    expected = (z + 1, z * z, z.abs(), z.sum(), z.exp(), z.tanh(), z.reciprocal(), z / 2)
    with kernels.use():
        got = (z + 1, z * z, z.abs(), z.sum(), z.exp(), z.tanh(), z.reciprocal(), z / 2)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


DIFFERENTIABLE = {
    "native_dropout": lambda x: F.dropout(x, 0.0, training=True),
    "embedding": lambda x: F.embedding(torch.tensor([[0, 2], [1, 1]], device=x.device), x),
    "native_group_norm": lambda x: F.group_norm(x[None], 2, x.new_full((4,), 1.5), x.new_ones(4)),
    "native_layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], x.new_full(x.shape[-1:], 1.5), x.new_ones(x.shape[-1:])),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], x[0] + 1, 1e-5),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "softmax": lambda x: F.softmax(x, 0),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "cross_entropy_loss": lambda x: F.cross_entropy(x, torch.tensor([1, -100, 0, 3], device=x.device), label_smoothing=0.1),
    "mm": lambda x: x @ x.t(),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "var_mean": lambda x: sum(t.sum() for t in torch.var_mean(x, 1)),
    "amax": lambda x: x.amax(0),
    "cumsum": lambda x: x.cumsum(1),
    "linalg_vector_norm": lambda x: x.norm(),
    "pow": lambda x: (x.abs() + 1) ** 1.5,
    "max": lambda x: x.max(1).values,
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str, device: str) -> None:
    x = torch.randn(4, 6, device=device)
    function = DIFFERENTIABLE[name]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        result = function(leaf)
        (result * torch.linspace(0.5, 2, result.numel(), device=device).view(result.shape)).sum().backward()
        return result.detach(), leaf.grad

    expected = run()
    with kernels.use():
        got = run()
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_sum_of_losses(device: str) -> None:
    """Such a gradient arrives expanded, without memory of its own."""
    x, target = torch.randn(5, 7, device=device), torch.arange(5, device=device)
    expected, got = x.clone().requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(expected, target, reduction="none").sum().backward()
    with kernels.use():
        F.cross_entropy(got, target, reduction="none").sum().backward()
    torch.testing.assert_close(got.grad, expected.grad)


def test_a_repeated_call_still_sees_gradients_and_traces(device: str) -> None:
    """What is recognised by one look at its tensors must not pass for a call whose gradient or trace somebody wants."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.softmax(-1), (6,), eps=1e-5)

    x = torch.randn(4, 6, device=device)
    expected, slope = step(x), torch.func.grad(lambda v: step(v)[:, 0].sum())(x)
    with kernels.use(include=["softmax", "rms_norm"]):
        for _ in range(4):
            torch.testing.assert_close(step(x), expected)
        leaf = x.clone().requires_grad_()
        step(leaf)[:, 0].sum().backward()
        torch.testing.assert_close(leaf.grad, slope)
        torch.testing.assert_close(torch.func.grad(lambda v: step(v)[:, 0].sum())(x), slope)
        torch.testing.assert_close(torch.func.vmap(step)(x), expected)
        traced = torch.fx.experimental.proxy_tensor.make_fx(step)(x)
        torch.testing.assert_close(traced(x.flip(0)), expected.flip(0))


def test_inference_mode(device: str) -> None:
    with torch.inference_mode():
        x = torch.randn(3, 5, device=device)
        expected = F.softmax(x, -1)
        with kernels.use():
            torch.testing.assert_close(F.softmax(x, -1), expected)


@pytest.mark.gpu
def test_compiled_functions_keep_working(device: str) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.rms_norm(F.silu(x @ w), w.shape[-1:]).softmax(-1), torch.arange(x.shape[0], device=x.device))

    x, w = torch.randn(16, 32, device=device), torch.randn(32, 64, device=device, requires_grad=True)
    expected = step(x, w)
    (expected_grad,) = torch.autograd.grad(expected, w)
    kernels.enable()
    got = torch.compile(step)(x, w)
    (got_grad,) = torch.autograd.grad(got, w)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got_grad, expected_grad, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_graphs_record_our_kernels(device: str) -> None:
    x = torch.randn(256, 512, device=device, dtype=torch.bfloat16)
    w = torch.randn(512, 128, device=device, dtype=torch.bfloat16)
    with kernels.use():
        (x @ w).softmax(-1).sum()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = (x @ w).softmax(-1)
        x.normal_()
        graph.replay()
    torch.testing.assert_close(result, (x @ w).softmax(-1), rtol=2e-2, atol=2e-2)


@pytest.mark.wide
def test_the_page_adds_an_operator_as_written(tmp_path: Path) -> None:
    """The files of docs/add-an-op.md, under the names that they begin with, and its command."""
    page = (Path(kernels.__file__).parents[2] / "docs" / "add-an-op.md").read_text()
    assert len(re.sub(r"```.*?```", "", page, flags=re.DOTALL).split()) <= 700
    files = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE))
    assert set(files) == {"my_ops.py", "test_my_ops.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    command = "-m pytest -q test_my_ops.py"
    assert f"python {command}" in page
    done = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "13 passed" in done.stdout, done.stdout[-2000:]


def test_what_is_no_operator_is_not_registered() -> None:
    for name, gradient in (("mm", "torch"), ("no_such_operator", "torch"), ("einsum", "torch")):
        with pytest.raises(ValueError, match=r"give"):
            registry.register(name, lambda *args: None, gradient)
        assert len(registry.OPERATORS) == 87
