"""POST /v1/chat/completions. Knows OpenAI's shapes; the turn itself is `chat`'s."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from msgspec import UNSET, UnsetType

from trireme.api.chat.turn import (
    ChatJob,
    ChatPiece,
    ChatResult,
    Conversation,
    allowed_of,
    messages_of,
    open_chat,
    template_variables,
    tools_of,
)
from trireme.api.openai.completions import usage_of
from trireme.api.openai.logprobs import LogprobWriter
from trireme.api.openai.protocol import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    FunctionDelta,
    Timings,
    ToolCallDelta,
    Usage,
    choice_of,
)
from trireme.api.openai.timings import timings_of
from trireme.api.parameters.constraints import constrained
from trireme.api.parameters.sampling import sampling_of, top_logprobs
from trireme.api.service import Flight, Service
from trireme.api.transport.http import DONE, Call, EventAround, Events, Reply, event, json_reply, openai_event_failure
from trireme.errors import BadRequest
from trireme.types import SamplingParams, TokenLogprobs


class ChatCompletions:
    """The handler of the route."""

    def __init__(self, service: Service):
        self.service = service

    async def __call__(self, call: Call) -> Reply | Events:
        request = await call.read(ChatRequest)
        model = self.service.check_model(request.model, call)
        conversation = await open_chat(self.service, call, await self.job(request), streamed=bool(request.stream))
        writer = _Writer(self.service, request, f"chatcmpl-{call.request_id}", model)
        if request.stream:
            return Events(writer.stream(conversation), failed=openai_event_failure)
        results = await conversation.whole()
        return json_reply(writer.whole(results, conversation.flight))

    async def job(self, request: ChatRequest) -> ChatJob:
        choice = choice_of(request.tool_choice)
        return ChatJob(
            messages=messages_of(request.messages),
            sampling=await constrained(self.service, self._sampling(request), request.response_format, request.structured_outputs),
            tools=allowed_of(tools_of(request.tools), choice.allowed),
            tool_choice=choice.how,
            named=choice.named,
            parallel=request.parallel_tool_calls is not False,
            template=template_variables(request.chat_template_kwargs, reasoning_effort=request.reasoning_effort),
            add_generation_prompt=request.add_generation_prompt,
            continues=_continues(request),
            salt=request.cache_salt,
            priority=request.priority,
        )

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        if request.top_logprobs is not None and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs.", "set logprobs to true", "top_logprobs")
        wanted = top_logprobs(request.top_logprobs or 0, "top_logprobs") if request.logprobs else None
        most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        if most is not None and most < 1:
            raise BadRequest(f"max_tokens is {most}; a chat answer has at least 1 token.", param="max_tokens")
        return sampling_of(request, self.service.info.generation, most, logprobs=wanted)


def _continues(request: ChatRequest) -> bool:
    """Whether the answer continues the last message."""
    if not request.continue_final_message:
        return False
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != "assistant" or last.tool_calls or not last.content:
        cause = "continue_final_message needs a conversation that ends with a text of the assistant's."
        raise BadRequest(cause, "add one, or leave the field out", "continue_final_message")
    return True


class _Writer:
    """Writes a conversation's answer as chat.completion, either whole or in chunks."""

    def __init__(self, service: Service, request: ChatRequest, id: str, model: str):
        self._request, self._id, self._model = request, id, model
        self._created, self._fingerprint = int(time.time()), service.fingerprint
        self._arounds: dict[int, EventAround] = {}
        options = request.stream_options
        # If the client asks for the usage at the end, every chunk must have the field.
        self._no_usage = None if options and options.include_usage else UNSET
        self._counts = bool(options and options.continuous_usage_stats)
        self._plain = not request.logprobs and not request.return_token_ids and not self._counts and not request.timings_per_token
        self._logprobs = LogprobWriter(service.client.tokenizer, as_ids=request.return_tokens_as_token_ids)

    def whole(self, results: list[ChatResult], flight: Flight) -> ChatAnswer:
        choices = [self._choice(i, r) for i, r in enumerate(results)]
        answer = ChatAnswer(self._id, self._created, self._model, choices, usage_of([flight.answer]))
        answer.system_fingerprint, answer.timings = self._fingerprint, self._timings(flight)
        return answer

    def _timings(self, flight: Flight) -> Timings | UnsetType:
        return timings_of(flight) if self._request.timings_per_token else UNSET

    def _choice(self, index: int, result: ChatResult) -> ChatChoice:
        message = AnswerMessage(result.content if result.content or not result.calls else None)
        if result.reasoning and self._request.include_reasoning:
            message.reasoning_content = result.reasoning
        if result.calls:
            message.tool_calls = result.calls
        choice = ChatChoice(index, message, result.finish, self._written(result.logprobs))
        if self._request.return_token_ids:
            choice.token_ids = result.token_ids
        return choice

    async def stream(self, conversation: Conversation) -> AsyncIterator[bytes]:
        options = self._request.stream_options
        answer = conversation.flight.answer
        for index in range(len(answer.completions)):
            yield event(self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content=""))))
        async for piece in conversation:
            if (written := self._event(piece, conversation.flight)) is not None:
                yield written
        if options and options.include_usage:
            yield event(self._chunk(None, usage_of([answer])))
        yield DONE

    def _event(self, piece: ChatPiece, flight: Flight) -> bytes | None:
        """Returns None if the piece has nothing to show yet, for example in the middle of a tag."""
        delta = piece.delta
        if self._plain and delta.content and not delta.reasoning and not delta.calls and piece.finish is None:
            return self._around(piece.index).event(delta.content)
        choice = self._chunk_choice(piece)
        if choice is None:
            return None
        chunk = self._chunk(choice, usage_of([flight.answer]) if self._counts else None)
        chunk.timings = self._timings(flight)
        return event(chunk)

    def _around(self, index: int) -> EventAround:
        """The text around the content in an event that has only content."""
        if index not in self._arounds:
            self._arounds[index] = EventAround(lambda text: self._chunk(ChatChunkChoice(index, ChatDelta(content=text))))
        return self._arounds[index]

    def _chunk_choice(self, piece: ChatPiece) -> ChatChunkChoice | None:
        delta = ChatDelta(content=piece.delta.content or None)
        if self._request.include_reasoning:
            delta.reasoning_content = piece.delta.reasoning or None
        if piece.delta.calls:
            delta.tool_calls = [
                ToolCallDelta(c.index, c.id, "function" if c.id else None, FunctionDelta(c.name, c.arguments))
                for c in piece.delta.calls
            ]
        shown = delta != ChatDelta() or piece.finish or piece.logprobs or self._request.return_token_ids
        if not shown:
            return None
        choice = ChatChunkChoice(piece.index, delta, self._written(piece.logprobs), piece.finish)
        if self._request.return_token_ids:
            choice.token_ids = piece.token_ids
        return choice

    def _chunk(self, choice: ChatChunkChoice | None, usage: Usage | None = None) -> ChatChunk:
        choices = [choice] if choice is not None else []
        chunk = ChatChunk(self._id, self._created, self._model, choices, usage=usage if usage is not None else self._no_usage)
        chunk.system_fingerprint = self._fingerprint
        return chunk

    def _written(self, entries: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return self._logprobs.chat(entries or [], self._request.top_logprobs or 0)
