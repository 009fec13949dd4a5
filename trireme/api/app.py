"""The web application: which path leads to which handler. Knows routes; what they do is in the modules of each API."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from trireme.api.anthropic.messages import Anthropic
from trireme.api.llama.completion import LlamaCompletion
from trireme.api.native.generate import Native
from trireme.api.ollama.chat import Ollama
from trireme.api.openai.chat_completions import ChatCompletions
from trireme.api.openai.completions import Completions
from trireme.api.openai.responses import Responses
from trireme.api.operation.admin import Admin
from trireme.api.operation.openapi import openapi_document
from trireme.api.operation.probes import Probes
from trireme.api.service import Service
from trireme.api.stored.batches import Batches
from trireme.api.stored.files import Files
from trireme.api.stored.shelf import Shelf, default_folder
from trireme.api.transport.failures import Failure, Shape, failure_body, shape_of_path
from trireme.api.transport.guard import Guard
from trireme.api.transport.http import Call, Endpoint, Handler, Reply
from trireme.api.transport.logs import set_up_logs
from trireme.api.transport.nowhere import nothing_at
from trireme.api.transport.tracing import Tracer
from trireme.serve.client import Context

WEB = pathlib.Path(__file__).parent / "web"
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class RouteEntry(NamedTuple):
    method: str
    path: str
    handler: Handler
    shape: Shape = Shape.OPENAI
    generates: bool = False  # the request takes a place in the queue; it is refused unread if the queue is full
    label: str = ""  # the name of the route in the metrics; if empty, its path


def create_app(context: Context) -> ASGIApp:
    """Builds the ASGI application of one HTTP process."""
    set_up_logs(context.options.log_format, context.options.log_level)
    service = Service(context)
    shelf = Shelf(pathlib.Path(context.options.data_dir) if context.options.data_dir else default_folder())
    handlers = _Handlers(service, shelf)
    entries = [*handlers.routes(), *_short_routes(handlers.routes()), *_page_routes()]
    app = Starlette(
        routes=_routes(entries, context.options.max_body, service.admit),
        exception_handlers={HTTPException: _http_exception},
        lifespan=handlers.lifespan,
    )
    app.router.redirect_slashes = False  # a path with an additional slash is another path

    def count(route: str, status: int) -> None:
        service.metrics.count("http_requests", 1, route, str(status))

    return Guard(app, context.options, frozenset(_page_files()), Tracer(context.options.otlp_endpoint), count)


class _Handlers:
    """Holds the handlers of all routes. Each is created once."""

    def __init__(self, service: Service, shelf: Shelf):
        self.service = service
        self.chat, self.completions = ChatCompletions(service), Completions(service)
        self.probes, self.admin = Probes(service, self.chat.job), Admin(service)
        self.responses = Responses(service, shelf)
        self.files = Files(shelf)
        self.batches = Batches(shelf, self.files, {"/v1/chat/completions": self.chat, "/v1/completions": self.completions})
        self.anthropic, self.native, self.ollama = Anthropic(service), Native(service), Ollama(service)
        self.llama = LlamaCompletion(service)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        warming = asyncio.create_task(self.service.warm_up())
        async with self.batches.working():
            yield
        warming.cancel()
        await self.responses.close()
        self.service.close()

    def routes(self) -> list[RouteEntry]:
        return [*self._server(), *self._openai(), *self._others()]

    def _server(self) -> list[RouteEntry]:
        probes = self.probes
        return [
            RouteEntry("GET", "/health", probes.ready),
            RouteEntry("GET", "/live", probes.live),
            RouteEntry("GET", "/ready", probes.ready),
            RouteEntry("GET", "/version", probes.version),
            RouteEntry("GET", "/load", probes.load),
            RouteEntry("GET", "/metrics", probes.metrics),
            RouteEntry("GET", "/openapi.json", self._openapi),
            RouteEntry("POST", "/admin/reload", self.admin.reload),
            RouteEntry("POST", "/tokenize", probes.tokenize),
            RouteEntry("POST", "/detokenize", probes.detokenize),
            RouteEntry("GET", "/tokenizer_info", probes.tokenizer_info),
            RouteEntry("GET", "/props", probes.props),
            RouteEntry("POST", "/apply-template", probes.apply_template),
        ]

    def _openai(self) -> list[RouteEntry]:
        return [
            RouteEntry("GET", "/v1/models", self.probes.models),
            RouteEntry("GET", "/v1/models/{model:path}", self.probes.model),
            RouteEntry("POST", "/v1/chat/completions", self.chat, generates=True),
            RouteEntry("POST", "/v1/completions", self.completions, generates=True),
            RouteEntry("POST", "/v1/responses", self.responses.create, generates=True),
            RouteEntry("POST", "/v1/responses/input_tokens", self.responses.input_tokens),
            RouteEntry("POST", "/v1/responses/compact", self.responses.compact),
            RouteEntry("GET", "/v1/responses/{id}", self.responses.get),
            RouteEntry("DELETE", "/v1/responses/{id}", self.responses.delete),
            RouteEntry("POST", "/v1/responses/{id}/cancel", self.responses.cancel),
            RouteEntry("GET", "/v1/responses/{id}/input_items", self.responses.input_items),
            RouteEntry("POST", "/v1/files", self.files.create),
            RouteEntry("GET", "/v1/files", self.files.listed),
            RouteEntry("GET", "/v1/files/{id}", self.files.get),
            RouteEntry("GET", "/v1/files/{id}/content", self.files.content),
            RouteEntry("DELETE", "/v1/files/{id}", self.files.delete),
            RouteEntry("POST", "/v1/batches", self.batches.create),
            RouteEntry("GET", "/v1/batches", self.batches.listed),
            RouteEntry("GET", "/v1/batches/{id}", self.batches.get),
            RouteEntry("POST", "/v1/batches/{id}/cancel", self.batches.cancel),
        ]

    def _others(self) -> list[RouteEntry]:
        anthropic, native, ollama, llama = self.anthropic, self.native, self.ollama, self.llama
        return [
            RouteEntry("POST", "/v1/messages", anthropic.messages, Shape.ANTHROPIC, True),
            RouteEntry("POST", "/v1/messages/count_tokens", anthropic.count_tokens, Shape.ANTHROPIC),
            RouteEntry("POST", "/", native.root, Shape.TGI, True),
            RouteEntry("POST", "/generate", native.generate, Shape.TGI, True),
            RouteEntry("POST", "/generate_stream", native.generate_stream, Shape.TGI, True),
            RouteEntry("POST", "/tokens", native.tokens, Shape.TGI),
            RouteEntry("GET", "/token_load", native.token_load, Shape.TGI),
            RouteEntry("GET", "/info", native.info, Shape.TGI),
            RouteEntry("POST", "/completion", llama.completion, generates=True),
            RouteEntry("POST", "/infill", llama.infill, generates=True),
            RouteEntry("POST", "/api/chat", ollama.chat, Shape.OLLAMA, True),
            RouteEntry("POST", "/api/generate", ollama.generate, Shape.OLLAMA, True),
            RouteEntry("GET", "/api/tags", ollama.tags, Shape.OLLAMA),
            RouteEntry("POST", "/api/show", ollama.show, Shape.OLLAMA),
            RouteEntry("GET", "/api/ps", ollama.ps, Shape.OLLAMA),
            RouteEntry("GET", "/api/version", ollama.version, Shape.OLLAMA),
        ]

    async def _openapi(self, call: Call) -> Reply:
        return Reply(openapi_document([(entry.method, entry.path) for entry in self.routes()]))


# These routes also exist without /v1, for clients whose base URL lacks it. Metrics and OpenAPI show only the full paths.
_SHORT = ("/v1/models", "/v1/models/{model:path}", "/v1/chat/completions", "/v1/completions", "/v1/responses")


def _short_routes(entries: list[RouteEntry]) -> list[RouteEntry]:
    return [e._replace(path=e.path.removeprefix("/v1"), label=e.path) for e in entries if e.path in _SHORT]


def _routes(entries: list[RouteEntry], max_body: int, admit: Callable[[], None]) -> list[BaseRoute]:
    return [
        Route(e.path, Endpoint(e.handler, e.shape, max_body, admit if e.generates else None, e.label or e.path), methods=[e.method])
        for e in entries
    ]


async def _http_exception(request: Request, error: Exception) -> Response:
    """Answers a request whose path is unknown, or whose path does not take this method."""
    assert isinstance(error, HTTPException)
    path, given = request.scope["path"], error.headers or {}
    if error.status_code == 404:
        failure = Failure(404, nothing_at(path, {getattr(route, "path", "") for route in request.app.routes}), code="not_found")
    else:
        allowed = " or ".join(name for name in given.get("Allow", "").split(", ") if name not in ("", "HEAD"))
        text = f"{path[:200]} does not take {request.method[:20]}." + (f" Fix: use {allowed}" if allowed else "")
        failure = Failure(error.status_code, text, code="method_not_allowed")
    headers = {"connection": "close", **given}  # the request's body has not been read
    return Response(failure_body(failure, shape_of_path(path)), error.status_code, headers, "application/json")


def _page_files() -> dict[str, pathlib.Path]:
    """The page's files by path, listed once when the process starts. So a path from a request is never used to open a file."""
    if not WEB.is_dir():
        return {}
    files = {f"/{file.relative_to(WEB).as_posix()}": file for file in sorted(WEB.rglob("*")) if file.is_file()}
    return {**files, "/": files["/index.html"]} if "/index.html" in files else files


def _page_routes() -> list[RouteEntry]:
    return [RouteEntry("GET", path, _page_handler(file), label="page") for path, file in _page_files().items()]


def _page_handler(file: pathlib.Path) -> Handler:
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    media_type = f"{kind}; charset=utf-8" if kind.startswith(("text/", "application/javascript")) else kind

    async def page(call: Call) -> Reply:
        return Reply(file.read_bytes(), media_type=media_type, headers=_PAGE_HEADERS)

    return page
