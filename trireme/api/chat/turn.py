"""A turn of a conversation, whatever API asked for it: messages to tokens, the answer's text to content, reasoning and tool calls.

Knows templates and parsers; nothing of any protocol's shapes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trireme.api.chat.parsing import CallDelta, Delta, OutputParser, ParserFor, parser_for
from trireme.api.openai.protocol import ContentPart, FunctionCall, Message, Tool, ToolCall
from trireme.api.parameters.constraints import constrained_turn
from trireme.api.service import Flight, Service
from trireme.api.transport.http import Call
from trireme.errors import BadRequest
from trireme.hub.tokenizer import Tokenizer
from trireme.types import FinishReason, SamplingParams, TokenLogprobs

MAX_TOOLS = 128
PROMPT_END = 16  # tokens
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# The variables that a request may give to the template besides messages and tools, and the type of each.
_TEMPLATE_KINDS: dict[str, tuple[type, ...]] = {
    "enable_thinking": (bool,),
    "thinking": (bool,),
    "preserve_thinking": (bool,),
    "thinking_budget": (int,),
    "reasoning_effort": (str,),
    "date_string": (str,),
}


@dataclass
class ChatJob:
    """One turn to be answered."""

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"  # auto, none, required
    named: str | None = None  # the name of the one tool that must be called
    parallel: bool = True
    template: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues: bool = False  # the last message is the assistant's, and the answer continues it
    salt: str | None = None
    priority: int = 0
    # Agents ask for more tokens than the context of a small model has. With this set, the answer may end where the context ends.
    fills_room: bool = False
    context: int | None = None  # the client's own bound on the tokens of prompt and answer together

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call in this turn."""
        return [] if self.tool_choice == "none" else self.tools


@dataclass
class ChatPiece:
    """What one sequence of the answer gained since the last piece."""

    index: int
    delta: Delta
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: str | None  # stop, length or tool_calls


@dataclass
class ChatResult:
    """One whole sequence of the answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str = "stop"

    def take(self, piece: ChatPiece) -> None:
        self.content += piece.delta.content
        self.reasoning += piece.delta.reasoning
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or []
        self.finish = piece.finish or self.finish
        for call in piece.delta.calls:
            if call.index >= len(self.calls):
                self.calls.append(ToolCall(FunctionCall(call.name or "", ""), call.id or ""))
            self.calls[call.index].function.arguments += call.arguments


class Conversation:
    """An answer in progress, parsed. Use it as: `async for piece in conversation`."""

    def __init__(self, flight: Flight, make_parser: Callable[[], OutputParser], job: ChatJob):
        self.flight, self._parallel = flight, job.parallel
        self._calls_only = job.tool_choice == "required"
        self._parsers = [make_parser() for _ in flight.answer.completions]

    def __aiter__(self) -> AsyncIterator[ChatPiece]:
        return self

    async def __anext__(self) -> ChatPiece:
        piece = await anext(self.flight)
        parser = self._parsers[piece.index]
        delta = parser.push(piece.text)
        finish = None
        if piece.finish_reason is not None:
            delta = _joined(delta, parser.finish())
            finish = "tool_calls" if parser.has_calls and piece.finish_reason is FinishReason.STOP else str(piece.finish_reason)
        if self._calls_only:  # other text is the rest of a call that was cut off at the token limit
            delta.content = ""
        delta.calls = [_named(call) for call in delta.calls if self._parallel or call.index == 0]
        return ChatPiece(piece.index, delta, piece.token_ids, piece.logprobs, finish)

    async def whole(self) -> list[ChatResult]:
        """Waits for the end of the answer and returns all its sequences."""
        results = [ChatResult() for _ in self._parsers]
        async for piece in self:
            results[piece.index].take(piece)
        return results


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(first.content + second.content, first.reasoning + second.reasoning, [*first.calls, *second.calls])


def _named(call: CallDelta) -> CallDelta:
    """Gives the beginning of a call an id if its format has none."""
    return CallDelta(call.index, call.id or f"call_{secrets.token_hex(12)}", call.name, call.arguments) if call.name else call


async def open_chat(service: Service, call: Call, job: ChatJob, *, streamed: bool = False) -> Conversation:
    """Renders and tokenizes a turn, and submits it to the engine."""
    tokens = await chat_tokens(service, job)
    make_parser = parser_of(service, job, tokens)
    sampling = await constrained_turn(
        service,
        job.sampling,
        make_parser,
        tools=job.offered,
        required=job.tool_choice == "required",
        named=job.named,
        parallel=job.parallel,
    )
    if make_parser.needs_special and sampling.skip_special_tokens:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    if job.fills_room:
        sampling = _filling(sampling, service.info.max_model_len - len(tokens))
    if job.context is not None:
        sampling = bounded(sampling, len(tokens), job.context)
    flight = await service.open(call, tokens, sampling, salt=job.salt, priority=job.priority, streamed=streamed)
    return Conversation(flight, make_parser, job)


def _filling(sampling: SamplingParams, room: int) -> SamplingParams:
    """Reduces the token limit to the room that is left. A prompt that leaves no room is refused elsewhere."""
    most = sampling.max_tokens
    return msgspec.structs.replace(sampling, max_tokens=room) if most is not None and most > room > 0 else sampling


def bounded(sampling: SamplingParams, num_prompt: int, context: int) -> SamplingParams:
    """Reduces the token limit to what the client's own bound leaves. A prompt beyond that bound is refused, never cut."""
    if num_prompt >= context:
        cause = f"num_ctx is {context}, and the prompt has {num_prompt} tokens."
        raise BadRequest(cause, "raise num_ctx, leave it out, or shorten the prompt", "num_ctx")
    most = context - num_prompt if sampling.max_tokens is None else min(sampling.max_tokens, context - num_prompt)
    return msgspec.structs.replace(sampling, max_tokens=most)


def parser_of(service: Service, job: ChatJob, tokens: list[int]) -> ParserFor:
    """The parser for the turn's answers. It also looks at the end of the prompt, which may have opened the reasoning."""
    tokenizer = service.client.tokenizer
    template = tokenizer.templates.get("tool_use") if job.offered else None
    return parser_for(
        template or tokenizer.chat_template,
        str(service.info.config.get("model_type", "")),
        tools=job.offered,
        prompt_end=tokenizer.decode(tokens[-PROMPT_END:], skip_special_tokens=False),
    )


async def chat_tokens(service: Service, job: ChatJob) -> list[int]:
    """The tokens of a turn's prompt."""
    size = len(msgspec.json.encode([job.messages, job.tools]))
    await service.check_text(size)
    return await service.with_tokenizer(size, lambda tokenizer: _rendered(tokenizer, job))


def _rendered(tokenizer: Tokenizer, job: ChatJob) -> list[int]:
    messages, tools = job.messages, job.offered
    if not any("tool" in template for template in tokenizer.templates.values()):
        messages, tools = _tools_in_words(messages, tools), []
    begins = job.add_generation_prompt and not job.continues
    return tokenizer.encode_chat(
        messages, continued=job.continues, tools=tools or None, add_generation_prompt=begins, **job.template
    )


def _tools_in_words(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without tools: calls and results are written as text, and the system message describes the tools."""
    known = {"system", "user", "assistant"}
    turned = [message if message["role"] in known else {**message, "role": "user"} for message in messages]
    turned = [_with_calls_told(message) for message in turned]
    if not tools:
        return turned
    listed = "\n".join(msgspec.json.encode(tool["function"]).decode() for tool in tools)
    told = (
        f"You can call these functions:\n{listed}\n"
        "To call one, answer with nothing but <tool_call>\n"
        '{"name": "<the function\'s name>", "arguments": {<its arguments>}}\n</tool_call>'
    )
    if turned and turned[0]["role"] == "system":
        return [{**turned[0], "content": f"{turned[0]['content']}\n\n{told}"}, *turned[1:]]
    return [{"role": "system", "content": told}, *turned]


def _with_calls_told(message: dict[str, Any]) -> dict[str, Any]:
    calls = [msgspec.json.encode(call["function"]).decode() for call in message.get("tool_calls", ())]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return {**message, "content": f"{message['content']}\n{text}".strip()} if calls else message


# --- from protocol shapes to plain messages -------------------------------------------------------------------------------------


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages in the form that templates read."""
    if not messages:
        raise BadRequest("messages is empty.", "send at least one message", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


_ROLES = {"developer": "system", "function": "tool"}


def _message(message: Message, place: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": _ROLES.get(message.role, message.role), "content": _text(message.content, place)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": arguments_of(c.function.arguments)}}
            for c in message.tool_calls
        ]
    return plain


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    texts = []
    for number, part in enumerate(content):
        text = part.text if part.text is not None else part.refusal
        if text is None and part.type == "text":
            raise BadRequest(f"{place}.content[{number}].text is missing.", 'send "text": "..."', f"{place}.content")
        if text is None:
            cause = f"{place}.content has a part of type {part.type[:40]!r}; this model reads text alone."
            raise BadRequest(cause, 'send parts such as {"type": "text", "text": "..."}', f"{place}.content")
        texts.append(text)
    return "".join(texts)


def arguments_of(arguments: str) -> Any:
    """The arguments as an object, because templates write the JSON themselves. Text that is not a JSON object stays text."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return arguments


def tools_of(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools in the form that templates read."""
    if len(tools or []) > MAX_TOOLS:
        raise BadRequest(f"There are {len(tools or [])} tools; at most {MAX_TOOLS} are taken.", param="tools")
    for number, tool in enumerate(tools or []):
        if not _TOOL_NAME.fullmatch(tool.function.name):
            place = f"tools[{number}].function.name"
            cause = f"{place} is {tool.function.name[:40]!r}; it must have 1 to 64 letters, digits, dots, _ or -."
            raise BadRequest(cause, param=place)
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or _NO_PARAMETERS,
            },
        }
        for tool in tools or []
    ]


def allowed_of(tools: list[dict[str, Any]], allowed: list[str] | None) -> list[dict[str, Any]]:
    """The tools that tool_choice allows; None: all."""
    if allowed is None:
        return tools
    known = {tool["function"]["name"] for tool in tools}
    if missing := [name for name in allowed if name not in known]:
        raise BadRequest(f"tool_choice allows {missing[0][:64]!r}, which is not in tools.", "send it", "tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in allowed]


# Used for a tool that describes no parameters: it takes none.
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def template_variables(given: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Checks variables for the template: only known names of the right type pass, so clients cannot change how it works."""
    for name, value in (given or {}).items():
        kinds = _TEMPLATE_KINDS.get(name)
        if kinds is None:
            raise BadRequest(
                f"chat_template_kwargs does not take {name[:40]!r}.", f"use: {', '.join(_TEMPLATE_KINDS)}", "chat_template_kwargs"
            )
        if type(value) not in kinds or (isinstance(value, str) and len(value) > 256):
            expected = {bool: "true or false", int: "a whole number", str: "a string of at most 256 characters"}[kinds[0]]
            raise BadRequest(f"chat_template_kwargs.{name} must be {expected}.", param="chat_template_kwargs")
    return {**(given or {}), **{name: value for name, value in more.items() if value is not None}}
