"""Numbers for Prometheus, under the names that dashboards for LLM servers know. Knows counts and seconds, never text.

Router numbers come with each scrape from the client's stats; request numbers are counted in this process (and joined over all
HTTP processes through PROMETHEUS_MULTIPROC_DIR when that is set).
"""

from __future__ import annotations

import os
import platform
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

import trireme
from trireme.serve.answers import Answer, Piece
from trireme.serve.client import State

WINDOW_SECONDS = 60.0  # seconds that the percentiles in /load cover
MAX_UNSETTLED = 1024  # times between tokens that are collected before they are counted together

_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_LENGTH = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
_SMALL = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 128.0)

disable_created_metrics()  # the time at which each series began would double their number, and no dashboard reads it

# our name -> (buckets, help text)
_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (_LATENCY, "From the request's arrival to its first token"),
    "inter_token_latency_seconds": (_TOKEN, "Between two tokens of one sequence"),
    "request_time_per_output_token_seconds": (_TOKEN, "Mean time per token after the first, one value per request"),
    "e2e_request_latency_seconds": (_REQUEST, "From the request's arrival to its end"),
    "request_prefill_time_seconds": (_REQUEST, "From the router's acceptance to the first token"),
    "request_decode_time_seconds": (_REQUEST, "From the first token to the last"),
    "request_inference_time_seconds": (_REQUEST, "From the router's acceptance to the last token"),
    "request_prompt_tokens": (_LENGTH, "Prompt tokens per request"),
    "request_generation_tokens": (_LENGTH, "Generated tokens per request"),
    "request_params_n": (_SMALL, "n of each request"),
    "request_params_max_tokens": (_LENGTH, "max_tokens of each request that set it"),
}

# our name -> (labels besides the model's, help text)
_COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "prompt_tokens": ((), "Prompt tokens taken"),
    "prompt_tokens_cached": ((), "Prompt tokens found in the prefix cache"),
    "generation_tokens": ((), "Tokens generated"),
    "request_success": (("finished_reason",), "Requests answered to their end"),
    "request_aborted": (("cause",), "Requests that ended early"),
    "request_rejected": (("reason",), "Requests refused"),
    "http_requests": (("route", "status"), "Answers over HTTP"),
}

# our name -> (kind, key in the router's stats, help text)
_ROUTER: tuple[tuple[str, type[Metric], str, str], ...] = (
    ("num_requests_running", GaugeMetricFamily, "running", "Requests being computed"),
    ("num_requests_waiting", GaugeMetricFamily, "waiting", "Requests in the queue"),
    ("kv_pages_total", GaugeMetricFamily, "pages_total", "KV pages in all"),
    ("kv_pages_free", GaugeMetricFamily, "pages_free", "KV pages that hold nothing"),
    ("kv_pages_cached", GaugeMetricFamily, "pages_cached", "KV pages in the prefix cache"),
    ("kv_pages_owned", GaugeMetricFamily, "pages_owned", "KV pages of running requests alone"),
    ("oldest_wait_seconds", GaugeMetricFamily, "oldest_wait", "How long the first in the queue has waited"),
    ("prefix_cache_queries", CounterMetricFamily, "cache_queries", "Prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", CounterMetricFamily, "cache_hits", "Prompt tokens found in the prefix cache"),
    ("num_preemptions", CounterMetricFamily, "preemptions", "Requests whose KV was given up and recomputed"),
    ("engine_steps", CounterMetricFamily, "steps", "Steps computed"),
    ("iteration_tokens", CounterMetricFamily, "tokens_scheduled", "Tokens computed in steps"),
    ("worker_restarts", CounterMetricFamily, "worker_restarts", "Times that workers were started again"),
)


class _Histogram(Histogram):
    """A histogram that takes many values at once. One call per value would cost as much as making a token's text."""

    def observe_all(self, values: list[float]) -> None:
        for bucket, count in Tally(bisect_left(self._upper_bounds, value) for value in values).items():
            self._buckets[bucket].inc(count)
        self._sum.inc(sum(values))


class Metrics:
    """The metrics of one HTTP process."""

    def __init__(self, prefix: str, model: str):
        self._prefix, self._model = prefix, model
        self._registry = CollectorRegistry()
        self._histograms = {
            name: _Histogram(f"{prefix}:{name}", text, ["model_name"], registry=self._registry, buckets=buckets).labels(model)
            for name, (buckets, text) in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"{prefix}:{name}", text, ["model_name", *labels], registry=self._registry)
            for name, (labels, text) in _COUNTERS.items()
        }
        self.recent_first: deque[tuple[float, float]] = deque(maxlen=4096)  # (when, seconds)
        self.recent_between: deque[tuple[float, float]] = deque(maxlen=16384)
        self.counts = {"prompt_tokens": 0, "generation_tokens": 0, "requests": 0}
        self.open_meters: set[Meter] = set()
        self._gaps: list[float] = []  # times between tokens that are not yet in the histogram
        self._made = 0  # tokens that are not yet in the counter

    def generated(self, now: float, made: int, gap: float | None) -> None:
        """Notes new tokens of one sequence, and the time each took unless they are its first. They are counted later."""
        self.counts["generation_tokens"] += made
        self._made += made
        if gap is not None:
            self.recent_between.append((now, gap))
            self._gaps += [gap] * made
            if len(self._gaps) > MAX_UNSETTLED:
                self.count_generated()

    def settle(self) -> None:
        """Updates all numbers from the times at which tokens came, which is all that was noted for each token."""
        for meter in self.open_meters:
            meter.settle()
        self.count_generated()

    def totals(self) -> dict[str, int]:
        """The tokens and requests since the process started."""
        self.settle()
        return self.counts

    def count_generated(self) -> None:
        """Adds the collected tokens and times to the counters."""
        gaps, made = self._gaps, self._made
        self._gaps, self._made = [], 0
        if gaps:
            self._histograms["inter_token_latency_seconds"].observe_all(gaps)
        if made:
            self.count("generation_tokens", made)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        self._counters[name].labels(self._model, *labels).inc(amount)

    def exposition(self, stats: dict[str, Any], state: State, **build: str) -> bytes:
        """The text of /metrics; `build` is what is told of the engine besides versions."""
        self.settle()
        registry = self._registry
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        router = CollectorRegistry()
        router.register(_Router(self._prefix, self._model, stats, state, build))
        return generate_latest(registry) + generate_latest(router)

    def percentiles(self) -> dict[str, dict[str, float] | None]:
        """The percentiles of the last minute, in seconds."""
        self.settle()
        since = time.monotonic() - WINDOW_SECONDS
        return {
            "time_to_first_token": _percentiles([value for when, value in self.recent_first if when >= since]),
            "inter_token_latency": _percentiles([value for when, value in self.recent_between if when >= since]),
        }


@dataclass(eq=False)
class _Router:
    """The router's numbers and state at the time of this scrape."""

    prefix: str
    model: str
    stats: dict[str, Any]
    state: State
    build: dict[str, str]

    def collect(self) -> Iterable[Metric]:
        for name, kind, key, text in _ROUTER:
            if key in self.stats:
                yield self._one(name, kind, text, float(self.stats[key]))
        yield self._build()
        yield self._one("kv_cache_usage_perc", GaugeMetricFamily, "Share of the KV pages in use, 0 to 1", kv_usage(self.stats))
        asleep = float(self.state.name == "sleeping")
        yield self._one("engine_sleep_state", GaugeMetricFamily, "1 while the weights are unloaded", asleep)
        ready = float(self.state.serving)
        yield self._one("server_ready", GaugeMetricFamily, "1 while requests are taken", ready)
        ages = GaugeMetricFamily(f"{self.prefix}:heartbeat_age_seconds", "Since a process's last sign of life", labels=["process"])
        for process, age in self.state.ages.items():
            ages.add_metric([process], age)
        yield ages

    def _build(self) -> Metric:
        labels = {"version": trireme.__version__, "python": platform.python_version(), **self.build}
        family = GaugeMetricFamily(f"{self.prefix}:build_info", "What runs here; always 1", labels=["model_name", *labels])
        family.add_metric([self.model, *labels.values()], 1)
        return family

    def _one(self, name: str, kind: type[Metric], text: str, value: float) -> Metric:
        family = kind(f"{self.prefix}:{name}", text, labels=["model_name"])  # type: ignore[call-arg]
        family.add_metric([self.model], value)  # type: ignore[attr-defined]
        return family


class Meter:
    """Measures one request from its arrival to its end."""

    def __init__(self, metrics: Metrics, arrived: float, prompt_tokens: int, n: int, max_tokens: int | None):
        self._metrics, self._arrived, self._opened = metrics, arrived, time.monotonic()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._marks: list[tuple[float, int, int]] = []  # not yet settled: the time, the sequence, and the number of tokens
        self._made = 0
        self._ended = False
        metrics.open_meters.add(self)
        metrics.counts["prompt_tokens"] += prompt_tokens
        metrics.counts["requests"] += 1
        metrics.count("prompt_tokens", prompt_tokens)
        metrics.observe("request_prompt_tokens", prompt_tokens)
        metrics.observe("request_params_n", n)
        if max_tokens is not None:
            metrics.observe("request_params_max_tokens", max_tokens)

    def take(self, piece: Piece) -> None:
        """Notes when tokens came. The numbers are computed later, for many tokens at once."""
        if piece.token_ids:
            self._marks.append((time.monotonic(), piece.index, len(piece.token_ids)))
            if len(self._marks) > MAX_UNSETTLED:
                self.settle()

    def settle(self) -> None:
        marks, self._marks = self._marks, []
        for now, index, made in marks:
            last = self._last.get(index)
            self._last[index] = now
            self._made += made
            if self._first is None:
                self._first = now
                self._metrics.observe("time_to_first_token_seconds", now - self._arrived)
                self._metrics.recent_first.append((now, now - self._arrived))
            self._metrics.generated(now, made, None if last is None else (now - last) / made)

    def end(self, answer: Answer, cause: str) -> None:
        """Counts how an answer ended; `cause` says why it is not whole, if so. A row that failed has ended without success."""
        if self._ended:
            return
        self._ended = True
        metrics, now = self._metrics, time.monotonic()
        self.settle()
        metrics.count_generated()
        metrics.open_meters.discard(self)
        metrics.count("prompt_tokens_cached", answer.cached_tokens)
        if not answer.done or cause != "disconnect":
            metrics.count("request_aborted", 1, cause)
            return
        metrics.count("request_success", 1, str(answer.completions[0].finish_reason))
        metrics.observe("e2e_request_latency_seconds", now - self._arrived)
        metrics.observe("request_inference_time_seconds", now - self._opened)
        metrics.observe("request_generation_tokens", self._made)
        if self._first is not None:
            metrics.observe("request_prefill_time_seconds", self._first - self._opened)
            metrics.observe("request_decode_time_seconds", now - self._first)
            if self._made > 1:
                metrics.observe("request_time_per_output_token_seconds", (now - self._first) / (self._made - 1))


def kv_usage(stats: dict[str, Any]) -> float:
    """The share of pages that running requests hold. Cached pages without a user can be freed at once, so they do not count."""
    total = stats.get("pages_total") or 0
    return (stats.get("pages_owned", 0) + stats.get("pages_locked", 0)) / total if total else 0.0


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    values.sort()
    return {f"p{share}": values[min(len(values) - 1, len(values) * share // 100)] for share in (50, 90, 99)}
