"""What every API needs from the engine: the model's name, tokens of a text, an answer in flight. Knows no protocol.

Work that could hold up the event loop (tokenizing, templates) is done in threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec

import trireme
from trireme.api.operation.metrics import Meter, Metrics
from trireme.api.parameters.grammars import GrammarCheck
from trireme.api.transport.failures import Failure
from trireme.api.transport.http import Call
from trireme.config import Config, ServeOptions
from trireme.errors import BadRequest, ModelNotFound, Overloaded, TriremeError
from trireme.hub.grammar import GrammarTokens
from trireme.hub.tokenizer import Tokenizer
from trireme.serve.answers import Answer, Piece
from trireme.serve.client import Client, Context, ModelInfo, Stream
from trireme.types import GRAMMAR_TOO_COSTLY, NOTHING_TO_CHOOSE, FinishReason, Output, SamplingParams

QUIET_SECONDS = 0.5
LONG_TEXT = 32 << 10  # characters; longer texts use a tokenizer of their own, so that short ones need not wait
SHORT_ENOUGH = 1 << 20  # texts of up to this many characters are always tokenized; longer ones only if the context might hold them
MOST_SHRINKING = 6  # the most characters that escapes and normalization may turn into one
_TOO_LONG = "This model's maximum context length is"  # clients recognise a prompt that is too long by these words
MAX_PRIORITY = 1000  # the largest priority, positive or negative
MAX_SALT = 256  # characters in a cache salt
MAX_SEQUENCES = 1024  # sequences that one HTTP request may ask for, over all its prompts

P = ParamSpec("P")
T = TypeVar("T")


class Flight:
    """One answer in progress. Use it as: `async for piece in flight`. It is closed when its exchange ends."""

    def __init__(self, stream: Stream, meter: Meter):
        self._stream, self._meter = stream, meter
        self._cause = "disconnect"
        self.opened = self.first = self.last = time.monotonic()  # submitted; the first and the last tokens came
        stream.watch = self._watch

    @property
    def answer(self) -> Answer:
        return self._stream.answer

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._stream

    def __anext__(self) -> Awaitable[Piece]:
        return self._stream.__anext__()

    def _watch(self, piece: Piece) -> None:
        """Counts a piece, and raises the error if the piece ends the answer with one."""
        self._meter.take(piece)
        self.last = time.monotonic()
        if self.first == self.opened:
            self.first = self.last
        if piece.finish_reason is FinishReason.ERROR:
            self._cause = "error"
            raise self._failure(piece)
        if piece.finish_reason is FinishReason.ABORT:
            self._cause = "abort"
            raise Failure(503, "The server ended this request before it was done.", kind="overloaded_error")

    def _failure(self, piece: Piece) -> Failure:
        """The error of a failed row. The request is at fault if it forbids tokens and none was left; otherwise the server is."""
        sampling = self.answer.sampling
        forbids = sampling.grammar is not None or sampling.allowed_token_ids is not None or bool(sampling.logit_bias)
        if forbids and piece.error == NOTHING_TO_CHOOSE:
            cause = "What this request allows (structured output, allowed tokens, bias, min_tokens) leaves no token to choose."
            return Failure(400, f"{cause} Fix: leave one of them out.", code="nothing_allowed")
        if piece.error and piece.error.startswith(GRAMMAR_TOO_COSTLY):
            return Failure(400, piece.error, code="grammar_too_costly")
        return Failure(500, piece.error or "The engine could not go on with this request.", kind="server_error")

    def leave(self) -> None:
        """Frees at once what an unfinished answer holds."""
        self._stream.leave()

    def close(self) -> None:
        """Frees what an unfinished answer holds, and counts how the answer ended."""
        self._meter.end(self.answer, "error" if self._stream.was_lost else self._cause)
        self._stream.leave()

    async def output(self) -> Output:
        """Waits for the whole answer and returns it."""
        async for _ in self:
            pass
        return self.answer.output()


class Service:
    """One per HTTP process."""

    def __init__(self, context: Context):
        self.client: Client = context.client
        self.options: ServeOptions = context.options
        self.config: Config = context.config
        self.metrics = Metrics(context.options.metrics_prefix, context.client.info.name)
        self._threads = concurrent.futures.ThreadPoolExecutor(4, thread_name_prefix="trireme-text")
        self._long_thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="trireme-long-text")
        self._long_tokenizer: Tokenizer | None = None
        self.grammars = GrammarCheck(self._grammar_tokens)
        self._numbers = itertools.count()

    @property
    def info(self) -> ModelInfo:
        return self.client.info

    @property
    def fingerprint(self) -> str:
        """Stands for what an answer may depend on besides the request: the program, the model, and how it is computed."""
        facts = (trireme.__version__, self.info.path, self.info.created, self.info.backend, self.info.dtype)
        return f"fp_{hashlib.blake2b(repr((*facts, self.config.model.quantize)).encode(), digest_size=6).hexdigest()}"

    def names(self, call: Call) -> list[str]:
        """The names of the model that the caller may use."""
        served = self.options.served_model_name or (self.info.name,)
        return [name for name in served if not call.models or name in call.models]

    def check_model(self, name: str | None, call: Call) -> str:
        """Returns the served name of the model. Raises a 404 for any other name, and for one that the caller's key may not use."""
        names = self.names(call)
        if not name:
            return names[0]
        if name not in names:
            name = name.removesuffix(":latest")
        if name not in names and self.options.any_model_name and not call.models:
            return name
        if name not in names:
            known = " or ".join(map(repr, names))
            raise ModelNotFound(f"The model {name[:200]!r} is not served here.", f"use {known}, or leave the model out")
        return name

    # --- text -----------------------------------------------------------------------------------------------------------------

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a slow function in a thread, so that the event loop is not blocked."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def with_tokenizer(self, size: int, action: Callable[[Tokenizer], T]) -> T:
        """Runs `action` with the tokenizer, in a thread; `size` is the length of its text."""
        loop = asyncio.get_running_loop()
        if size <= LONG_TEXT:
            return await loop.run_in_executor(self._threads, action, self.client.tokenizer)
        return await loop.run_in_executor(self._long_thread, lambda: action(self._tokenizer_for_long()))

    def _tokenizer_for_long(self) -> Tokenizer:
        if self._long_tokenizer is None:
            self._long_tokenizer = Tokenizer.open(self.info.path, self.config.model.chat_template)
        return self._long_tokenizer

    def _grammar_tokens(self) -> GrammarTokens:
        return GrammarTokens(self.client.tokenizer, self.info.eos_token_ids, self.info.vocab_size)

    async def warm_up(self) -> None:
        """Prepares for the first grammar while the server is idle, because some of that work blocks the event loop for a moment."""
        while not self.client.state().serving or self.client.num_open:
            await asyncio.sleep(QUIET_SECONDS)
        with contextlib.suppress(TriremeError):  # the model has no tokenizer
            await self.grammars.warm_up()

    async def check_text(self, size: int) -> None:
        """Refuses a text that cannot fit however it is tokenized. Tokenizing it could take a minute, with the same result."""
        limit = self.info.max_model_len
        if not limit or size <= SHORT_ENOUGH:
            return
        most = max(SHORT_ENOUGH, MOST_SHRINKING * limit * await self.in_thread(lambda: self._longest_token))
        if size > most:
            raise Failure(
                400,
                f"{_TOO_LONG} {limit} tokens; a text of {size} characters is longer than {most}, the most that is read for it. "
                "Fix: shorten the text.",
                param="prompt",
                code="context_length_exceeded",
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        """The length of the longest token in bytes."""
        tokenizer = self.client.tokenizer
        return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        await self.check_text(len(text))
        return await self.with_tokenizer(len(text), lambda tokenizer: tokenizer.encode(text, add_special=add_special))

    def check_tokens(self, tokens: Sequence[int], param: str = "prompt") -> None:
        vocab = self.info.vocab_size or self.client.tokenizer.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
            raise BadRequest(f"A prompt of token ids takes whole numbers from 0 to {vocab - 1}.", param=param)

    def _filling(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """Reduces the token limit to the room that is left. A prompt that leaves no room is refused later."""
        room = self.info.max_model_len - num_prompt
        filled = sampling.max_tokens is not None and 0 < room < sampling.max_tokens and sampling.min_tokens <= room
        return msgspec.structs.replace(sampling, max_tokens=room) if filled else sampling

    def check_room(self, num_prompt: int, max_tokens: int | None, param: str = "prompt") -> None:
        """Refuses a request that does not fit, with the numbers. Nothing is cut off silently."""
        limit = self.info.max_model_len
        if not limit:
            return  # still starting: the client gives its own error
        least = 1 if max_tokens is None else max_tokens
        if num_prompt == 0:
            raise BadRequest("The prompt is empty.", "send at least one token", param)
        if num_prompt + least > limit:
            asked = f"{num_prompt} in the prompt" + (f" and {max_tokens} for the answer" if max_tokens else "")
            raise Failure(
                400,
                f"{_TOO_LONG} {limit} tokens; this request needs {num_prompt + least} ({asked}). "
                "Fix: shorten the prompt or lower max_tokens.",
                param=param,
                code="context_length_exceeded",
            )

    # --- asking ---------------------------------------------------------------------------------------------------------------

    async def open(
        self,
        call: Call,
        tokens: list[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        salt: str | None = None,
        priority: int = 0,
        streamed: bool = False,
    ) -> Flight:
        """Submits one prompt. Its answer is closed when the exchange ends. With `streamed`, a slow reader is disconnected."""
        if self.options.fill_room:
            sampling = self._filling(sampling, len(tokens))
        self.check_room(len(tokens), sampling.max_tokens)
        if sampling.stop:
            _ = self.client.tokenizer  # without one, texts to stop at mean nothing, and the request is refused
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise BadRequest(f"priority must lie between {-MAX_PRIORITY} and {MAX_PRIORITY}.", param="priority")
        with self._counting_refusals():
            stream = await self.client.open(
                tokens,
                sampling,
                request_id=f"{call.request_id}.{next(self._numbers)}",
                prompt=prompt,
                salt=_salt(call.tenant, salt),
                priority=priority if self.options.allow_priority else 0,
                streamed=streamed,
            )
        flight = Flight(stream, Meter(self.metrics, call.begun, len(tokens), sampling.n, sampling.max_tokens))
        call.exits.callback(flight.close)
        call.leavers.append(flight.leave)
        call.trace.note(gen_ai__request__model=self.info.name, gen_ai__usage__input_tokens=len(tokens))
        return flight

    def admit(self) -> None:
        """Refuses a request before its body is read if the queue has no place for it."""
        with self._counting_refusals():
            self.client.check_open()

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except TriremeError as error:
            reason = "overload" if isinstance(error, Overloaded) else "invalid" if isinstance(error, BadRequest) else "error"
            self.metrics.count("request_rejected", 1, reason)
            raise

    def close(self) -> None:
        self.grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_thread.shutdown(wait=False, cancel_futures=True)


def _salt(tenant: str, given: str | None) -> str:
    """A salt that separates a tenant's cached prefixes from those of others. Its length does not depend on what the client sent."""
    if given and len(given) > MAX_SALT:
        raise BadRequest(f"cache_salt has {len(given)} characters; at most {MAX_SALT} are taken.", "send its hash", "cache_salt")
    text = f"{tenant}:{given or ''}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() if tenant or given else ""


async def outputs(flights: Sequence[Flight]) -> list[Output]:
    """Reads whole answers at the same time. The first failure ends the reading of all."""
    tasks = [asyncio.ensure_future(flight.output()) for flight in flights]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(call: Call, flights: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """The pieces of several answers as they come, each with the number of its answer."""
    inbox: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(maxsize=2 * len(flights))

    async def forward(number: int, flight: AsyncIterator[T]) -> None:
        try:
            async for piece in flight:
                await inbox.put((number, piece))
            await inbox.put((number, None))
        except Exception as error:
            await inbox.put((number, error))

    tasks = [asyncio.ensure_future(forward(number, flight)) for number, flight in enumerate(flights)]
    for task in tasks:
        call.exits.callback(task.cancel)
    left = len(flights)
    while left:
        number, item = await inbox.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            left -= 1
        else:
            yield number, item
