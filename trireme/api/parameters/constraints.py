"""From what a request says of its answer's form to sampling parameters with a grammar. Knows fields, no grammar language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from trireme.api.chat.parsing import ParserFor
from trireme.api.openai.protocol import ResponseFormat, StructuredOutputs
from trireme.api.parameters.grammars import (
    SpecialTokens,
    choice_grammar,
    object_grammar,
    regex_grammar,
    rules_grammar,
    schema_grammar,
    tools_grammar,
    with_channels,
    with_thought,
)
from trireme.api.service import Service
from trireme.api.transport.mistakes import body_mistake
from trireme.errors import BadRequest
from trireme.types import SamplingParams


async def constrained(
    service: Service, sampling: SamplingParams, response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> SamplingParams:
    """The sampling parameters with the grammar that the request asks for. The grammar is compiled once to check it."""
    if outputs is not None:
        return await _with(service, sampling, _of_outputs(outputs), "structured_outputs")
    if response_format is None or response_format.type == "text":
        return sampling
    shape = response_format.value if response_format.value is not None else response_format.schema
    if response_format.type == "json_object" and shape is not None:
        return await _with(service, sampling, schema_grammar(shape, "response_format"), "response_format")
    if response_format.type == "json_object":
        return await _with(service, sampling, object_grammar(), "response_format")
    if response_format.json_schema is None:
        cause = "response_format.json_schema is missing; the format json_schema needs it."
        raise BadRequest(cause, 'send "json_schema": {"schema": {...}}', "response_format.json_schema")
    grammar = schema_grammar(response_format.json_schema.schema, "response_format")
    return await _with(service, sampling, grammar, "response_format")


def _of_outputs(outputs: StructuredOutputs) -> str:
    given = [name for name in outputs.__struct_fields__ if getattr(outputs, name) is not None]
    if len(given) != 1:
        cause = "structured_outputs takes exactly one of json, json_object, regex, choice, grammar."
        raise BadRequest(cause, "leave the others out", "structured_outputs")
    if outputs.json is not None:
        return schema_grammar(_schema(outputs.json), "structured_outputs.json")
    if outputs.regex is not None:
        return regex_grammar(outputs.regex, "structured_outputs.regex")
    if outputs.choice is not None:
        return choice_grammar(outputs.choice, "structured_outputs.choice")
    if outputs.grammar is not None:
        return rules_grammar(outputs.grammar, "structured_outputs.grammar")
    return object_grammar()


def _schema(given: dict[str, Any] | str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError) as error:
        cause = body_mistake(error, given.encode("utf-8", "replace"), "The schema")
        raise BadRequest(cause, param="structured_outputs.json") from None


async def _with(service: Service, sampling: SamplingParams, grammar: str, param: str) -> SamplingParams:
    await service.grammars.check(grammar, param)
    return msgspec.structs.replace(sampling, grammar=grammar)


async def constrained_turn(
    service: Service,
    sampling: SamplingParams,
    parser: ParserFor,
    *,
    tools: Sequence[dict[str, Any]],
    required: bool,
    named: str | None,
    parallel: bool,
) -> SamplingParams:
    """The sampling parameters of a turn: held to a tool call where one is required, with room for thoughts before."""
    special = SpecialTokens(service.client.tokenizer)
    grammar, param = sampling.grammar, "response_format"
    if required:
        chosen = [tool for tool in tools if named in (None, tool["function"]["name"])]
        if not chosen:
            if not named:
                raise BadRequest("tool_choice requires a call, but there are no tools.", "send tools", "tool_choice")
            raise BadRequest(f"tool_choice asks for {named[:64]!r}, which is not in tools.", "send it", "tool_choice")
        grammar, param = tools_grammar(chosen, parser.format, parallel=parallel and named is None, special=special), "tools"
    if grammar is None:
        return sampling
    template = service.client.tokenizer.chat_template or ""
    if parser.format.own_reasoning:
        grammar = with_channels(grammar, required, special)
    elif parser.tags is not None and (parser.opened or parser.tags.closing in template):
        grammar = with_thought(grammar, parser.tags, parser.opened, special)
    return await _with(service, sampling, grammar, param) if grammar != sampling.grammar else sampling
