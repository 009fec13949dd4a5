"""Errors as the clients of each API expect to read them: status, shape and headers. Knows no routes."""

from __future__ import annotations

import enum
import random
import re
from typing import Any

import msgspec

from trireme.errors import BadRequest, ModelNotFound, Overloaded, TriremeError, Unavailable

RETRY_AFTER = (1.0, 3.0)  # seconds; a queue usually drains, or a worker restarts, in about this time

# A number in JSON may have any length. Error messages shorten one of more than 40 digits.
_LONG_NUMBER = re.compile(r"\d{41,}")


class Shape(enum.Enum):
    """The API whose error format a route uses."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    TGI = "tgi"


class Failure(Exception):
    """An error that becomes the answer to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = headers or {}
        self.details = details  # for clients that read more fields than the message


def failure_of(error: BaseException) -> Failure:
    """Converts an exception to the answer for the client. For an unexpected error it only says that the server is at fault."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, BadRequest):
        return Failure(400, _LONG_NUMBER.sub(lambda found: found[0][:40] + "...", str(error)), param=error.param)
    if isinstance(error, ModelNotFound):
        return Failure(404, str(error), kind="invalid_request_error", param="model", code="model_not_found")
    if isinstance(error, Overloaded):
        code = "unavailable" if isinstance(error, Unavailable) else "overloaded"
        return Failure(503, str(error), kind="overloaded_error", code=code, headers=_come_back())
    if isinstance(error, TriremeError):
        return Failure(500, str(error), kind="server_error", code=type(error).__name__)
    return Failure(500, "The server made a mistake; its log has the details under this request id.", kind="server_error")


def _come_back() -> dict[str, str]:
    """The time to wait before trying again. It is random, so that clients refused together do not return together."""
    seconds = random.uniform(*RETRY_AFTER)
    # The SDKs of OpenAI and Anthropic read the header in milliseconds first.
    return {"retry-after": str(round(seconds)), "retry-after-ms": str(round(1000 * seconds))}


_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def failure_document(failure: Failure, shape: Shape) -> dict[str, Any]:
    """The body of the error response."""
    if shape is Shape.ANTHROPIC:
        kind = _ANTHROPIC_KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
        details = {"details": failure.details} if failure.details else {}
        return {"type": "error", "error": {"type": kind, "message": failure.message, **details}}
    if shape is Shape.OLLAMA:
        return {"error": failure.message}
    if shape is Shape.TGI:
        kind = "validation" if failure.status < 500 else ("overloaded" if failure.status == 503 else "generation")
        return {"error": failure.message, "error_type": kind}
    return {
        "error": {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code or failure.status}
    }


def failure_body(failure: Failure, shape: Shape) -> bytes:
    return msgspec.json.encode(failure_document(failure, shape))


def shape_of_path(path: str) -> Shape:
    """The API whose error format is used for a path without a route."""
    if path.startswith("/v1/messages"):
        return Shape.ANTHROPIC
    if path.startswith("/api/"):
        return Shape.OLLAMA
    return Shape.OPENAI
