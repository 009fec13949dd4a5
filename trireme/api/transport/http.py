"""One HTTP exchange: read the body within bounds, run the handler, send what it returns; a client that leaves ends the handler.

Knows ASGI; nothing of models or protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from trireme.api.transport.failures import Failure, Shape, failure_body, failure_document, failure_of
from trireme.api.transport.fields import IGNORED_HEADER, check_fields
from trireme.api.transport.mistakes import body_mistake, field_mistake, field_of
from trireme.api.transport.tracing import Trace
from trireme.errors import TriremeError, Unavailable
from trireme.serve.patience import LEAVING

T = TypeVar("T")

BODY_SECONDS = 30.0  # seconds allowed between two pieces of a body
KEEP_ALIVE_SECONDS = 5.0  # a stream without data for this long, for example during a long prompt, sends a comment
MAX_DEPTH = 64  # levels of nested JSON
MAX_OBJECTS = 200_000  # objects and lists in one body
MAX_VALUES = 1_000_000  # values of any kind in one body; decoding holds the interpreter's lock for about 25 ns a value
SMALL_BODY = 64 << 10
LARGE_BODY = 1 << 20  # bytes; larger bodies are decoded in a thread, away from the event loop

log = logging.getLogger("trireme.api")


@dataclass
class Call:
    """A request in the form that handlers read."""

    path: str
    headers: dict[str, str]  # names are in lower case
    body: bytes
    path_params: dict[str, str]
    query: dict[str, str]
    request_id: str
    tenant: str = ""  # a digest of the API key; cached prefixes and stored records belong to one tenant
    trace: Trace = field(default_factory=lambda: Trace(""))
    begun: float = field(default_factory=time.monotonic)
    # These are closed when the exchange ends, for whatever reason.
    exits: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    ignored: list[str] = field(default_factory=list)  # names of fields that were ignored; a header of the answer lists them
    leavers: list[Callable[[], None]] = field(default_factory=list)  # called at once when the client disconnects
    models: tuple[str, ...] = ()  # served names that the key may use; () means all

    async def read(self, kind: type[T]) -> T:
        """Decodes the body as `kind`, or raises a 400 that names the wrong field."""
        if len(self.body) > LARGE_BODY:
            found, ignored = await asyncio.to_thread(_decode_and_check, self.body, kind)
        else:
            found, ignored = _decode_and_check(self.body, kind)
        self.ignored += ignored
        return found


def _decode_and_check(body: bytes, kind: type[T]) -> tuple[T, list[str]]:
    found = decode(body, kind)
    return found, check_fields(body, kind)


def decode(body: bytes, kind: type[T]) -> T:
    _check_structure(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Failure(400, field_mistake(error, kind), param=field_of(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Failure(400, body_mistake(error, body)) from None


_UNSTRUCTURED = bytes(set(range(256)) - set(b'[]{},"'))


def _check_structure(body: bytes) -> None:
    """Bounds the nesting and the number of values before anything is decoded. Brackets and commas inside strings do not count."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH and body.count(b",") <= MAX_VALUES:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _UNSTRUCTURED)
    if plain.count(b'"') > 4 * MAX_VALUES:  # two quotes for a name and two for a value
        raise Failure(400, f"The JSON has more than {MAX_VALUES} values.")
    # Keeps only the text outside strings. Removing adjacent quotes first does not change which text is inside a string.
    plain = b"".join(plain.replace(b'""', b"").split(b'"')[::2])
    if plain.count(b",") > MAX_VALUES:
        raise Failure(400, f"The JSON has more than {MAX_VALUES} values.")
    if plain.count(b"[") + plain.count(b"{") > MAX_OBJECTS:
        raise Failure(400, f"The JSON has more than {MAX_OBJECTS} objects and lists.")
    depth = 0
    for byte in plain.translate(None, b","):
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise Failure(400, f"The JSON is nested deeper than {MAX_DEPTH} levels.")
        if depth < 0:
            return  # not JSON: the decoder says where


@dataclass
class Reply:
    """A complete answer."""

    body: bytes = b""
    status: int = 200
    media_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Events:
    """An answer in pieces. Each item is sent unchanged. `failed` writes an error that occurs after the stream has begun."""

    pieces: AsyncIterator[bytes]
    media_type: str = "text/event-stream; charset=utf-8"
    failed: Callable[[Failure], bytes] | None = None
    keep_alive: bytes = b": still here\n\n"


def json_reply(document: Any, status: int = 200) -> Reply:
    return Reply(msgspec.json.encode(document), status)


def event(document: Any, name: str = "") -> bytes:
    """Encodes one server-sent event."""
    data = msgspec.json.encode(document)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: %b\n\n" % data


class EventAround:
    """An event in which only one text changes. The bytes before and after that text are encoded once."""

    def __init__(self, sample: Callable[[str], Any]):
        mark = secrets.token_hex(16)
        self._before, self._after = event(sample(mark)).split(b'"%b"' % mark.encode())

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _encode(text), self._after)


_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"

Handler = Callable[[Call], Awaitable[Reply | Events]]
Push = Callable[[bytes], bool]  # writes a piece of a stream at once, if the client reads fast enough


class Endpoint:
    """The ASGI application of one handler. If `admit` is given, it may refuse a request before any work is done for it."""

    def __init__(self, handler: Handler, shape: Shape, max_body: int, admit: Callable[[], None] | None = None, route: str = ""):
        self.handler, self.shape, self.max_body, self.route, self.admit = handler, shape, max_body, route, admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["route"] = self.route
        sender = _Sender(send, scope["state"].get("push"), self.shape, head=scope["method"] == "HEAD")
        refusal = self._refusal()
        try:
            if refusal is not None and not _is_small(scope):
                raise refusal
            call = await self._read(scope, receive)
        except _Gone:
            return
        except (Failure, TriremeError) as error:
            await sender.fail(failure_of(error), close=True)  # the rest of the body has not been read
            return
        if refusal is not None:
            await sender.fail(failure_of(refusal))
            return
        sender.ignored = call.ignored
        work = asyncio.ensure_future(self._answer(call, sender, scope["state"]))
        gone = asyncio.ensure_future(_until_gone(receive))
        leaving: set[Callable[[], None]] = scope.get("extensions", {}).get(LEAVING, set())

        def left() -> None:
            if not work.done():
                scope["state"]["disconnected"] = True
                for leave in call.leavers:
                    leave()
                work.cancel()

        leaving.add(left)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            left()
        finally:
            leaving.discard(left)
            for task in (work, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            with contextlib.suppress(asyncio.CancelledError):
                await gone

    def _refusal(self) -> TriremeError | None:
        if self.admit is not None:
            try:
                self.admit()
            except TriremeError as error:
                return error
        return None

    async def _answer(self, call: Call, sender: _Sender, state: dict[str, Any]) -> None:
        try:
            async with call.exits:
                reply = await self.handler(call)
                if isinstance(reply, Events):
                    await sender.stream(reply)
                else:
                    await sender.whole(reply)
        except Exception as error:
            failure = failure_of(error)
            state["failure"] = failure.code or failure.kind  # for the access log, because the stream's status is already 200
            if failure.status >= 500 and not isinstance(error, Unavailable):
                _log_failure(call, failure, error)
            await sender.fail(failure)

    async def _read(self, scope: Scope, receive: Receive) -> Call:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        state = scope["state"]
        return Call(
            path=scope["path"],
            headers=headers,
            body=await self._body(headers, receive),
            path_params=scope.get("path_params", {}),
            query=dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=64)),
            request_id=state["request_id"],
            tenant=state["tenant"],
            models=state.get("models", ()),
            trace=state["trace"],
            begun=state["begun"],
        )

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        too_large = Failure(413, f"The body is larger than {self.max_body} bytes, the limit of --max-body.", code="body_too_large")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length[:20]) > self.max_body:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        while True:
            try:
                message = await asyncio.wait_for(receive(), BODY_SECONDS)
            except TimeoutError:
                raise Failure(408, f"No more of the body came for {BODY_SECONDS:g} seconds.") from None
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self.max_body:
                raise too_large
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)


def _is_small(scope: Scope) -> bool:
    """Whether the rest of a body is small enough to read, so that the connection can be used again."""
    length = next((value for name, value in scope["headers"] if name.lower() == b"content-length"), b"")
    return length.isdigit() and len(length) < 9 and int(length) <= SMALL_BODY


def _log_failure(call: Call, failure: Failure, error: Exception) -> None:
    """Logs one line for an expected error (a full queue, a dead worker), and the full traceback for an unexpected one."""
    where = {"request_id": call.request_id, "path": call.path, "status": failure.status}
    if isinstance(error, TriremeError):
        log.warning("request failed: %s", failure.message, extra=where)
    elif isinstance(error, Failure):
        log.warning("request failed: %s", failure.kind, extra=where)  # its message may quote the request
    else:
        log.error("request failed", exc_info=error, extra=where)


class _Gone(Exception):
    """The client disconnected before its request was complete."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Sender:
    """Sends one answer and records how much of it has been sent."""

    def __init__(self, send: Send, push: Push | None, shape: Shape, head: bool):
        self._send, self._shape, self._head = send, shape, head
        self._push = push if not head else None
        self.ignored: list[str] = []
        self._started = False
        self._events: Events | None = None
        self._num_sent = 0  # pieces that have been sent
        self._busy = False

    async def whole(self, reply: Reply) -> None:
        headers = {"content-type": reply.media_type, "content-length": str(len(reply.body)), **reply.headers}
        await self._start(reply.status, headers)
        await self._send({"type": "http.response.body", "body": b"" if self._head else reply.body})

    async def stream(self, events: Events) -> None:
        self._events = events
        await self._start(200, {"content-type": events.media_type, "cache-control": "no-cache", "x-accel-buffering": "no"})
        ticker = asyncio.ensure_future(self._keep_alive(events.keep_alive))
        try:
            async with contextlib.aclosing(events.pieces) as pieces:  # type: ignore[type-var]
                push = self._push or _no_push
                async for piece in pieces:
                    self._num_sent += 1
                    if not push(piece):
                        await self._chunk(piece)
        finally:
            ticker.cancel()
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, failure: Failure, close: bool = False) -> None:
        """Sends the error as a complete answer, or as the last event if the stream has begun."""
        if self._started:
            if self._events is not None and self._events.failed is not None:
                await self._chunk(self._events.failed(failure))
            await self._send({"type": "http.response.body", "body": b""})
            return
        headers = {"connection": "close"} if close else {}
        await self.whole(Reply(failure_body(failure, self._shape), failure.status, headers={**failure.headers, **headers}))

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self._started = True
        if self.ignored:
            headers[IGNORED_HEADER] = ", ".join(self.ignored)
        pairs = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _chunk(self, piece: bytes) -> None:
        self._busy = True
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._busy = False

    async def _keep_alive(self, comment: bytes) -> None:
        """Sends comments in a silent stream, because proxies close silent connections."""
        quiet, seen = 0.0, self._num_sent
        while comment:
            await asyncio.sleep(KEEP_ALIVE_SECONDS / 3)
            quiet = quiet + KEEP_ALIVE_SECONDS / 3 if self._num_sent == seen else 0.0
            seen = self._num_sent
            if not self._busy and quiet >= KEEP_ALIVE_SECONDS:
                quiet = 0.0
                await self._chunk(comment)


def _no_push(piece: bytes) -> bool:
    return False


def openai_event_failure(failure: Failure) -> bytes:
    """An error inside a stream, in the form that OpenAI's clients recognise."""
    return event(failure_document(failure, Shape.OPENAI)) + DONE
