"""The conformance suite: it passes what is right, it catches what is wrong, and it runs on a third party's backend."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from trireme.backends import Backend, names, open_backend, reason_against
from trireme.backends.conformance import check_ops
from trireme.cli.main import main
from trireme.config import DeviceOptions
from trireme.ops import Ops
from trireme.ops.cases import cases
from trireme.worker.conformance import check_models

ON_GPU = {"cuda": pytest.mark.gpu}
BUILT_IN = [pytest.param(name, marks=ON_GPU.get(name, ())) for name in ("reference", "cpu", "cuda") if name in names()]


def available(name: str) -> str:
    reason = reason_against(name)
    if reason:
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.mark.parametrize("op", sorted(name for name in vars(Ops) if not name.startswith("_")))
@pytest.mark.parametrize("name", BUILT_IN)
def test_ops(name: str, op: str) -> None:
    findings = list(check_ops(open_backend(DeviceOptions(backend=available(name))), [op]))
    assert findings and [finding for finding in findings if not finding.ok] == []


@pytest.mark.parametrize("name", BUILT_IN)
def test_models(name: str) -> None:
    findings = list(check_models(available(name)))
    assert [finding for finding in findings if not finding.ok] == []


def test_every_op_has_cases() -> None:
    ops = {name for name in vars(Ops) if not name.startswith("_")}
    assert {case.op for case in cases()} == ops


def test_case_names_are_unique() -> None:
    named = [(case.op, case.name) for case in cases()]
    assert len(named) == len(set(named))


def _no_registers(*arguments: Any) -> Tensor:
    raise RuntimeError("out of registers")


# each wrong in a way that ports are wrong
WRONG: dict[str, Callable] = {
    "rms_norm": lambda ops, x, weight, eps: Ops.rms_norm(ops, x, weight, 0.0),
    "store_kv": lambda ops, k, v, cache, slots: Ops.store_kv(ops, k, v, cache, slots.clamp_min(0)),  # padding lands in slot 0
    "attention": lambda ops, q, cache, plan, kind: Ops.attention(
        ops, q, cache, plan, replace(kind, window=kind.window and kind.window + 1)
    ),
    "rope": lambda ops, x, table, index: Ops.rope_interleaved(ops, x, table, index),
    "sample_greedy": lambda ops, logits: logits.shape[-1] - 1 - logits.flip(-1).argmax(-1),  # the last of equals
    "sample": lambda ops, logits, by, uniform: Ops.sample(ops, logits, by._replace(top_k=(by.top_k + 1) * (by.top_k > 0)), uniform),
    "linear": lambda ops, x, weight, bias=None: Ops.linear(ops, x, weight),
    "softmax": lambda ops, x, mask=None, scale=1.0: Ops.softmax(ops, x, mask, scale)[..., :-1],
    "embedding": _no_registers,
}


@pytest.mark.parametrize("op", WRONG)
def test_wrong_ops_are_caught(op: str) -> None:
    backend = Backend(DeviceOptions())
    backend.ops = type("Broken", (Ops,), {op: WRONG[op]})()
    failed = [finding for finding in check_ops(backend, [op]) if not finding.ok]
    assert failed and all(finding.op == op for finding in failed)
    if op == "embedding":
        assert failed[0].note == "RuntimeError: out of registers"


ACME = """
import torch
from trireme.backends import Backend
from trireme.layers import GatedMLP
from trireme.ops import Ops

calls = set()


class AcmeOps(Ops):
    def rms_norm(self, x, weight, eps):
        calls.add("rms_norm")
        wide = x.double()
        scale = SCALE / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        return (wide * scale * weight.double()).to(x.dtype)

    def gated(self, gate_up, kind):
        calls.add("gated")
        gate, up = gate_up.chunk(2, -1)
        return self.activation(gate, kind).mul(up)


class AcmeMLP(GatedMLP):
    def __call__(self, x):
        calls.add("AcmeMLP")
        return self.down(self.env.ops.gated(self.gate_up(x), self.activation))


class Acme(Backend):
    name = "acme"
    layers = {GatedMLP: AcmeMLP}

    def __init__(self, options, rank=0):
        super().__init__(options, rank)
        self.ops = AcmeOps()
        import atexit
        atexit.register(lambda: print("called:", *sorted(calls)))


class Absent(Backend):
    name = "absent"

    @classmethod
    def unavailable(cls):
        return "no such chip in this machine"
"""


def install(folder: pathlib.Path, scale: str) -> None:
    """A third party's distribution, as pip would leave it."""
    (folder / "acme_trireme.py").write_text(textwrap.dedent(ACME).replace("SCALE", scale))
    info = folder / "acme_trireme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-trireme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trireme.backends]\nacme = acme_trireme:Acme\nabsent = acme_trireme:Absent\n")


def trireme(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = pathlib.Path(__file__).parents[2]
    environ = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{root}"}
    command = [sys.executable, "-m", "trireme.cli.main", "backends", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


def test_a_third_party_backend(tmp_path: pathlib.Path) -> None:
    install(tmp_path, "1.0")
    listed = trireme(tmp_path)
    assert listed.returncode == 0
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert "available" in lines["acme"] and "no such chip" in lines["absent"] and "available" in lines["reference"]
    checked = trireme(tmp_path, "check", "acme")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "FAIL" not in checked.stdout
    assert "called: AcmeMLP gated rms_norm" in checked.stdout  # its own ops and its own layer did run
    assert any(line.startswith("model ") for line in checked.stdout.splitlines())


@pytest.mark.wide
def test_a_broken_third_party_backend(tmp_path: pathlib.Path) -> None:
    install(tmp_path, "1.01")
    checked = trireme(tmp_path, "check", "acme")
    assert checked.returncode == 1
    failed = {line.split()[0] for line in checked.stdout.splitlines() if " FAIL " in line}
    assert {"rms_norm", "add_rms_norm", "qk_norm", "model"} <= failed and "linear" not in failed


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["check", "absent"], 11, "no such chip in this machine"),
        (["check", "nosuch"], 11, "No backend 'nosuch'"),
        (["check", "reference", "--op", "nosuch"], 2, "No op 'nosuch'"),
    ],
)
def test_refusals_are_one_line(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    install(tmp_path, "1.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["backends", *arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and len(shown.err.strip().splitlines()) == 1


def test_one_op_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "check", "reference", "--op", "rope", "--all"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert set(shown) == {"rope"} and len(shown) > 10
