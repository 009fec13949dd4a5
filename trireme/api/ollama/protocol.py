"""The shapes of Ollama's API: what comes in, and how it becomes messages, formats and template variables. Knows no engine."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

import msgspec

from trireme.api.chat.turn import template_variables
from trireme.api.openai.protocol import ContentPart, FunctionCall, JsonSchema, Message, ResponseFormat, Tool, ToolCall, ToolChoice
from trireme.api.transport.fields import OtherFields
from trireme.errors import BadRequest
from trireme.types import DRAWN, Draw

_OTHERS = OtherFields(
    refused={
        "template": "give the server a model folder with that template",
        "context": "send the conversation to /api/chat",
    },
    harmless=frozenset({"truncate", "shift"}),  # what to do with a prompt that is too long: here it is refused
)
_OTHER_OPTIONS = OtherFields(
    refused={
        **dict.fromkeys(("mirostat", "tfs_z", "typical_p"), f"sample by {', '.join(DRAWN)} and the penalties"),
        **dict.fromkeys(("rope_frequency_base", "rope_frequency_scale"), "give the server a model folder with that config"),
    },
    neutral={"tfs_z": (1.0, 1), "typical_p": (1.0, 1)},
    # Either how Ollama loads a model, which the server's own settings decide here, or a detail of what is refused above.
    harmless=frozenset(
        {
            *("num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "numa"),
            *("low_vram", "f16_kv", "use_mmap", "use_mlock", "mirostat_tau", "mirostat_eta"),
        }
    ),
)


class Options(Draw):
    """What may be set of sampling. The context is the server's; `num_ctx` may make it smaller. Nothing is cut in silence."""

    num_ctx: int | None = None  # bounds the tokens of prompt and answer together
    seed: int | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    stop: str | list[str] | None = None
    others: ClassVar[OtherFields] = _OTHER_OPTIONS

    def check_penalties(self) -> None:
        """Refuses what Ollama's penalties can do and these cannot. Without a penalty it asks for nothing."""
        if self.repeat_penalty in (None, 1.0) and not self.presence_penalty and not self.frequency_penalty:
            return
        if self.repeat_last_n not in (None, -1):
            cause = f"options.repeat_last_n is {self.repeat_last_n}; penalties count every token of prompt and answer."
            raise BadRequest(cause, "send -1, or leave it out", "options.repeat_last_n")
        if self.penalize_newline is False:
            cause = "options.penalize_newline is false; penalties count line breaks, too."
            raise BadRequest(cause, "leave it out", "options.penalize_newline")


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct):
    function: OllamaFunction


class OllamaMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    images: list[str] | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    model: str
    stream: bool = True
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None  # alternatives of each token; they are sent where logprobs is true
    others: ClassVar[OtherFields] = _OTHERS

    @property
    def load_reason(self) -> str:
        """What a request without a prompt asks for: to load or to unload. The server's options decide how long the model stays."""
        kept = self.keep_alive if isinstance(self.keep_alive, str) else str(self.keep_alive)
        return "unload" if re.fullmatch(r"0+(\.0*)?[a-z]*", kept) else "load"


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat"""

    messages: list[OllamaMessage] = []
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate"""

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool = False
    images: list[str] | None = None


class ShowRequest(msgspec.Struct):
    """POST /api/show"""

    model: str = ""
    name: str = ""


def format_of(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not given:
        return None
    if given == "json":
        return ResponseFormat("json_object")
    if isinstance(given, str):
        raise BadRequest(f"format is {given[:40]!r}; it must be json or a JSON schema.", param="format")
    return ResponseFormat("json_schema", JsonSchema(schema=given))


def message_of(message: OllamaMessage) -> Message:
    if message.images:
        return Message(message.role, [ContentPart("image")])  # refused later, with its place in the request
    calls = [
        ToolCall(FunctionCall(c.function.name, msgspec.json.encode(c.function.arguments).decode()))
        for c in message.tool_calls or []
    ]
    return Message(message.role, message.content, message.tool_name, calls or None, reasoning_content=message.thinking)


def thinking_of(request: OllamaRequest) -> dict[str, Any]:
    return template_variables({"enable_thinking": bool(request.think)} if request.think is not None else None)
