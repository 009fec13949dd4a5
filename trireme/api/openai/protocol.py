"""What OpenAI's clients send and get: the shapes of chat and text completions. Knows fields and their types, not their meaning.

Fields after `# beyond OpenAI` are this server's own; other servers of open models spell them the same way.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from trireme.api.openai.other_fields import CHAT, COMPLETIONS
from trireme.api.transport.fields import OtherFields
from trireme.errors import BadRequest
from trireme.types import Draw


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(msgspec.Struct):
    """Exactly one of these bounds what the model may write."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchema(msgspec.Struct):
    name: str = "schema"
    schema: dict[str, Any] = {}
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    # A json_object of a shape: TGI's clients (huggingface_hub among them) send the schema as `value`, llama.cpp's as `schema`.
    value: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


class SamplingFields(Draw, kw_only=True):
    """How to sample: what chat and text completions have in common. None: the model's advice, or the plain default."""

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # beyond OpenAI
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    timings_per_token: bool = False
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    cache_salt: str | None = None
    priority: int = 0
    # what other servers call some of these
    repeat_penalty: float | None = None
    n_predict: int | None = None  # -1: as much as fits
    n_probs: int | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def __post_init__(self) -> None:
        if self.repetition_penalty is None:
            self.repetition_penalty = self.repeat_penalty
        named = {name: getattr(self, name) for name in _OUTPUTS if getattr(self, name) not in (None, "")}
        if len(named) > 1 or (named and (self.structured_outputs or self.response_format)):
            raise ValueError(f"{', '.join(named)}: only one field may say what form the answer has. Fix: leave the others out")
        for name, value in named.items():
            self.structured_outputs = StructuredOutputs(**{_OUTPUTS[name]: value})


# The field -> the one of structured_outputs that it stands for.
_OUTPUTS = {
    "json_schema": "json",
    "grammar": "grammar",
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
}


class FunctionDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct):
    tools: list[NamedTool]
    mode: Literal["auto", "required"] = "auto"


class ToolChoice(msgspec.Struct):
    """Either one tool that must be called, or those that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class Choice(NamedTuple):
    """How a turn's tools are chosen."""

    how: str = "auto"  # auto, none or required
    named: str | None = None  # the one tool that must be called
    allowed: list[str] | None = None  # the only tools that may be called; None: all


def choice_of(given: str | ToolChoice | None) -> Choice:
    if not isinstance(given, ToolChoice):
        return Choice(given or "auto")
    allowed = given.allowed_tools
    if given.type == "allowed_tools":
        if allowed is None:
            cause = "tool_choice.allowed_tools is missing; a choice of that type needs it."
            fix = 'send "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "..."}}]}'
            raise BadRequest(cause, fix, "tool_choice")
        return Choice(allowed.mode, None, [tool.function.name for tool in allowed.tools])
    if given.function is None:
        cause = "tool_choice.function is missing; it must be an object."
        raise BadRequest(cause, 'send "function": {"name": "..."}', "tool_choice")
    return Choice("required", given.function.name)


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[Message]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    # beyond OpenAI
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    others: ClassVar[OtherFields] = CHAT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is None and self.n_predict is not None and self.n_predict >= 0:
            self.max_tokens = self.n_predict
        if self.n_probs and self.top_logprobs is None:
            self.logprobs, self.top_logprobs = True, self.n_probs


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = None  # 16 where nothing says more
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    # beyond OpenAI
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True
    others: ClassVar[OtherFields] = COMPLETIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_tokens is None and self.n_predict is not None:
            if self.n_predict < 0:
                raise ValueError(f"n_predict is {self.n_predict}; it must be 0 or more. Fix: send how many tokens you want")
            self.max_tokens = self.n_predict
        if self.logprobs is None and self.n_probs:
            self.logprobs = self.n_probs


class Timings(msgspec.Struct):
    """How long an answer took, in the words of llama.cpp's server. Of several sequences, the tokens of all count."""

    cache_n: int
    prompt_n: int  # without those found in the cache
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None
    refusal: None = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    timings: Timings | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET


class AnswerMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    timings: Timings | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
    system_fingerprint: str | None = None
    timings: Timings | UnsetType = UNSET


class ModelCard(msgspec.Struct):
    id: str
    created: int
    # beyond OpenAI
    max_model_len: int
    sampling: dict[str, float]  # what a chat should send: its makers' advice, or something calm
    sampling_source: str  # whose advice that is: server (--default-sampling), model or calm
    object: str = "model"
    owned_by: str = "trireme"
    root: str | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, the messages of a conversation, or, as llama.cpp's clients ask, content"""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    # with content
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str
    content: str  # the same, as llama.cpp's clients read it
