"""Recorded CPU steps: replaying equals running again, on whatever the inputs hold by then."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from trireme.backends import reason_against

if reason_against("cpu"):
    pytest.skip(str(reason_against("cpu")), allow_module_level=True)

from trireme.backends.cpu.backend import Cpu
from trireme.backends.cpu.fuse import arguments, fused
from trireme.backends.cpu.library import StepStruct
from trireme.backends.cpu.ops import gate_transform
from trireme.backends.cpu.program import Live, Program
from trireme.backends.cpu.tape import Arena, Tape
from trireme.backends.cpu.weights import PackedWeight
from trireme.config import DeviceOptions


@pytest.fixture
def backend() -> Cpu:
    return Cpu(DeviceOptions(threads=2))


def test_replay_follows_the_inputs(backend: Cpu) -> None:
    ops, norm = backend.ops, torch.randn(64)
    up, down = (PackedWeight.from_floats("q8", torch.randn(*shape)) for shape in ((256, 64), (64, 128)))
    x, index, table = torch.randn(5, 64), torch.tensor([4, 0, 2]), torch.zeros(3, 8)

    def step() -> torch.Tensor:
        hidden, residual = ops.add_rms_norm(x, x * 2, norm, 1e-5)
        y = ops.packed_linear([down], ops.gated(ops.packed_linear([up], hidden, None), "silu"), None)
        logits = ops.select(y + residual, index)
        ids = ops.sample_greedy(logits)
        table[torch.arange(3), ids % 8] += 1
        return torch.where(ids > 30, ids, -ids)

    with torch.inference_mode():
        replay = backend.graph(step)
        for seed in range(4):
            x.copy_(torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)))
            index.copy_(torch.tensor([seed, 1, 4 - seed]))
            table.zero_()
            expected, counted = step().clone(), table.clone()
            table.zero_()
            assert torch.equal(replay(), expected)
            assert torch.equal(table, counted)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("watched", [None, "x", "y"])
def test_a_norm_between_products_is_taken_into_them(backend: Cpu, rows: int, watched: str | None) -> None:
    """Unless somebody else looks at the sum or the norm; the values are the same either way."""
    ops, norm = backend.ops, torch.randn(64)
    first, second, third = (PackedWeight.from_floats(kind, torch.randn(64, 64)) for kind in ("q8", "f32", "q4_min"))
    start, other = torch.randn(rows, 64), torch.randn(rows, 64)

    def step() -> torch.Tensor:
        x = ops.packed_linear([first], start, None)
        y, residual = ops.add_rms_norm(x, other, norm, 1e-5)
        z = ops.packed_linear([second, third], y, None)
        if watched:  # by a step of the program that comes later
            z = torch.cat([z, ops.rms_norm({"x": x, "y": y}[watched], norm, 1e-5)], 1)
        return torch.cat([z, residual], 1)

    with torch.inference_mode():
        replay, compiled = backend.graph(step), len(recorded_steps(backend, step))
        assert compiled == {None: 3, "x": 5, "y": 5}[watched]
        start.normal_()
        other_before = other.normal_().clone()
        expected = step().clone()
        other.copy_(other_before)
        torch.testing.assert_close(replay(), expected, atol=1e-3, rtol=1e-3)


def recorded_steps(backend: Cpu, step: Callable[[], torch.Tensor]) -> list[StepStruct]:
    """What a recording of the step runs in C."""
    tape = backend.ops.tape = Tape(backend.arena)
    with tape.watching():
        held = step()
    backend.ops.tape = None
    programs = [entry for entry in tape.entries if isinstance(entry, Program)]
    assert held is not None and len(programs) == 1
    return fused(programs[0].steps, [], backend.arena.is_free)


@pytest.mark.parametrize("rows", [1, 16, 37, 100])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_product_knows_its_reader(backend: Cpu, rows: int, watched: bool, kind: str) -> None:
    """Unless somebody else looks at what the gate reads; the values are the same either way."""
    ops, bias = backend.ops, torch.randn(256)
    first, second = PackedWeight.from_floats("q4_min", torch.randn(256, 64)), PackedWeight.from_floats("q8", torch.randn(64, 128))
    x = torch.randn(rows, 64)

    def step() -> tuple[torch.Tensor, torch.Tensor | None]:
        middle = ops.packed_linear([first], x, bias)
        return ops.packed_linear([second], middle, None, gate_transform(kind)), middle if watched else None

    with torch.inference_mode():
        tape = ops.tape = Tape(backend.arena)
        expected, middle = step()
        ops.tape = None
        again = tape.replay()
        program = tape.entries[0]
        assert isinstance(program, Program) and bool(arguments(program.steps[0]).reader) is not watched
        x.copy_(torch.randn(rows, 64))
        again()
        ours = expected.clone(), middle.clone() if middle is not None else None
        torch.testing.assert_close(ours, step())


@pytest.mark.parametrize("kind", ["f32", "q4_min"])
def test_a_recording_with_room_computes_only_what_is_wanted(backend: Cpu, kind: str) -> None:
    """One recording serves any number of rows; those past the wanted ones are neither read nor written."""
    ops, room, count, norm = backend.ops, 40, torch.zeros(1, dtype=torch.int32), torch.randn(64)
    first, second = (PackedWeight.from_floats(kind, torch.randn(64, 64)) for _ in range(2))
    x, residual, index = torch.randn(room, 64), torch.zeros(room, 64), torch.zeros(3, dtype=torch.int32)

    def step(rows: int = room) -> torch.Tensor:
        y, _ = ops.add_rms_norm(ops.packed_linear([first], x[:rows], None), residual[:rows], norm, 1e-5)
        return ops.select(ops.packed_linear([second], y, None), index)

    with torch.inference_mode():
        count[0], ops.live = 1, Live(room, count)
        replay = backend.graph(step)
        ops.live = None
        for wanted in (1, 7, 16, 33, room):
            count[0], index[:] = wanted, torch.tensor([0, wanted - 1, wanted // 2])
            residual.fill_(0)
            got = replay().clone()
            assert residual[:wanted].any(1).all() and not residual[wanted:].any()
            residual.fill_(0)
            torch.testing.assert_close(got, step(wanted))


@pytest.mark.parametrize("ask", [lambda x: float(x[0]), lambda x: x.tolist()[0], lambda x: x.numpy()[0], lambda x: bool(x.all())])
def test_a_step_that_asks_the_host_is_not_recorded(backend: Cpu, ask: Callable[[torch.Tensor], float]) -> None:
    x = torch.ones(2)
    with torch.inference_mode():
        assert backend.graph(lambda: x * 2 if ask(x) > 0 else x) is None
        assert backend.graph(lambda: x * 2) is not None


def test_arena_reuses_what_nobody_holds() -> None:
    arena = Arena()
    first = arena.empty((4, 16), torch.float32)
    address, view = first.data_ptr(), first[1:]
    del first
    gc.collect()
    second = arena.empty((4, 16), torch.float32)
    assert second.data_ptr() != address, "a view still looks at it"
    del view
    gc.collect()
    assert arena.empty((4, 16), torch.float32).data_ptr() == address
