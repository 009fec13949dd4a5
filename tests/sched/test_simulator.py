"""The simulator: its arithmetic on a case small enough to do by hand, and the order of policies under heavy load."""

from __future__ import annotations

import dataclasses

import pytest

from trireme.errors import BadConfig
from trireme.sched.simulator import (
    Arrival,
    Bound,
    Load,
    Machine,
    Setup,
    Simulation,
    sharegpt_lengths,
    simulate,
    trace_by_name,
)


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
