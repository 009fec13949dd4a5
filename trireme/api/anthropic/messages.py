"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens. Knows what is sent; the turn itself is `chat`'s."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from trireme.api.anthropic.protocol import CountRequest, MessagesRequest, chat_job
from trireme.api.chat.turn import ChatResult, Conversation, chat_tokens, open_chat
from trireme.api.parameters.constraints import constrained
from trireme.api.parameters.sampling import sampling_params
from trireme.api.service import Service
from trireme.api.transport.failures import Failure, Shape, failure_document
from trireme.api.transport.http import Call, Events, Reply, event, json_reply
from trireme.errors import BadRequest
from trireme.serve.answers import Answer
from trireme.types import SamplingParams


class Anthropic:
    """The request handlers of the Messages API."""

    def __init__(self, service: Service):
        self.service = service

    async def messages(self, call: Call) -> Reply | Events:
        request = await call.read(MessagesRequest)
        model = self.service.check_model(request.model, call)
        if request.max_tokens < 1:
            raise BadRequest(f"max_tokens is {request.max_tokens}; the least is 1.", param="max_tokens")
        sampling = await constrained(self.service, self._sampling(request), request.response_format(), None)
        job = chat_job(request, sampling)
        conversation = await open_chat(self.service, call, job, streamed=request.stream)
        writer = _Writer(self.service, f"msg_{call.request_id}", model)
        if request.stream:
            return Events(writer.stream(conversation), failed=_failed, keep_alive=event({"type": "ping"}, "ping"))
        (result,) = await conversation.whole()
        return json_reply(writer.whole(result, conversation.flight.answer))

    async def count_tokens(self, call: Call) -> Reply:
        request = await call.read(CountRequest)
        self.service.check_model(request.model, call)
        return json_reply({"input_tokens": len(await chat_tokens(self.service, chat_job(request, SamplingParams())))})

    def _sampling(self, request: MessagesRequest) -> SamplingParams:
        names = ("temperature", "top_p", "top_k")
        advice = self.service.info.generation
        chosen = {name: advice[name] for name in names if isinstance(advice.get(name), int | float)}
        chosen |= {name: value for name in names if (value := getattr(request, name)) is not None}
        return sampling_params({**chosen, "max_tokens": request.max_tokens, "stop": request.stop_sequences or []})


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Writer:
    """Writes a conversation's answer as a message, either whole or as events."""

    def __init__(self, service: Service, id: str, model: str):
        self._service, self._id, self._model = service, id, model

    def whole(self, result: ChatResult, answer: Answer) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if result.reasoning:
            content.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
        if result.content or not result.calls:
            content.append({"type": "text", "text": result.content})
        for called in result.calls:
            given = _input(called.function.arguments)
            content.append({"type": "tool_use", "id": called.id, "name": called.function.name, "input": given})
        return self._message(content, answer) | self._stop(result.finish, answer)

    async def stream(self, conversation: Conversation) -> AsyncIterator[bytes]:
        answer = conversation.flight.answer
        start = self._message([], answer) | {"stop_reason": None, "stop_sequence": None}
        yield event({"type": "message_start", "message": start}, "message_start")
        blocks = _Blocks()
        async for piece in conversation:
            delta = piece.delta
            if delta.reasoning:
                yield blocks.add("thinking", {"type": "thinking_delta", "thinking": delta.reasoning})
            if delta.content:
                yield blocks.add("text", {"type": "text_delta", "text": delta.content})
            for called in delta.calls:
                if called.name:
                    yield blocks.begin(f"call {called.index}", _tool_block(called.id, called.name))
                if called.arguments:
                    yield blocks.add(f"call {called.index}", {"type": "input_json_delta", "partial_json": called.arguments})
            if piece.finish:
                yield blocks.end(begin_if_none=True)
                ending = {"type": "message_delta", "delta": self._stop(piece.finish, answer), "usage": _usage(answer)}
                yield event(ending, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def _message(self, content: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": _usage(answer),
        }

    def _stop(self, finish: str, answer: Answer) -> dict[str, Any]:
        sequence = stop_sequence(self._service, answer) if finish == "stop" else None
        return {"stop_reason": "stop_sequence" if sequence else _STOP_REASONS[finish], "stop_sequence": sequence}


class _Blocks:
    """The content blocks of a streamed message. One block is open at a time."""

    def __init__(self) -> None:
        self._open: str | None = None
        self._index = -1

    def add(self, key: str, delta: dict[str, Any]) -> bytes:
        begun = b"" if self._open == key else self.begin(key, {"type": key, key: ""})
        return begun + event({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")

    def begin(self, key: str, block: dict[str, Any]) -> bytes:
        ended = self.end()
        self._open, self._index = key, self._index + 1
        return ended + event({"type": "content_block_start", "index": self._index, "content_block": block}, "content_block_start")

    def end(self, begin_if_none: bool = False) -> bytes:
        if self._open is None:
            return self.begin("text", {"type": "text", "text": ""}) + self.end() if begin_if_none and self._index < 0 else b""
        self._open = None
        return event({"type": "content_block_stop", "index": self._index}, "content_block_stop")


def _tool_block(id: str | None, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": {}}


def _usage(answer: Answer) -> dict[str, int]:
    """Counts each token of the prompt once: as read from the cache or as input. The first piece tells how many were cached."""
    return {
        "input_tokens": len(answer.tokens) - answer.cached_tokens,
        "output_tokens": sum(len(completion.token_ids) for completion in answer.completions),
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _input(arguments: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}


def stop_sequence(service: Service, answer: Answer) -> str | None:
    """The stop string that ended the answer, or None."""
    tokens = answer.completions[0].token_ids
    if not answer.sampling.stop or not tokens or tokens[-1] in service.info.eos_token_ids:
        return None
    longest = max(len(stop.encode()) for stop in answer.sampling.stop)
    tail = service.client.tokenizer.decode(tokens[-longest - 8 :], skip_special_tokens=False)
    found = [stop for stop in answer.sampling.stop if stop in tail]
    return min(found, key=tail.index) if found else None


def _failed(failure: Failure) -> bytes:
    return event(failure_document(failure, Shape.ANTHROPIC), "error")
