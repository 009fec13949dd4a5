"""Admission policies: whether one more request may join the batch. Knows lengths and memory as numbers, never requests' tokens.

A policy is chosen by name (`past_future`, or `batch_decode:32` with an argument) and may come from another package by the
entry point `trireme.policies`: a callable that takes the argument text ("" if none) and returns a Policy.
"""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trireme.errors import BadConfig
from trireme.types import Request


@dataclass(frozen=True)
class Load:
    """The running batch with the candidate as its last entry, in slots of KV memory: one entry per request."""

    held: np.ndarray  # slots of its own when all tokens that it has now are computed
    generated: np.ndarray
    room: np.ndarray  # tokens it may still generate
    draw: np.ndarray  # in [0, 1), fixed per request: its quantile in the distribution of output lengths
    shared: float  # slots of shared pages in use, which are not counted in `held`
    capacity: float
    num_waiting: int  # including the candidate

    @property
    def num_running(self) -> int:
        return len(self.held) - 1


class Policy(Protocol):
    """Decides admission, and the order of the queue."""

    def admit(self, load: Load) -> bool:
        """Whether the candidate, whose prompt fits now, may join. If nothing runs, it is admitted whatever this returns."""
        ...

    def rank(self, request: Request) -> int:
        """The request's class in the queue and when memory runs out: lower goes first and is paused last."""
        return request.priority

    def finished(self, num_generated: int) -> None:
        """Learns the length of an answer that has ended."""
        return None


class Aggressive(Policy):
    """Admits every request that fits now. When answers grow beyond the memory, requests are paused."""

    def admit(self, load: Load) -> bool:
        return float(load.held.sum()) + load.shared <= load.capacity


class Conservative(Policy):
    """Reserves every request's longest possible answer, so that nobody is ever paused."""

    def admit(self, load: Load) -> bool:
        return float((load.held + load.room).sum()) + load.shared <= load.capacity


class BatchDecode(Policy):
    """Static batching: admits a batch of waiting requests, and the next batch only when all of these are done."""

    def __init__(self, size: int = 0):
        self.size = size  # 0: as many as there are rows
        self._places = 0

    def admit(self, load: Load) -> bool:
        if not load.num_running:
            self._places = min(self.size or load.num_waiting, load.num_waiting)
        self._places -= 1
        return self._places >= 0


class PastFuture(Policy):
    """Admits by the predicted peak of future memory: each request's length drawn from the lengths of past answers.

    After the Past-Future scheduler (ASPLOS 2025). Sort the requests by tokens remaining, longest first. When request i
    ends, r_i steps from now, requests 1..i are still there and each has grown by r_i, so memory is then
    held_1 + ... + held_i + i * r_i; the peak is the largest of these.
    """

    def __init__(self, window: int = 1000, reserve: float = 0.05, warm: int = 16):
        self.reserve = reserve  # share of the memory that is kept free for wrong predictions
        self.warm = warm  # with fewer answers seen than this, the longest possible answer is assumed
        self._past: deque[int] = deque(maxlen=window)
        self._sorted: np.ndarray | None = None

    def finished(self, num_generated: int) -> None:
        self._past.append(num_generated)
        self._sorted = None

    def admit(self, load: Load) -> bool:
        remaining = self.remaining(load.generated, load.room, load.draw)
        return peak(load.held, remaining) + load.shared <= load.capacity * (1.0 - self.reserve)

    def remaining(self, generated: np.ndarray, room: np.ndarray, draw: np.ndarray) -> np.ndarray:
        """How many more tokens each request will generate, drawn from past answers that are longer than its own is now."""
        if len(self._past) < self.warm:
            return room
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._past, np.int64))
        past = self._sorted
        first = np.searchsorted(past, generated, side="right")
        index = first + (draw * (len(past) - first)).astype(np.int64)
        longer = past[np.minimum(index, len(past) - 1)]
        # It is longer than any past answer: expect as many tokens again as it has.
        expected = np.where(first < len(past), longer, 2 * generated)
        return np.minimum(expected - generated, room)


def peak(held: np.ndarray, remaining: np.ndarray) -> float:
    """The most memory the requests will hold at once, if each ends after its remaining tokens and nobody joins."""
    if not len(held):
        return 0.0
    longest_first = np.argsort(-remaining)
    still_there = np.arange(1, len(held) + 1)
    return float((np.cumsum(held[longest_first]) + still_there * remaining[longest_first]).max())


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise BadConfig(f"The policy's argument is {text!r}.", "give a whole number, as in batch_decode:32")
    return int(text)


POLICIES: dict[str, Callable[[str], Policy]] = {
    "past_future": lambda text: PastFuture(),
    "aggressive": lambda text: Aggressive(),
    "conservative": lambda text: Conservative(),
    "batch_decode": lambda text: BatchDecode(_count(text) if text else 0),
}


def policy_by_name(name: str) -> Policy:
    """The policy called `name`: a built-in one or a plug-in's."""
    plain, _, argument = name.partition(":")
    if plain in POLICIES:
        return POLICIES[plain](argument)
    plugins = {entry.name: entry for entry in importlib.metadata.entry_points(group="trireme.policies")}
    if plain in plugins:
        return plugins[plain].load()(argument)
    raise BadConfig(f"No policy is called {plain!r}.", f"use one of: {', '.join(sorted([*POLICIES, *plugins]))}")
