"""Captured steps with prompts: a graph replays the step it was made from, on whatever the buffers hold by then.

Emulated in the interpreter: a "graph" calls the captured closure again, whose columns on the host are those of the first step.
"""

from __future__ import annotations

import os
import pathlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from trireme.backends import registry
from trireme.backends.base import Backend
from trireme.backends.cuda.ops import CudaOps
from trireme.bench import shapes
from trireme.config import DeviceOptions
from trireme.kernels import chips
from trireme.llm import LLM
from trireme.types import SamplingParams
from trireme.worker import runner

pytestmark = pytest.mark.skipif(not chips.current().interpreted, reason="graphs themselves are tested on the GPU")
CAPTURED: list[Any] = []
SETTINGS: dict[str, Any] = {"random_weights": True, "dtype": "float32", "max_model_len": 32, "kv_tokens": 256, "page_size": 4}
SETTINGS |= {"max_step_tokens": 14, "max_running": 2, "prefix_cache": False}


class Emulated(Backend):
    """The CUDA op table on the CPU, with graphs that are closures."""

    name = "emulated"

    def __init__(self, options: DeviceOptions, rank: int = 0):
        super().__init__(options, rank)
        self.ops = CudaOps()

    def graph_sizes(self, max_rows: int) -> tuple[int, ...]:
        return (max_rows,)

    def graph_tokens(self, max_rows: int) -> tuple[int, ...]:
        return (16,)

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        CAPTURED.append(step)
        return step


class Full(Emulated):
    """One that has no memory left for graphs."""

    name = "full"

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        raise torch.OutOfMemoryError("for the test")


class Timed(Emulated):
    """One whose large steps take the host a second and the device as long as is said."""

    name, graph_tokens_surely = "timed", 0
    now, device_seconds = 0.0, 0.0

    def stopwatch(self) -> Callable[[], Callable[[], float]]:
        Timed.now += 1.0
        return lambda: lambda: Timed.device_seconds


@pytest.fixture
def tiny(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    small = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 96, "num_hidden_layers": 1}
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.SHAPES["tiny"] | small)
    return str(shapes.write_model("tiny", tmp_path))


@pytest.mark.parametrize("seconds, captured", [(0.5, True), (1.1, True), (2.0, False)])
def test_large_steps_are_captured_where_the_device_waits_for_the_host(
    tiny: str, monkeypatch: pytest.MonkeyPatch, seconds: float, captured: bool
) -> None:
    monkeypatch.setitem(registry.BUILT_IN, "timed", f"{__name__}:Timed")
    monkeypatch.setattr(Timed, "device_seconds", seconds)
    monkeypatch.setattr(runner, "time", types.SimpleNamespace(perf_counter=lambda: Timed.now))
    once = SamplingParams(temperature=0.0, max_tokens=1)
    with LLM(tiny, backend="timed", **SETTINGS) as llm:
        graphs = []
        for i in range(4):
            llm.generate([5 + i] * 12, once)
            graphs.append([padding.tokens for padding, _ in llm.worker.runner.graphs if not padding.decode])
    late = [16] if captured else []
    assert graphs == [[], [], late, late]  # the first is not measured, the second is


def test_replayed_steps_give_the_references_tokens(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILT_IN, "emulated", f"{__name__}:Emulated")
    monkeypatch.setitem(registry.BUILT_IN, "full", f"{__name__}:Full")
    prompts = [[(7 * i * j + i) % 80 + 5 for j in range(n)] for i, n in enumerate((3, 12, 1, 9, 6))]
    sampling = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=2 + i % 3, ignore_eos=True) for i in range(5)]
    found = []
    for backend in ("reference", "emulated", "full"):
        with LLM(tiny, backend=backend, **SETTINGS) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, sampling)])
            assert (runner.Standing.NEVER in llm.worker.runner.known.values()) == (backend == "full")
    assert found[0] == found[1] == found[2]
    assert len(CAPTURED) >= 2, "neither decode steps nor steps with prompts were captured"
