"""`bench kv`: every kind is timed on the same keys and values, and what cannot be measured is refused in one line."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import pytest
import torch

from trireme.backends import open_backend, reason_against
from trireme.bench import kv
from trireme.bench.flags import kv_flags
from trireme.config import DeviceOptions
from trireme.errors import TriremeError
from trireme.ops import CacheSpec

TINY = "--rows 3 --tokens 45 --heads 4 --kv-heads 2 --head-dim 40 --page-size 4 --repeat 2"
# Of keys and values from a normal distribution; two to three times what was measured.
APART = {"plain": 0.0, "int8": 0.02, "fp8": 0.07, "int4": 0.25}
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(reason_against(name) is not None, reason=str(reason_against(name))))
    for name in ("reference", "cpu")
]


def flags(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kv_flags(parser)
    return parser.parse_args(text.split())


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "SAMPLE_SECONDS", 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_is_measured(backend: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    file = tmp_path / "figures.json"
    assert kv.run(flags(f"{TINY} --backend {backend} --threads {threads} --json {file}")) == 0
    figures = {figure["kind"]: figure for figure in json.loads(file.read_bytes())}
    assert list(figures) == ["plain", "fp8", "int8", "int4"]
    for kind, figure in figures.items():
        each = CacheSpec((2, 40), (2, 40)).as_kind(kind).bytes_per_token(torch.float32)
        assert figure["mib"] == 3 * 45 * each / 2**20
        assert figure["ms"] > 0 and figure["ratio"] == pytest.approx(figures["plain"]["ms"] / figure["ms"])
        assert figure["apart"] <= APART[kind] and (figure["apart"] > 0 or kind == "plain")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{backend}: 3 rows of 45 tokens, 4 heads of 40, 2 of KV" and len(shown) == 6
    assert shown[2].split()[2:4] == ["1.00", "x"]


def test_backends_agree() -> None:
    """Of the same keys and values, whatever keeps them."""
    if reason_against("cpu"):
        pytest.skip(str(reason_against("cpu")))
    outs = []
    for name in ("reference", "cpu"):
        backend = open_backend(DeviceOptions(backend=name))
        outs.append(kv._one(backend, flags(TINY), "int8", torch.float32)[1])
    assert (outs[0] - outs[1]).norm() < 2e-3 * outs[0].norm()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("--kv-heads 3", "4 heads cannot share 3 heads of KV"),
        ("--kinds plain int3", "keeps no int3 KV"),
        ("--tokens 0", "--tokens is 0"),
        ("--head-dim 21 --kinds int4", "two numbers a byte"),
        ("--tokens 9999999999", "MiB are free"),
    ],
)
def test_what_cannot_be_measured(changed: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def layout(backend: Any, args: argparse.Namespace) -> tuple[None, int]:
        return None, args.rows * args.tokens

    if "99" in changed:
        monkeypatch.setattr(kv, "_layout", layout)  # whose pages would themselves take the memory
    with pytest.raises(TriremeError, match=said) as caught:
        kv.measure(open_backend(DeviceOptions(backend="reference")), flags(f"{TINY} {changed}"))
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(reason_against("cuda") is not None, reason=str(reason_against("cuda")))
def test_on_a_gpu() -> None:
    backend = open_backend(DeviceOptions(backend="cuda"))
    with torch.inference_mode():
        figures = kv.measure(backend, flags("--rows 4 --tokens 700 --heads 8 --kv-heads 2 --head-dim 64 --repeat 2"))
    assert all(figure.ms > 0 and figure.apart <= APART[figure.kind] + 0.01 for figure in figures)
