"""Load on a server: what is asked (workloads), when (open or closed loop), and what came of it (samples). Knows no tables."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trireme.bench.sse import Answer, RequestFailed, Server
from trireme.errors import BadConfig
from trireme.sched.traces import trace_by_name

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place "
    "case week company system program question work number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father power hour game line end member law"
)
_WORDS = _TEXT.split()


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = _Delta()


class _Event(msgspec.Struct):
    """The fields that are read from an event, for both kinds of completion."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass
class Ask:
    """One request: its prompt and the number of tokens to generate. Requests of one chain are sent one after the other."""

    prompt: str
    output_tokens: int
    chain: int | None = None


@dataclass
class Sample:
    """The measurements of one request. Times are in seconds."""

    begun: float
    first: float = 0.0  # seconds since the beginning
    whole: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def per_token(self) -> float:
        return (self.whole - self.first) / max(self.output_tokens - 1, 1)


@dataclass
class Shape:
    """The numbers of a workload."""

    requests: int = 100
    prompt_tokens: int = 128
    output_tokens: int = 64
    prefix_tokens: int = 512
    groups: int = 4
    turns: int = 4
    max_tokens: int = 2048  # prompt and answer together, for lengths drawn from conversations
    seed: int = 1


def asks_of(workload: str, shape: Shape) -> list[Ask]:
    """The requests of a workload. About one word is one token; the server's own counts are what is reported."""
    draw = random.Random(shape.seed)

    def words(count: int) -> str:
        return " ".join(draw.choices(_WORDS, k=max(count, 1)))

    if workload == "random":
        return [Ask(words(shape.prompt_tokens), shape.output_tokens) for _ in range(shape.requests)]
    if workload == "sharegpt":
        lengths = [(arrival.prompt, arrival.output) for arrival in trace_by_name("sharegpt", shape.requests, shape.seed)]
        cut = [(min(p, shape.max_tokens * 3 // 4), o) for p, o in lengths]
        return [Ask(words(p), max(1, min(o, shape.max_tokens - p))) for p, o in cut]
    if workload == "prefix":
        prefixes = [words(shape.prefix_tokens) for _ in range(shape.groups)]
        return [
            Ask(f"{prefixes[i % shape.groups]} {words(shape.prompt_tokens)}", shape.output_tokens) for i in range(shape.requests)
        ]
    if workload == "multiturn":
        chains = max(1, shape.requests // shape.turns)
        return [Ask(words(shape.prompt_tokens), shape.output_tokens, c) for _ in range(shape.turns) for c in range(chains)]
    raise BadConfig(f"No workload is called {workload!r}.", "use one of: random, sharegpt, prefix, multiturn")


@dataclass
class Pace:
    """When requests are sent: `rate` per second (open loop, gaps of a gamma law), at most `concurrency` at once (closed loop)."""

    rate: float = float("inf")
    concurrency: int = 0  # 0: no bound
    burstiness: float = 1.0  # 1: Poisson; less: burstier
    seed: int = 1

    def times(self, count: int) -> list[float]:
        draw, now, times = random.Random(self.seed), 0.0, []
        for _ in range(count):
            times.append(now)
            if self.rate != float("inf"):
                now += draw.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
        return times


class Load:
    """Sends a workload to a server."""

    def __init__(self, server: Server, model: str, *, chat: bool = False, extra: dict[str, Any] | None = None):
        self._server, self._model, self._chat, self._extra = server, model, chat, extra or {}

    async def run(self, asks: list[Ask], pace: Pace, progress: Callable[[], None] = lambda: None) -> tuple[list[Sample], float]:
        """Returns (one sample per request, the total seconds)."""
        places = asyncio.Semaphore(pace.concurrency or len(asks))
        histories: dict[int, str] = {}
        chains: dict[int, asyncio.Lock] = {}
        begun = time.perf_counter()

        async def one(ask: Ask, at: float) -> Sample:
            await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
            lock = chains.setdefault(ask.chain, asyncio.Lock()) if ask.chain is not None else asyncio.Lock()
            async with lock, places:
                said = histories.get(ask.chain, "") if ask.chain is not None else ""
                prompt = f"{said} {ask.prompt}".strip()
                sample = await self.ask(prompt, ask.output_tokens)
                if ask.chain is not None:
                    histories[ask.chain] = f"{prompt} {sample.text}"
            progress()
            return sample

        samples = await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, pace.times(len(asks)), strict=True)))
        return list(samples), time.perf_counter() - begun

    async def ask(self, prompt: str, output_tokens: int) -> Sample:
        """Sends one request as a stream and times it."""
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **self._extra,
        }
        body |= {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        sample = Sample(time.perf_counter())
        try:
            self._read(sample, await self._server.post(path, msgspec.json.encode(body)))
        except (RequestFailed, msgspec.DecodeError) as error:
            sample.error = str(error)
        return sample

    def _read(self, sample: Sample, answer: Answer) -> None:
        """Reads the events of an answer and the times at which they came."""
        last = 0.0
        for when, data in answer.events():
            text = "" if data == b"[DONE]" else self._take(sample, _decode(data))
            if text:
                if last:
                    sample.gaps.append(when - last)
                else:
                    sample.first = when - sample.begun
                last = when
                sample.text += text
        if not last:
            raise RequestFailed("The answer had no text.")
        sample.whole = last - sample.begun
        sample.output_tokens = sample.output_tokens or len(sample.gaps) + 1

    def _take(self, sample: Sample, event: _Event) -> str:
        """Returns the text of one event. Its usage is added to the sample."""
        if event.error:
            raise RequestFailed(str(event.error)[:200])
        if event.usage:
            sample.prompt_tokens = event.usage.prompt_tokens
            sample.output_tokens = event.usage.completion_tokens
        if not event.choices:
            return ""
        choice = event.choices[0]
        return choice.text or (choice.delta.content or "") + (choice.delta.reasoning_content or "")
