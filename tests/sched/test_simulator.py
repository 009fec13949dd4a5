"""The simulator: its arithmetic on a case small enough to do by hand, and the order of policies under heavy load."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import pytest

from trireme.cli.main import main
from trireme.errors import BadConfig
from trireme.sched.simulator import Bound, Load, Machine, Setup, Simulation, simulate
from trireme.sched.traces import Arrival, sharegpt_lengths, trace_by_name, trace_of_file


def test_one_request_takes_the_time_the_cost_model_says() -> None:
    machine = Machine(base=1.0, per_token=0.1, per_context=0.01, kv_tokens=1000)
    setup = Setup(machine=machine, bound=Bound(10.0, 2.0), max_step_tokens=6)
    report = Simulation("past_future", Load(), [Arrival(prompt=10, output=3)], setup).run()
    steps = [1 + 0.6 + 0.06, 1 + 0.4 + 0.10, 1 + 0.1 + 0.11, 1 + 0.1 + 0.12]  # two chunks of prompt, then two decodes
    assert report.seconds == pytest.approx(sum(steps))
    assert report.first_token_p50 == pytest.approx(sum(steps[:2]))
    assert report.gap_p99 == pytest.approx(steps[3])
    assert report.throughput == report.goodput == pytest.approx(3 / sum(steps))
    tight = dataclasses.replace(setup, bound=Bound(10.0, 1.215))
    assert Simulation("past_future", Load(), [Arrival(10, 3)], tight).run().goodput == 0


@pytest.mark.parametrize("load", [Load(), Load(rate=3.0), Load(clients=5)])
def test_every_request_of_the_trace_is_answered_in_full(load: Load) -> None:
    trace = trace_by_name("uniform", 40, seed=3)
    simulation = Simulation("past_future", load, trace, Setup(machine=Machine(kv_tokens=20_000)))
    simulation.run()
    assert [life.tokens for life in simulation.lives.values()] == [arrival.output for arrival in trace]
    assert [life.came for life in simulation.lives.values()] == sorted(life.came for life in simulation.lives.values())


def test_a_simulation_repeats_itself() -> None:
    def outcome() -> list[float]:
        [report] = simulate(["past_future"], [Load(clients=30)], trace_by_name("sharegpt", 200, 1), Setup(Machine(kv_tokens=9000)))
        return [report.throughput, report.goodput, report.evictions, report.memory_use]

    assert outcome() == outcome()


@pytest.mark.wide
def test_heavy_load_orders_the_policies_as_the_paper_does() -> None:
    """Past-future: the best goodput; aggressive: many evictions; conservative: none, and most of the memory idle."""
    trace, setup = trace_by_name("sharegpt", 700, seed=0), Setup(Machine(kv_tokens=30_000))
    names = ["past_future", "aggressive", "conservative"]
    past_future, aggressive, conservative = simulate(names, [Load(clients=110)], trace, setup)
    assert past_future.goodput >= aggressive.goodput
    assert past_future.goodput >= 2 * conservative.goodput
    assert aggressive.evictions >= 100 and aggressive.evictions >= 10 * past_future.evictions
    assert conservative.evictions == 0
    assert conservative.memory_use <= 0.5 * past_future.memory_use


def test_traces() -> None:
    lengths = sharegpt_lengths()
    assert len(lengths) == 4000 and lengths[0] == Arrival(16, 335)
    assert len(trace_by_name("sharegpt", 5000, 0)) == 5000
    with pytest.raises(BadConfig, match="sharegpt"):
        trace_by_name("nothing", 5, 0)


def test_a_trace_of_ones_own_brings_times_and_priorities(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "trace.csv"
    lines = ["prompt_tokens,output_tokens,priority,arrival_seconds", *(f"40,30,{n % 2},{n / 100}" for n in range(60))]
    file.write_text("\n".join([lines[0], *reversed(lines[1:])]))
    trace = trace_of_file(file)
    assert trace[0] == Arrival(40, 30, 0, 0.0) and [arrival.at for arrival in trace] == sorted(arrival.at or 0 for arrival in trace)
    ended: list[int] = []
    setup = Setup(machine=Machine(kv_tokens=600))
    (report,) = simulate(["past_future"], [Load(recorded=True)], trace, setup, lambda policy, load, count: ended.append(count))
    assert ended == list(range(1, 61)) and report.requests == 60 and report.load == "as recorded"
    assert report.first_token_p99_of[0] < report.first_token_p99_of[1]  # lower goes first
    file.write_text("prompt_tokens,output_tokens\n40,30\n")
    assert trace_of_file(file) == [Arrival(40, 30)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prompt_tokens\n1\n", "no column output_tokens"),
        ("prompt_tokens,output_tokens\n", "no requests"),
        ("prompt_tokens,output_tokens\n1,x\n", "line 2: a value is not a number"),
        ("prompt_tokens,output_tokens\n1,2\n0,2\n", "line 3: prompt_tokens is 0"),
        ("prompt_tokens,output_tokens,arrival_seconds\n1,2,nan\n", "arrival_seconds is nan"),
        ("prompt_tokens,output_tokens,arrival_seconds\n1,2,1\n1,2,\n", "for some requests only"),
    ],
)
def test_a_trace_that_is_not_understood_is_refused(text: str, told: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(BadConfig, match=told):
        trace_of_file(tmp_path / "trace.csv")


def test_the_command_shows_priorities_and_how_far_it_is(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.csv").write_text("prompt_tokens,output_tokens,priority\n9,5,0\n9,5,1\n")
    command = ["simulate", "--trace", str(tmp_path / "trace.csv"), "--policies", "aggressive", "--at-once"]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "by priority" in told.out and told.err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(command) == 0 and "aggressive, all at once: 1 of 2 requests" in capsys.readouterr().err
