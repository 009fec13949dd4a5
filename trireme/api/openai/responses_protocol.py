"""The shapes of /v1/responses: what comes in, and how its items become messages. Knows fields, no engine."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from trireme.api.chat.turn import arguments_of
from trireme.api.openai.other_fields import RESPONSES
from trireme.api.openai.protocol import Choice, FunctionDefinition, JsonSchema, ResponseFormat, Tool
from trireme.api.transport.fields import OtherFields
from trireme.errors import BadRequest
from trireme.types import Draw


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "schema"
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: str | None = None


class ResponseTool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolName(msgspec.Struct):
    name: str
    type: Literal["function"] = "function"


class ResponseToolChoice(msgspec.Struct):
    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ResponseToolName] | None = None


def response_choice(given: str | ResponseToolChoice | None) -> Choice:
    if not isinstance(given, ResponseToolChoice):
        return Choice(given or "auto")
    if given.type == "function":
        if not given.name:
            raise BadRequest("tool_choice.name is missing; it must be a string.", 'send "name": "..."', "tool_choice")
        return Choice("required", given.name)
    if given.tools is None:
        cause = "tool_choice.tools is missing; a choice of type 'allowed_tools' needs it."
        raise BadRequest(cause, 'send "tools": [{"type": "function", "name": "..."}]', "tool_choice")
    return Choice(given.mode, None, [tool.name for tool in given.tools])


class InputPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """Any of the items that this server reads; `type` tells which fields count."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    status: str | None = None


class ResponsesRequest(Draw, kw_only=True):
    """POST /v1/responses"""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    # beyond OpenAI
    seed: int | None = None
    others: ClassVar[OtherFields] = RESPONSES


def response_messages(items: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Converts items, both earlier ones and those of the request, to messages for the template."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    thoughts = ""
    for number, raw in enumerate(items):
        item, place = msgspec.convert(raw, InputItem), f"input[{number}]"
        if item.type == "reasoning":
            thoughts = _text(raw.get("content") or raw.get("summary") or "", place)
            continue
        message = _message(item, raw, place)
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"], thoughts = thoughts, ""
        before = messages[-1] if messages else None
        if "tool_calls" in message and before is not None and before["role"] == "assistant":
            before.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    if not messages:
        raise BadRequest("input is empty.", "send at least one message", "input")
    return messages


_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _message(item: InputItem, raw: dict[str, Any], place: str) -> dict[str, Any]:
    if item.type == "message":
        role = "system" if item.role == "developer" else item.role
        if role is None:
            roles = "it must be one of 'assistant', 'developer', 'system', 'user'"
            raise BadRequest(f"{place}.role is missing; {roles}.", 'send "role": "user"', f"{place}.role")
        return {"role": role, "content": _text(raw.get("content") or "", place)}
    if item.type == "function_call":
        function = {"name": item.name or "", "arguments": arguments_of(item.arguments or "{}")}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(raw.get("output") or "", place)}
    cause = f"{place}.type is {item.type[:40]!r}; it must be one of {', '.join(map(repr, _ITEM_TYPES))}."
    raise BadRequest(cause, "send messages and function calls", place)


def _text(content: str | list[dict[str, Any]], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.get("text") or part.get("refusal")
        if text is None and part.get("type") not in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
            cause = f"{place}.content has a part of type {str(part.get('type'))[:40]!r}; this model reads text alone."
            raise BadRequest(cause, 'send parts such as {"type": "input_text", "text": "..."}', f"{place}.content")
        texts.append(text or "")
    return "".join(texts)


def listed_item(item: dict[str, Any], number: int) -> dict[str, Any]:
    """An item as clients receive it: it has an id, and a message has a list of parts instead of plain text."""
    item = {"id": f"msg_{number}", "type": "message", **item}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {"status": "completed", **item, "content": [{"type": kind, "text": item["content"]}]}
    return item


def response_tools(tools: list[ResponseTool] | None) -> list[Tool]:
    found = []
    for number, tool in enumerate(tools or []):
        if tool.type != "function" or not tool.name:
            raise BadRequest(*_bad_tool(tool, number))
        found.append(Tool(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)))
    return found


def _bad_tool(tool: ResponseTool, number: int) -> tuple[str, str, str]:
    """The refusal of a tool: its cause, a fix, and the field."""
    if tool.type == "function":
        return f"tools[{number}].name is missing; it must be a string.", 'send "name": "..."', f"tools[{number}].type"
    if tool.type == "custom":
        cause = f"tools[{number}].type is 'custom'; models here call tools with JSON alone."
        return cause, "offer a function with one parameter, a string", f"tools[{number}].type"
    cause = f"tools[{number}].type is {tool.type[:40]!r}; this server runs no tools of its own."
    return cause, "send tools of type 'function'", f"tools[{number}].type"


def response_format(text: TextOptions | None) -> ResponseFormat | None:
    wanted = text.format if text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat("json_object")
    if wanted.schema is None:
        raise BadRequest("text.format.schema is missing; the format json_schema needs it.", "send the schema", "text.format.schema")
    return ResponseFormat("json_schema", JsonSchema(wanted.name, wanted.schema, wanted.strict))
