"""The way from an HTTP process to the engine: open a stream, read its pieces, ask for the state. Knows messages, not HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config import Config, ServeOptions
from trireme.hub.tokenizer import Tokenizer
from trireme.serve.answers import Answer, Piece
from trireme.types import SamplingParams


@dataclass
class ModelInfo:
    """What clients are told of the model. `max_model_len` and `vocab_size` are 0 until a worker has loaded it."""

    name: str  # as served: --served-model-name, or the model's own
    path: str
    created: int  # seconds since the epoch
    eos_token_ids: list[int] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json: temperature, top_p, ... as its makers advise
    config: dict[str, Any] = field(default_factory=dict)  # config.json, e.g. config["model_type"]
    max_model_len: int = 0
    vocab_size: int = 0
    backend: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class State:
    """Where the server stands. Alive is not ready: `phase` and `percent` tell of a start, `reason` of a failure."""

    name: Literal["starting", "ready", "draining", "failed", "sleeping"]
    phase: str = ""
    percent: float = 0.0
    reason: str = ""
    ages: dict[str, float] = field(default_factory=dict)  # process -> seconds since its last sign of life
    hung: bool = False  # a process has been silent for too long: /live is 503

    @property
    def serving(self) -> bool:
        """Whether a request would be taken: a sleeping server wakes for it."""
        return self.name in ("ready", "sleeping")


class Stream:
    """One answer as it comes: `async for piece in stream`. Leaving it early (`await stream.abort()`, or `async with`) frees its KV."""

    answer: Answer  # grows with the pieces: .output(), .completions, .cached_tokens, .done

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    async def __anext__(
        self,
    ) -> Piece: ...  # raises a TriremeError when the request is lost: a worker died, the reader was too slow

    async def abort(self) -> None: ...

    async def __aenter__(self) -> Stream: ...

    async def __aexit__(self, *_: object) -> None: ...


class Client:
    """Async; one per HTTP process."""

    info: ModelInfo

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, in this process. Raises BadRequest where the model has none (random weights)."""
        ...

    async def open(
        self,
        prompt_tokens: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        salt: str = "",
        priority: int = 0,
    ) -> Stream:
        """Submits a request. Raises BadRequest (400), Overloaded (queue full), Unavailable (an Overloaded: starting, draining) or
        WorkerDied. Returns once the router has taken it."""
        ...

    def state(self) -> State: ...

    async def stats(self) -> dict[str, Any]:
        """The scheduler's numbers (sched.scheduler.Stats as a dict) and the router's: restarts, uptime, ..."""
        ...


@dataclass
class Context:
    """What `trireme.api.app.create_app(context)` gets, once per HTTP process, before the client has connected."""

    client: Client
    options: ServeOptions
    config: Config
