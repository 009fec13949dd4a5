"""POST /v1/completions: text or token ids in, text out; echo and log-probabilities as evaluation harnesses need them.

Knows OpenAI's shapes; the engine is behind the service.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from trireme.api.openai.infill import infill_tokens
from trireme.api.openai.logprobs import LogprobWriter
from trireme.api.openai.protocol import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    PromptTokensDetails,
    Usage,
)
from trireme.api.openai.timings import timings_of
from trireme.api.parameters.constraints import constrained
from trireme.api.parameters.sampling import sampling_of, top_logprobs
from trireme.api.service import MAX_SEQUENCES, Flight, Service, merged, outputs
from trireme.api.transport.http import DONE, Call, EventAround, Events, Reply, event, json_reply, openai_event_failure
from trireme.errors import BadRequest
from trireme.serve.answers import Answer, Piece
from trireme.types import Output, SamplingParams


@dataclass
class _Prompt:
    text: str | None  # the prompt as text, if the client sent text
    tokens: list[int]


class Completions:
    """The handler of the route."""

    def __init__(self, service: Service):
        self.service = service

    async def __call__(self, call: Call) -> Reply | Events:
        request = await call.read(CompletionRequest)
        model = self.service.check_model(request.model, call)
        sampling = await constrained(self.service, self._sampling(request), request.response_format, request.structured_outputs)
        prompts = await self._prompts(request, sampling)
        how: dict[str, Any] = {"salt": request.cache_salt, "priority": request.priority, "streamed": bool(request.stream)}
        flights = [await self.service.open(call, p.tokens, sampling, prompt=p.text, **how) for p in prompts]
        writer = _Writer(self.service, request, f"cmpl-{call.request_id}", model)
        if request.stream:
            return Events(writer.stream(call, flights), failed=openai_event_failure)
        return json_reply(writer.whole(await outputs(flights), flights))

    def _sampling(self, request: CompletionRequest) -> SamplingParams:
        wanted = top_logprobs(request.logprobs, "logprobs")
        prompt_wanted = top_logprobs(request.prompt_logprobs, "prompt_logprobs")
        if request.echo and prompt_wanted is None:
            prompt_wanted = wanted
        if request.stream and request.best_of is not None and request.best_of > (request.n or 1):
            raise BadRequest("best_of above n cannot be streamed: the best is known at the end.", "set stream to false", "best_of")
        if request.echo and request.suffix:
            raise BadRequest("echo and suffix exclude each other.", "leave one of them out", "suffix")
        return sampling_of(
            request,
            self.service.info.generation,
            16 if request.max_tokens is None else request.max_tokens,
            best_of=request.best_of,
            logprobs=wanted,
            prompt_logprobs=prompt_wanted,
        )

    async def _prompts(self, request: CompletionRequest, sampling: SamplingParams) -> list[_Prompt]:
        listed = prompt_list(request.prompt)
        if len(listed) * sampling.num_sequences > MAX_SEQUENCES:
            raise BadRequest(
                f"{len(listed)} prompts with {sampling.num_sequences} sequences each are more than {MAX_SEQUENCES}.",
                "send them in several requests",
                "prompt",
            )
        return [await self._prompt(prompt, request) for prompt in listed]

    async def _prompt(self, prompt: str | list[int], request: CompletionRequest) -> _Prompt:
        if isinstance(prompt, str):
            if request.suffix:
                size, suffix = len(prompt) + len(request.suffix), request.suffix
                await self.service.check_text(size)
                return _Prompt(prompt, await self.service.with_tokenizer(size, lambda t: infill_tokens(t, prompt, suffix)))
            return _Prompt(prompt, await self.service.encode(prompt, request.add_special_tokens))
        if request.suffix:
            raise BadRequest("suffix needs a prompt of text.", "send text, or leave suffix out", "suffix")
        return _Prompt(None, prompt)


def prompt_list(prompt: str | list) -> list[str | list[int]]:
    """The prompts of a request: one text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("prompt is an empty list.", "send at least one prompt", "prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) != 1:
        raise BadRequest("prompt mixes texts and token ids.", "send a text, a list of texts, token ids, or lists of them", "prompt")
    return prompt


class _Writer:
    """Writes answers in OpenAI's shape text_completion."""

    def __init__(self, service: Service, request: CompletionRequest, id: str, model: str):
        self._service, self._request, self._id, self._model = service, request, id, model
        self._created, self._fingerprint = int(time.time()), service.fingerprint
        self._top = request.logprobs
        self._n = request.n or 1
        self._offsets: dict[int, int] = {}  # for each choice of a stream: the number of characters already sent
        self._arounds: dict[int, EventAround] = {}
        options = request.stream_options
        # If the client asks for the usage at the end, every chunk must have the field.
        self._no_usage = None if options and options.include_usage else UNSET
        self._counts = bool(options and options.continuous_usage_stats)
        self._timed = request.timings_per_token
        self._plain = request.logprobs is None and not request.return_token_ids and not self._counts and not self._timed
        self._logprobs: LogprobWriter | None = None
        if request.logprobs is not None or request.prompt_logprobs is not None:
            skip = request.skip_special_tokens is not False
            self._logprobs = LogprobWriter(
                service.client.tokenizer, as_ids=request.return_tokens_as_token_ids, skip_special_tokens=skip
            )

    def whole(self, outputs: Sequence[Output], flights: Sequence[Flight]) -> CompletionAnswer:
        choices = []
        for number, output in enumerate(outputs):
            echo, echoed = self._echo(flights[number].answer)
            for completion in output.completions:
                choice = CompletionChoice(number * self._n + completion.index, echo + completion.text)
                choice.finish_reason = str(completion.finish_reason)
                if self._logprobs is not None and self._top is not None:
                    made = self._logprobs.completion(completion.token_ids, completion.logprobs or [], self._top, len(echo))
                    choice.logprobs = _joined(echoed, made)
                if self._request.prompt_logprobs is not None:
                    choice.prompt_logprobs = self._prompt_logprobs(output)
                if self._request.return_token_ids:
                    choice.token_ids = completion.token_ids
                choices.append(choice)
        return self._answer(choices, usage_of([flight.answer for flight in flights]), flights)

    async def stream(self, call: Call, flights: Sequence[Flight]) -> AsyncIterator[bytes]:
        answers = [flight.answer for flight in flights]
        if len(flights) == 1:
            async for piece in flights[0]:
                yield self._event(0, piece, flights)
        else:
            async for number, piece in merged(call, flights):
                yield self._event(number, piece, flights)
        options = self._request.stream_options
        if options and options.include_usage:
            yield event(self._answer([], usage_of(answers)))
        yield DONE

    def _event(self, number: int, piece: Piece, flights: Sequence[Flight]) -> bytes:
        index = number * self._n + piece.index
        if self._plain and index in self._offsets and piece.finish_reason is None:
            return self._around(index).event(piece.text)
        echo, echoed = ("", None) if index in self._offsets else self._echo(flights[number].answer)
        offset = self._offsets.get(index, len(echo))
        self._offsets[index] = offset + len(piece.text)
        choice = CompletionChoice(index, echo + piece.text)
        choice.finish_reason = str(piece.finish_reason) if piece.finish_reason else None
        choice.logprobs = self._piece_logprobs(piece, offset, echoed)
        if self._request.return_token_ids:
            choice.token_ids = piece.token_ids
        usage = usage_of([flight.answer for flight in flights]) if self._counts else None
        return event(self._answer([choice], usage, flights))

    def _around(self, index: int) -> EventAround:
        """The text around the content in an event that has only text."""
        if index not in self._arounds:
            self._arounds[index] = EventAround(lambda text: self._answer([CompletionChoice(index, text)], None))
        return self._arounds[index]

    def _answer(self, choices: list[CompletionChoice], usage: Usage | None, flights: Sequence[Flight] = ()) -> CompletionAnswer:
        found = CompletionAnswer(self._id, self._created, self._model, choices, usage if usage is not None else self._no_usage)
        found.system_fingerprint = self._fingerprint
        if self._timed and flights:
            found.timings = timings_of(*flights)
        return found

    def _piece_logprobs(self, piece: Piece, offset: int, echoed: CompletionLogprobs | None) -> CompletionLogprobs | None:
        if self._logprobs is None or self._top is None:
            return None
        return _joined(echoed, self._logprobs.completion(piece.token_ids, piece.logprobs or [], self._top, offset))

    def _echo(self, answer: Answer) -> tuple[str, CompletionLogprobs | None]:
        """The prompt, returned as the beginning of the answer."""
        if not self._request.echo:
            return "", None
        text = answer.prompt
        if text is None:
            text = self._service.client.tokenizer.decode(answer.tokens, self._request.skip_special_tokens is not False)
        if self._logprobs is None or self._top is None:
            return text, None
        entries = answer.prompt_logprobs or [None] * len(answer.tokens)
        return text, self._logprobs.completion(answer.tokens, entries, self._top)

    def _prompt_logprobs(self, output: Output) -> list[dict | None]:
        """Log-probabilities by token id, in the form that other servers of open models use."""
        assert self._logprobs is not None
        found: list[dict | None] = []
        for entry in output.prompt_logprobs or []:
            if entry is None:
                found.append(None)
                continue
            ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)]
            ranked.append((entry.token, entry.logprob, entry.rank))
            found.append({str(t): {"logprob": lp, "rank": r, "decoded_token": self._logprobs.spelling(t)} for t, lp, r in ranked})
        return found


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    if first is None:
        return second
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def usage_of(answers: Sequence[Answer]) -> Usage:
    """The tokens in and out. All sequences of best_of count, because all were computed."""
    prompt = sum(len(answer.tokens) for answer in answers)
    made = sum(len(completion.token_ids) for answer in answers for completion in answer.completions)
    return Usage(prompt, made, prompt + made, PromptTokensDetails(sum(answer.cached_tokens for answer in answers)))
