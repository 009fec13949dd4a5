"""The OpenAPI document, made from the request structs. Knows which struct a route reads; the routes are the application's."""

from __future__ import annotations

import re
from typing import Any

import msgspec

import trireme
from trireme.api.anthropic.protocol import CountRequest, MessagesRequest
from trireme.api.llama.completion import InfillRequest, LlamaRequest
from trireme.api.native.generate import GenerateRequest, TokensRequest
from trireme.api.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from trireme.api.openai.protocol import (
    ChatAnswer,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from trireme.api.openai.responses_protocol import ResponsesRequest
from trireme.api.operation.admin import ReloadRequest
from trireme.api.stored.batches import BatchRequest

_BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/batches": BatchRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/": GenerateRequest,
    "/generate": GenerateRequest,
    "/generate_stream": GenerateRequest,
    "/tokens": TokensRequest,
    "/completion": LlamaRequest,
    "/infill": InfillRequest,
    "/apply-template": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/admin/reload": ReloadRequest,
    "/detokenize": DetokenizeRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": ShowRequest,
}
_ANSWERS: dict[str, type] = {
    "/v1/chat/completions": ChatAnswer,
    "/v1/completions": CompletionAnswer,
    "/v1/models": ModelList,
    "/v1/models/{model}": ModelCard,
    "/tokenize": TokenizeAnswer,
    "/detokenize": DetokenizeAnswer,
}
_FILE_FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string"}},
    "required": ["file"],
}
_OPEN = frozenset({"/health", "/live", "/ready"})


def openapi_document(routes: list[tuple[str, str]]) -> bytes:
    """JSON of the document for these (method, path) pairs."""
    kinds = [*dict.fromkeys([*_BODIES.values(), *_ANSWERS.values()])]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(kinds, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        shown = path.replace(":path}", "}")
        paths.setdefault(shown, {})[method.lower()] = _operation(method, shown, schemas)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Trireme", "version": trireme.__version__, "description": "LLM inference over HTTP."},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{"bearer": []}, {"key": []}],
        }
    )


def _operation(method: str, path: str, schemas: dict[type, dict[str, Any]]) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "_", f"{method} {path}".lower()).strip("_")
    answer = schemas[_ANSWERS[path]] if path in _ANSWERS else {}
    operation: dict[str, Any] = {
        "operationId": name,
        "responses": {
            "200": {"description": "The answer", "content": {"application/json": {"schema": answer}}},
            "default": {"description": "An error"},
        },
    }
    parameters = re.findall(r"{(\w+)}", path)
    if parameters:
        operation["parameters"] = [{"name": p, "in": "path", "required": True, "schema": {"type": "string"}} for p in parameters]
    if method == "POST" and path in _BODIES:
        content = {"application/json": {"schema": schemas[_BODIES[path]]}}
        operation["requestBody"] = {"required": True, "content": content}
    elif method == "POST" and path == "/v1/files":
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FILE_FORM}}}
    if path in _OPEN:
        operation["security"] = []
    return operation
