"""Bodies within bounds: what is counted and what is not, before anything is built from it; what a failure leaves in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from trireme.api.transport import http
from trireme.api.transport.failures import Failure, Shape
from trireme.api.transport.http import Call, Endpoint, Events, Reply, decode
from trireme.api.transport.tracing import Trace
from trireme.errors import Overloaded, TriremeError, Unavailable


def _nested(levels: int, inner: bytes = b"1") -> bytes:
    return b'{"a":' * levels + inner + b"}" * levels


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (_nested(http.MAX_DEPTH + 1), "deeper than"),
        (b"[" * 100_000, "deeper than"),
        (b"[" + b"[]," * http.MAX_OBJECTS + b"[]]", "objects and lists"),
        (b"[" + b"1," * (http.MAX_VALUES + 1) + b"1]", "values"),
        (b"[" + b'"a",' * (2 * http.MAX_VALUES + 1) + b'"a"]', "values"),
        (b"]" * 100 + b"[" * 100, "not valid JSON"),
        (b'{"a": "' + b"[" * 200, "deeper|not valid JSON"),
    ],
)
def test_too_much_is_refused(body: bytes, word: str) -> None:
    with pytest.raises(Failure, match=word) as caught:
        decode(body, dict)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "value",
    ["[" * 1000, "," * (http.MAX_VALUES + 5), '"[' * 1000, "\\[" * 1000, '\\"{' * 500, "a\\\\", "[1, 2]" * (http.MAX_OBJECTS // 2)],
)
def test_what_stands_in_strings_does_not_count(value: str) -> None:
    document = {"text": value, "rest": [[]] * 70}
    assert decode(msgspec.json.encode(document), dict) == document


def test_the_last_allowed_level_is_allowed() -> None:
    assert decode(_nested(http.MAX_DEPTH), dict) and decode(_nested(http.MAX_DEPTH - 1, b"[1]"), dict)


def test_large_bodies_leave_the_event_loop_free() -> None:
    body = b'{"prompt": "' + b"a" * (http.LARGE_BODY + 1) + b'"}'
    seen: list[int] = []

    async def work() -> None:
        async def tick() -> None:
            seen.append(1)

        ticking = asyncio.ensure_future(tick())
        call = Call(path="/", headers={}, body=body, path_params={}, query={}, request_id="r")
        assert len((await call.read(dict))["prompt"]) > http.LARGE_BODY
        await ticking

    asyncio.run(work())
    assert seen


def _exchange(error: Exception) -> int:
    """Status of the answer of a handler that raises `error`."""
    sent: list[dict[str, Any]] = []
    scope = {"method": "GET", "path": "/x", "headers": [], "query_string": b""}
    scope["state"] = {"request_id": "r", "tenant": "", "trace": Trace(""), "begun": 0.0}

    async def handler(call: Call) -> Reply:
        raise error

    async def work() -> None:
        messages = asyncio.Queue[dict[str, Any]]()
        messages.put_nowait({"type": "http.request", "body": b""})

        async def send(message: Any) -> None:
            sent.append(message)

        await Endpoint(handler, Shape.OPENAI, 1000)(scope, messages.get, send)

    asyncio.run(work())
    return sent[0]["status"]


@pytest.mark.parametrize("large", [False, True])
def test_what_would_find_no_place_is_not_read(large: bool) -> None:
    """No handler runs; a small body is let in, so that the connection can be used again, and a large one is not."""
    sent: list[dict[str, Any]] = []
    read = 0
    body = b"x" * (http.SMALL_BODY + large)
    scope = {"method": "POST", "path": "/x", "headers": [(b"content-length", str(len(body)).encode())], "query_string": b""}
    scope["state"] = {"request_id": "r", "tenant": "", "trace": Trace(""), "begun": 0.0}

    async def handler(call: Call) -> Reply:
        raise AssertionError("it was let in")

    def admit() -> None:
        raise Overloaded("64 requests are waiting already.", "try again later")

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += len(body)
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Endpoint(handler, Shape.OPENAI, 1 << 20, admit)(scope, receive, send))
    headers = dict(sent[0]["headers"])
    assert sent[0]["status"] == 503 and headers[b"retry-after"] in (b"1", b"2", b"3") and b"64 requests" in sent[1]["body"]
    assert (headers.get(b"connection") == b"close") == large and bool(read) == (not large)


def test_what_was_foreseen_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("trireme"), "propagate", True)
    for error, status in [(Overloaded("The queue is full.", "wait"), 503), (TriremeError("A worker died."), 500)]:
        caplog.clear()
        assert _exchange(error) == status
        (record,) = caplog.records
        assert record.levelname == "WARNING" and not record.exc_info and str(error) in record.getMessage()
    caplog.clear()
    assert _exchange(ZeroDivisionError("ours")) == 500
    assert caplog.records[0].levelname == "ERROR" and caplog.records[0].exc_info
    caplog.clear()
    assert _exchange(Failure(400, "theirs")) == 400 and not caplog.records
    assert _exchange(Unavailable("Shutting down.", "wait")) == 503 and not caplog.records  # the access log has its line


@pytest.mark.parametrize("comment", [b": still here\n\n", b""])
def test_a_silent_stream_gives_signs_of_life(comment: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a long prompt is read. Streams whose format has no comments stay silent."""
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.06)
    sent: list[bytes] = []

    async def slow() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.5)
        yield b"data: 1\n\n"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    sender = http._Sender(send, None, Shape.OPENAI, head=False)
    asyncio.run(sender.stream(Events(slow(), keep_alive=comment)))
    before = sent[1 : sent.index(b"data: 1\n\n")]
    assert set(before) == ({comment} if comment else set()) and sent[-1] == b""
