"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens. Knows its shapes; the turn itself is `chat`'s."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from trireme.api.chat.turn import ChatJob, ChatResult, Conversation, chat_tokens, open_chat, template_variables, tools_of
from trireme.api.openai.protocol import FunctionDefinition, Tool
from trireme.api.parameters.sampling import sampling_params
from trireme.api.service import Service
from trireme.api.transport.failures import Failure, Shape, failure_document
from trireme.api.transport.http import Call, Events, Reply, event, json_reply
from trireme.errors import BadRequest
from trireme.serve.answers import Answer
from trireme.types import SamplingParams


class Block(msgspec.Struct, kw_only=True):
    """A piece of a message: text, thinking, a tool's use or its result."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[Block] | None = None
    is_error: bool | None = None


class AnthropicMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    messages: list[AnthropicMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class Anthropic:
    """The handlers."""

    def __init__(self, service: Service):
        self.service = service

    async def messages(self, call: Call) -> Reply | Events:
        request = await call.read(MessagesRequest)
        model = self.service.check_model(request.model)
        if request.max_tokens < 1:
            raise BadRequest(f"max_tokens is {request.max_tokens}; the least is 1.", param="max_tokens")
        job = _job(request, self._sampling(request))
        job.fills_room = True
        conversation = await open_chat(self.service, call, job, streamed=request.stream)
        writer = _Writer(self.service, f"msg_{call.request_id}", model)
        if request.stream:
            return Events(writer.stream(conversation), failed=_failed, keep_alive=event({"type": "ping"}, "ping"))
        (result,) = await conversation.whole()
        return json_reply(writer.whole(result, conversation.flight.answer))

    async def count_tokens(self, call: Call) -> Reply:
        request = await call.read(CountRequest)
        self.service.check_model(request.model)
        return json_reply({"input_tokens": len(await chat_tokens(self.service, _job(request, SamplingParams())))})

    def _sampling(self, request: MessagesRequest) -> SamplingParams:
        names = ("temperature", "top_p", "top_k")
        advice = self.service.info.generation
        chosen = {name: advice[name] for name in names if isinstance(advice.get(name), int | float)}
        chosen |= {name: value for name in names if (value := getattr(request, name)) is not None}
        return sampling_params({**chosen, "max_tokens": request.max_tokens, "stop": request.stop_sequences or []})


def _job(request: CountRequest, sampling: SamplingParams) -> ChatJob:
    messages = []
    if request.system:
        messages.append({"role": "system", "content": _plain_text(request.system, "system")})
    for number, message in enumerate(request.messages):
        messages += _plain_messages(message, f"messages[{number}]")
    if not request.messages:
        raise BadRequest("messages is empty.", "send at least one message", "messages")
    choice = request.tool_choice or ToolChoice("auto")
    thinking = {"enable_thinking": request.thinking.type != "disabled"} if request.thinking else None
    return ChatJob(
        messages=messages,
        sampling=sampling,
        tools=tools_of([_tool(tool, number) for number, tool in enumerate(request.tools or [])]),
        tool_choice={"any": "required", "tool": "required"}.get(choice.type, choice.type),
        named=choice.name if choice.type == "tool" else None,
        parallel=not choice.disable_parallel_tool_use,
        template=template_variables(thinking),
    )


def _tool(tool: AnthropicTool, number: int) -> Tool:
    if tool.input_schema is None:
        kind = (tool.type or "")[:40]
        cause = f"tools[{number}].input_schema is missing" + (f", and this server has no tool of type {kind!r}" if kind else "")
        raise BadRequest(f"{cause}.", 'send "input_schema": {"type": "object", ...}', f"tools[{number}]")
    return Tool(FunctionDefinition(tool.name, tool.description, tool.input_schema))


def _plain_messages(message: AnthropicMessage, place: str) -> list[dict[str, Any]]:
    """One message of theirs is one or more of the templates': every tool result is a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _plain_text(block.content or "", place)}
        for block in message.content
        if block.type == "tool_result"
    ]
    others = [block for block in message.content if block.type != "tool_result"]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in others
        if block.type == "tool_use"
    ]
    thoughts = "".join(block.thinking for block in others if block.type == "thinking")
    spoken = [block for block in others if block.type not in ("tool_use", "thinking", "redacted_thinking")]
    if results and not spoken:
        return results
    plain: dict[str, Any] = {"role": message.role, "content": _plain_text(spoken, place)}
    if calls:
        plain["tool_calls"] = calls
    if thoughts:
        plain["reasoning_content"] = thoughts
    return [*results, plain]


def _plain_text(content: str | list[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            cause = f"{place} has a block of type {block.type[:40]!r}; this model reads text alone."
            raise BadRequest(cause, 'send blocks such as {"type": "text", "text": "..."}', f"{place}.content")
    return "\n".join(block.text for block in content)


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Writer:
    """Turns a conversation into a message, whole or as events."""

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
                usage = {"output_tokens": _made(answer), "input_tokens": len(answer.tokens)}
                ending = {"type": "message_delta", "delta": self._stop(piece.finish, answer), "usage": usage}
                yield event(ending, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def _message(self, content: list[dict[str, Any]], answer: Answer) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": {
                "input_tokens": len(answer.tokens),
                "output_tokens": _made(answer),
                "cache_read_input_tokens": answer.cached_tokens,
                "cache_creation_input_tokens": 0,
            },
        }

    def _stop(self, finish: str, answer: Answer) -> dict[str, Any]:
        sequence = stop_sequence(self._service, answer) if finish == "stop" else None
        return {"stop_reason": "stop_sequence" if sequence else _STOP_REASONS[finish], "stop_sequence": sequence}


class _Blocks:
    """Content blocks of a streamed message: one open at a time."""

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


def _made(answer: Answer) -> int:
    return sum(len(completion.token_ids) for completion in answer.completions)


def _input(arguments: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": arguments}


def stop_sequence(service: Service, answer: Answer) -> str | None:
    """Which stop string ended the answer, if one did."""
    tokens = answer.completions[0].token_ids
    if not answer.sampling.stop or not tokens or tokens[-1] in service.info.eos_token_ids:
        return None
    longest = max(len(stop.encode()) for stop in answer.sampling.stop)
    tail = service.client.tokenizer.decode(tokens[-longest - 8 :], skip_special_tokens=False)
    found = [stop for stop in answer.sampling.stop if stop in tail]
    return min(found, key=tail.index) if found else None


def _failed(failure: Failure) -> bytes:
    return event(failure_document(failure, Shape.ANTHROPIC), "error")
