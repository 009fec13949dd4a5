"""Two passes over memory in one launch, the second close enough behind the first to find its input in the cache.
Knows pieces of work by number, never what a pass computes."""

from __future__ import annotations

import triton
import triton.language as tl

from trireme.kernels import chips

_RESIDENT = 4  # programs of a multiprocessor that a second pass stays behind, so that it seldom waits


def lag(items: int, parts: int) -> int:
    """How many pieces the first pass is ahead: the parts of one row, and all that may run at once."""
    return min(items, parts + _RESIDENT * chips.current().multiprocessors)


@triton.jit
def take(counters, items, ahead):
    """The next piece: its number and whether it is its second pass. First passes begin `ahead` pieces early, then both alternate.

    Pieces are handed out in order, so whoever waits for earlier ones waits for programs that already run.
    """
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    if ticket == 2 * items - 1:
        tl.store(counters, 0)
    behind = ticket - ahead
    alternating = (behind >= 0) & (behind < 2 * (items - ahead))
    second = (alternating & (behind % 2 == 0)) | (ticket >= 2 * items - ahead)
    item = tl.where(alternating, behind // 2 + tl.where(second, 0, ahead), tl.where(second, ticket - items, ticket))
    return item, second


@triton.jit
def arrive(counter):
    """Says that something is stored; returns how many have said so before, whose stores may then be read."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def wait(counter, count):
    """Waits until so many have arrived."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


@triton.jit
def leave(counter, count):
    """Says that a second pass is done; the last of `count` arrivals and departures leaves the counter at zero."""
    if tl.atomic_add(counter, 1, sem="relaxed") == count - 1:
        tl.store(counter, 0)
