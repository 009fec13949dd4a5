"""The scheduler's counters and state, for metrics. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """What the scheduler has done since it began."""

    cache_queries: int = 0  # prompt tokens looked up in the prefix cache
    cache_hits: int = 0  # prompt tokens found there
    preemptions: int = 0
    tokens_scheduled: int = 0
    tokens_generated: int = 0
    masked_rows: int = 0  # rows computed in vain, for a request that had ended meanwhile


@dataclass(frozen=True)
class Stats:
    """Where the scheduler stands, and what it has done since it began."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int  # in the prefix cache, in use or not
    pages_owned: int  # in use by requests, and not in the prefix cache
    pages_locked: int  # in the prefix cache and in use
    cache_queries: int  # prompt tokens looked up
    cache_hits: int  # prompt tokens found
    preemptions: int
    steps: int
    tokens_scheduled: int
    tokens_generated: int
    masked_rows: int  # rows computed for a request that had ended meanwhile
    oldest_wait: float  # seconds since the first request in the queue arrived
