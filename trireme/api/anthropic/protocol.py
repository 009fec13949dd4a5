"""The shapes of Anthropic's Messages API: what comes in, and how it becomes a turn of a conversation. Knows fields, no engine."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from trireme.api.chat.turn import ChatJob, template_variables, tools_of
from trireme.api.openai.protocol import FunctionDefinition, JsonSchema, ResponseFormat, Tool
from trireme.api.transport.fields import OtherFields
from trireme.errors import BadRequest
from trireme.types import SamplingParams

_OTHERS = OtherFields(
    refused={
        "thread": "send the whole conversation in messages",
        "mcp_servers": "call the MCP servers yourself, and send their tools in tools",
        "container": "run code yourself, and send its tools in tools",
        "previous_message_id": "send the whole conversation in messages",
    },
    harmless=frozenset({"metadata", "service_tier", "inference_geo", "betas", "cache_control", "context_management", "speed"}),
    details={"thread": "thread_unsupported_request"},
)


class Block(msgspec.Struct, kw_only=True):
    """A piece of a message: text, a document, thinking, a tool's use or its result."""

    type: str
    text: str = ""
    source: Source | None = None
    title: str | None = None
    context: str | None = None
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Source(msgspec.Struct):
    """A document's content, where it is text."""

    type: str
    media_type: str = "text/plain"
    data: str = ""
    content: str | list[Block] | None = None


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


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    effort: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    others: ClassVar[OtherFields] = _OTHERS
    messages: list[AnthropicMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the place of this field in the beta API

    def response_format(self) -> ResponseFormat | None:
        """The format that the answer must have."""
        asked = (self.output_config.format if self.output_config else None) or self.output_format
        return ResponseFormat("json_schema", JsonSchema(schema=asked.schema)) if asked else None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def chat_job(request: CountRequest, sampling: SamplingParams) -> ChatJob:
    """The turn that the request asks for. If the last message is the assistant's, the answer continues it."""
    messages = []
    if request.system:
        messages.append({"role": "system", "content": _plain_text(request.system, "system")})
    for number, message in enumerate(request.messages):
        messages += _plain_messages(message, f"messages[{number}]")
    if not request.messages:
        raise BadRequest("messages is empty.", "send at least one message", "messages")
    choice = request.tool_choice or ToolChoice("auto")
    thinking = {"enable_thinking": request.thinking.type != "disabled"} if request.thinking else None
    continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return ChatJob(
        messages=messages,
        continues=continues,
        fills_room=True,
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
    """Converts one Anthropic message to messages for the template. Every tool result becomes a message of its own."""
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
    return content if isinstance(content, str) else "\n".join(_block_text(block, place) for block in content)


def _block_text(block: Block, place: str) -> str:
    if block.type == "text":
        return block.text
    source = block.source
    if block.type == "document" and source is not None and source.type == "text":
        return _document_text(block, source.data)
    if block.type == "document" and source is not None and source.type == "content":
        return _document_text(block, _plain_text(source.content or "", place))
    what = f"a block of type {block.type[:40]!r}"
    if block.type == "document":
        what = f"a document whose source is of type {source.type[:40]!r}" if source else "a document without a source"
    cause = f"{place} has {what}; this model reads text alone."
    raise BadRequest(cause, 'send blocks such as {"type": "text", "text": "..."}', f"{place}.content")


def _document_text(block: Block, text: str) -> str:
    """A document as the model reads it: its title and context, where it has them, then its text."""
    return "\n".join([*(f"[{line}]" for line in (block.title, block.context) if line), text])
