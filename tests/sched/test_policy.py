"""Admission policies: the predicted peak against a step-by-step count, the policies' promises, plug-ins by entry point."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import BadConfig
from trireme.sched import policy as policies
from trireme.sched.policy import Aggressive, BatchDecode, Conservative, Load, PastFuture, peak, policy_by_name


def load(held: list[float], room: list[int], capacity: float, generated: list[int] | None = None, waiting: int = 1) -> Load:
    zeros = np.zeros(len(held), np.int64)
    done = zeros if generated is None else np.array(generated)
    return Load(np.array(held, float), done, np.array(room), np.full(len(held), 0.5), 0.0, capacity, waiting)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=12))
def test_peak_equals_a_count_step_by_step(requests: list[tuple[int, int]]) -> None:
    most = 0
    for step in range(1, max(remaining for _, remaining in requests) + 1):
        most = max(most, sum(held + step for held, remaining in requests if remaining >= step))
    assert peak(np.array([h for h, _ in requests]), np.array([r for _, r in requests])) == most


def test_predictions_are_drawn_from_longer_answers_only() -> None:
    policy = PastFuture(warm=4)
    for length in (10, 20, 30, 40):
        policy.finished(length)
    draws = np.linspace(0, 0.999, 40)
    for generated, possible in ((0, {10, 20, 30, 40}), (10, {20, 30, 40}), (25, {30, 40}), (39, {40})):
        expected = policy.remaining(np.full(40, generated), np.full(40, 1000), draws)
        assert set((expected + generated).tolist()) == possible
    assert policy.remaining(np.array([50]), np.array([1000]), np.array([0.5])).tolist() == [50]
    assert policy.remaining(np.array([50]), np.array([3]), np.array([0.5])).tolist() == [3]


def test_past_future_lies_between_the_extremes() -> None:
    """Known short answers: more is admitted than with full reservations, less than with none."""
    policy = PastFuture(reserve=0.0)
    for _ in range(32):
        policy.finished(20)
    held, room = [10.0] * 10, [1000] * 10
    assert Aggressive().admit(load(held, room, 100))
    assert not policy.admit(load(held, room, 100))
    assert policy.admit(load(held, room, 300))
    assert not Conservative().admit(load(held, room, 300))


def test_past_future_reserves_everything_until_it_has_seen_answers() -> None:
    policy = PastFuture(reserve=0.0, warm=4)
    assert not policy.admit(load([10.0], [1000], 500))
    for _ in range(4):
        policy.finished(5)
    assert policy.admit(load([10.0], [1000], 500))


def test_batch_decode_closes_its_door_until_the_batch_is_done() -> None:
    policy = BatchDecode(2)
    assert policy.admit(load([1.0], [1], 100, waiting=5))
    assert policy.admit(load([1.0, 1.0], [1, 1], 100, waiting=4))
    assert not policy.admit(load([1.0, 1.0, 1.0], [1, 1, 1], 100, waiting=3))
    assert not policy.admit(load([1.0, 1.0], [1, 1], 100, waiting=3))
    assert policy.admit(load([1.0], [1], 100, waiting=3))


def test_policies_are_found_by_name_and_by_entry_point(monkeypatch) -> None:
    assert isinstance(policy_by_name("past_future"), PastFuture)
    built = policy_by_name("batch_decode:32")
    assert isinstance(built, BatchDecode) and built.size == 32
    entry = importlib.metadata.EntryPoint("mine", "tests.sched.test_policy:plugin", "trireme.policies")
    monkeypatch.setattr(policies.importlib.metadata, "entry_points", lambda group: [entry] if group == entry.group else [])
    assert isinstance(policy_by_name("mine:7"), Aggressive)
    with pytest.raises(BadConfig, match="mine"):
        policy_by_name("yours")
    with pytest.raises(BadConfig, match="whole number"):
        policy_by_name("batch_decode:many")


def plugin(argument: str) -> policies.Policy:
    assert argument == "7"
    return Aggressive()
