"""The HTTP process's client of the engine: opens streams, reads their pieces, asks for the state. Knows messages, not HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from trireme.config import Config, ServeOptions
from trireme.errors import BadRequest, Overloaded, TriremeError, Unavailable, WorkerDied
from trireme.hub.advice import given_sampling
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.tokenizer import Tokenizer
from trireme.ipc.async_channel import AsyncChannel
from trireme.ipc.serving import (
    DETOKENIZER_SOCKET,
    ROUTER_SOCKET,
    Abort,
    Ask,
    Begin,
    Crowd,
    FromDetokenizer,
    FromRouter,
    Gain,
    Hello,
    Lost,
    Renew,
    Renewed,
    Said,
    Standing,
    Submit,
    Taken,
    Told,
    Welcome,
)
from trireme.serve.answers import Answer, Piece
from trireme.types import SamplingParams

RETRY_SECONDS = 0.1  # between attempts to reach a process that is not up yet
STATS_SECONDS = 5.0
RELOAD_SECONDS = 1800.0  # for reading the largest models from a slow disk


@dataclass
class ModelInfo:
    """What clients are told about the model. `max_model_len` and `vocab_size` are 0 until a worker has loaded it."""

    name: str  # as served: --served-model-name, or the model's own
    path: str
    created: int  # seconds since the epoch
    eos_token_ids: list[int] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)  # temperature, top_p, ... as its makers advise, or --default-sampling
    config: dict[str, Any] = field(default_factory=dict)  # config.json, e.g. config["model_type"]
    max_model_len: int = 0
    vocab_size: int = 0
    backend: str = ""
    dtype: str = ""


@dataclass(frozen=True)
class State:
    """The server's state. A live server may not be ready: `phase` and `percent` describe a start, `reason` a failure."""

    name: Literal["starting", "ready", "draining", "failed", "sleeping"]
    phase: str = ""
    percent: float = 0.0
    reason: str = ""
    ages: dict[str, float] = field(default_factory=dict)  # process -> seconds since its last heartbeat
    hung: bool = False  # a process has been silent for too long: /live is 503

    @property
    def serving(self) -> bool:
        """Whether a request would be accepted. A sleeping server accepts it and wakes."""
        return self.name in ("ready", "sleeping")


class _Inbox:
    """The unread data of one stream. If more than `max_bytes` are unread, the stream ends with an error.

    With None there is no limit. This is for answers that are sent as a whole; their length is limited by the scheduler.
    """

    def __init__(self, ids: list[str], max_bytes: int | None):
        self.ids = ids
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: TriremeError | None = None
        self._gains: deque[Gain] = deque()
        self._bytes, self._max_bytes = 0, max_bytes
        self._reader: asyncio.Future[Gain | None] | None = None  # set while a reader waits

    def put(self, gain: Gain) -> bool:
        """Gives a gain to the waiting reader, or keeps it. If the reader is too far behind, ends the stream and returns False."""
        reader = self._reader
        if reader is not None:
            self._reader = None
            if not reader.done():
                reader.set_result(gain)
                return True
        self._bytes += _weight(gain)
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            self._gains.clear()
            self.fail(BadRequest(f"The reader fell more than {self._max_bytes} bytes behind; the stream was cut.", "read faster"))
            return False
        self._gains.append(gain)
        return True

    def fail(self, error: TriremeError) -> None:
        self.error = self.error or error
        if not self.taken.done():
            self.taken.set_result(None)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        self._reader = None

    def take(self) -> Gain | None:
        """The unread data, if there is any. All of it is returned before an error is raised."""
        if self._gains:
            gain = self._gains.popleft()
            self._bytes -= _weight(gain)
            return gain
        if self.error is not None:
            raise self.error
        return None

    def arrival(self) -> asyncio.Future[Gain | None]:
        """Waits for the next gain when nothing is unread; None means an error. Only one reader may wait at a time."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader


def _weight(gain: Gain) -> int:
    """Roughly how many bytes of memory a gain takes."""
    plain = 256 + len(gain.text) + 32 * len(gain.tokens)
    if gain.logprobs is None and gain.prompt_logprobs is None:
        return plain
    tops = sum(len(entry.top) for entry in gain.logprobs or ())
    return plain + 96 * tops + 128 * len(gain.prompt_logprobs or ())


class Stream:
    """One answer as it comes: `async for piece in stream`. Left early (`leave`, `async with`, or just dropped) its KV is freed."""

    def __init__(self, client: Client, answer: Answer, inbox: _Inbox):
        self.answer = answer  # grows with the pieces that were read: .output(), .completions, .cached_tokens, .done
        self.was_lost = False
        self.watch: Callable[[Piece], None] | None = None  # called with every piece before its reader gets it
        self._client, self._inbox = client, inbox

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        """Raises a TriremeError when the request is lost: a worker died, the reader was too slow."""
        answer = self.answer
        while not answer.done:
            try:
                gain = self._inbox.take() or await self._inbox.arrival()
            except TriremeError:
                self.was_lost = True
                self.leave()
                raise
            piece = answer.add(gain) if gain is not None else None
            if answer.done:
                self.leave()
            if piece is not None:
                if self.watch is not None:
                    self.watch(piece)
                return piece
        raise StopAsyncIteration

    def leave(self) -> None:
        """Ends the request, if it still runs."""
        self._client.leave(self.answer)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def __del__(self) -> None:
        self._client.abandon(self.answer)


class Client:
    """Async; one per HTTP process. `run` keeps its two connections: requests go to the router, text comes from the detokenizer."""

    def __init__(self, begin: Begin, config: Config, tokenizer: Tokenizer | None):
        self.info = _model_info(begin, config)
        self._name, self._folder, self._backlog = begin.name, begin.folder, config.serve.stream_backlog
        self._tokenizer = tokenizer
        self._inboxes: dict[str, _Inbox] = {}
        self._router: AsyncChannel | None = None
        self._detokenizer: AsyncChannel | None = None
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._crowd = Crowd(0, False)  # as the router last said
        self._numbers = itertools.count()
        self._standing, self._stood_at = Standing("starting"), time.monotonic()
        self._loop = asyncio.get_running_loop()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, in this process. Raises BadRequest where the model has none."""
        if self._tokenizer is None:
            raise BadRequest("This model has no tokenizer.", "give token ids instead of text", "prompt")
        return self._tokenizer

    @property
    def name(self) -> str:
        """The name of this HTTP process. After a restart it is a different one."""
        return self._name

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return len(self._inboxes)

    async def open(
        self,
        prompt_tokens: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        salt: str = "",
        priority: int = 0,
        streamed: bool = True,
    ) -> Stream:
        """Submits a request. A streamed answer is cut when its reader falls too far behind.

        Raises BadRequest (400), Overloaded (queue full), Unavailable (an Overloaded: starting, draining) or
        WorkerDied. Returns once the router has taken it."""
        self.check_open()
        self._check(prompt_tokens, sampling)
        answer = Answer(request_id, prompt, prompt_tokens, sampling, f"{self._name}:{next(self._numbers)}")
        requests = answer.requests(self.info.eos_token_ids, salt=salt, priority=priority)
        inbox = self._inboxes[answer.key] = _Inbox([request.id for request in requests], self._backlog if streamed else None)
        for follower in requests[1:]:
            follower.tokens = []  # the router knows them from the first
        try:
            assert self._router is not None
            self._router.post(Submit(requests))
            await inbox.taken
        except BaseException:  # cancelled, or a message that could not be written: nobody will read this inbox
            self.leave(answer)
            raise
        if inbox.error is not None:
            self._inboxes.pop(answer.key, None)
            raise inbox.error
        return Stream(self, answer, inbox)

    def state(self) -> State:
        """The server's state, as the supervisor reports it and as far as this process can reach the others."""
        standing = self._standing
        age = time.monotonic() - self._stood_at
        ages = {name: seconds + age for name, seconds in standing.ages.items()} | {"supervisor": age}
        if standing.name in ("ready", "sleeping") and not self._connected:
            return State("starting", "connecting", ages=ages, hung=standing.hung)
        percent = 100.0 if standing.name in ("ready", "sleeping", "draining") else 100 * standing.share
        return State(standing.name, standing.phase, percent, standing.reason, ages, standing.hung)  # type: ignore[arg-type]

    async def stats(self) -> dict[str, Any]:
        """The scheduler's numbers (sched.scheduler.Stats as a dict) and the router's: restarts, uptime, ..."""
        return (await self._ask(Ask(next(self._numbers)), STATS_SECONDS)).stats

    async def reload(self, path: str, seconds: float) -> int:
        """Asks the router to serve the weights of another folder. Returns their version, or raises the reason of a failure."""
        answer = await self._ask(Renew(next(self._numbers), path, seconds), seconds + RELOAD_SECONDS)
        if answer.problem is not None:
            raise answer.problem.error()
        return answer.version

    async def _ask(self, message: Ask | Renew, timeout: float) -> Any:
        """Waits for the router's answer with the same number."""
        if self._router is None:
            raise Unavailable("The router is being restarted.", "try again in a moment")
        number = message.number
        question = self._questions[number] = asyncio.get_running_loop().create_future()
        self._router.post(message)
        try:
            return await asyncio.wait_for(question, timeout)
        except TimeoutError:
            raise Unavailable("The router does not answer.", "try again in a moment") from None
        finally:
            self._questions.pop(number, None)

    # ---- ends of streams

    def leave(self, answer: Answer) -> None:
        """Forgets a stream; if it still runs, the router is told."""
        if self._inboxes.pop(answer.key, None) is not None and not answer.done and self._router is not None:
            self._router.post(Abort(answer.unfinished()))

    def abandon(self, answer: Answer) -> None:
        """The same as `leave`, for a stream that was garbage collected, possibly in another thread."""
        if answer.key in self._inboxes and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.leave, answer)

    def end(self) -> None:
        """Ends every open stream, because the server is ending. The reader passes the reason on to the client."""
        self._lose_all(Unavailable("The server is shutting down and could not finish this answer.", "send the request again"))

    # ---- checks

    def check_open(self) -> None:
        """Refuses a request that this process knows would not be accepted, before any work is done."""
        state = self.state()
        if state.name == "draining":
            raise Unavailable("The server is shutting down.", "try again later")
        if not state.serving:
            detail = f"{state.phase}, {state.percent:.0f} %" if state.percent else state.phase or "starting"
            raise Unavailable(f"The server is not ready: {state.reason or detail}.", "try again later")
        if self._crowd.full:
            raise Overloaded(f"{self._crowd.waiting} requests are waiting already.", "try again later, or raise max_waiting")

    def _check(self, tokens: list[int], sampling: SamplingParams) -> None:
        vocab = self.info.vocab_size
        sampling.check_ids(vocab)
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
            raise BadRequest(f"A prompt of token ids takes whole numbers from 0 to {vocab - 1}.", "check the ids", "prompt")

    # ---- the other processes

    @property
    def _connected(self) -> bool:
        return self._router is not None and self._detokenizer is not None

    async def run(self) -> None:
        """Keeps the connections to the router and the detokenizer open; returns never."""
        await asyncio.gather(
            self._keep(ROUTER_SOCKET, FromRouter, "_router", "The router process ended."),
            self._keep(DETOKENIZER_SOCKET, FromDetokenizer, "_detokenizer", "The detokenizer process ended."),
        )

    async def _keep(self, socket_name: str, receives: Any, attribute: str, epitaph: str) -> None:
        while True:
            try:
                await self._converse(os.path.join(self._folder, socket_name), receives, attribute)
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            setattr(self, attribute, None)
            if attribute == "_router":
                self._crowd = Crowd(0, False)
            self._lose_all(WorkerDied(epitaph, "send the request again; it is being restarted"))

    async def _converse(self, path: str, receives: Any, attribute: str) -> None:
        """Connects, and returns when the connection is lost."""
        gone = asyncio.Event()

        def heard(message: Any) -> None:
            if isinstance(message, Welcome):
                setattr(self, attribute, channel)
                channel.heard = self._heard  # from now on, at once

        channel = await AsyncChannel.connect(path, receives, heard, gone.set)
        channel.post(Hello(self._name))
        await gone.wait()

    def _lose_all(self, error: TriremeError) -> None:
        for inbox in self._inboxes.values():
            inbox.fail(error)
        for question in self._questions.values():
            if not question.done():
                question.set_exception(error)

    def _heard(self, message: Any) -> None:
        if isinstance(message, Said):
            for gain in message.gains:
                inbox = self._inboxes.get(gain.id.rpartition("/")[0])
                if inbox is not None and not inbox.put(gain):
                    self._cut(gain.id.rpartition("/")[0])
        elif isinstance(message, Taken):
            inbox = self._inboxes.get(message.id.rpartition("/")[0])
            if inbox is not None and not inbox.taken.done():
                inbox.taken.set_result(None)
        elif isinstance(message, Lost):
            for key in {id.rpartition("/")[0] for id in message.ids}:
                if key in self._inboxes:
                    self._inboxes[key].fail(message.problem.error())
        elif isinstance(message, Crowd):
            self._crowd = message
        elif isinstance(message, Told | Renewed) and message.number in self._questions:
            question = self._questions[message.number]
            if not question.done():
                question.set_result(message)

    def _cut(self, key: str) -> None:
        """Ends a stream whose reader is too slow, to free its memory here and on the device."""
        inbox = self._inboxes.pop(key)
        if self._router is not None:
            self._router.post(Abort(inbox.ids))

    def stand(self, standing: Standing) -> None:
        """Notes the state of the whole server, as the supervisor reports it."""
        self._standing, self._stood_at = standing, time.monotonic()
        if standing.ready is not None:
            ready, info = standing.ready, self.info
            room = ready.num_pages * ready.page_size or ready.max_model_len  # a model that keeps nothing has no pages
            info.max_model_len, info.vocab_size = min(ready.max_model_len, room), ready.vocab_size
            info.backend, info.dtype = ready.backend, ready.dtype


def _model_info(begin: Begin, config: Config) -> ModelInfo:
    checkpoint = Checkpoint.open(begin.path)
    return ModelInfo(
        name=begin.model,
        path=begin.path,
        created=int(os.stat(begin.path).st_mtime),
        eos_token_ids=checkpoint.eos_token_ids(),
        generation={**checkpoint.generation, **given_sampling(config.model.default_sampling)},
        config=checkpoint.config,
    )


@dataclass
class Context:
    """What `trireme.api.app.create_app(context)` gets, once per HTTP process, before the client has connected."""

    client: Client
    options: ServeOptions
    config: Config
