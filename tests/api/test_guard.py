"""The gate: keys on every route, Host and Origin, bounds on headers and bodies, ids, what the log holds; clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.util
import json
import re
import socket
import threading
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from tests.serve.running_server import descendants, listening
from trireme.api.transport.guard import Guard
from trireme.api.transport.tracing import Tracer
from trireme.config import ServeOptions
from trireme.errors import BadConfig

from .served import KEYS, Served

OPEN = {"/health", "/live", "/ready", "/"}  # the last is the page; POST there needs a key
SECRET = "a-very-secret-word-3141"


def raw(served: Served, request: bytes, until: bytes | None = None) -> bytes:
    """What the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while True:
            got = connection.recv(65536)
            answer += got
            if not got or (until and until in answer):
                return answer


def test_every_route_needs_a_key(served: Served, http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    tried = 0
    for path in [*paths, "/openapi.json", "/nowhere", "/docs", "/admin"]:
        plain = path.replace("{model}", "smollm2").replace("{id}", "file-" + "0" * 32)
        tricks = [plain, f"/{plain}", f"{plain}/", plain.upper(), f"/.{plain}", f"/x/..{plain}", f"{plain}?api_key={KEYS[0]}"]
        tricks += [f"{plain}%2f", f"{plain};a", f"{plain}%00", plain.replace("v1", "%761"), plain.replace("/", "\\")]
        for trick in tricks:
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
                connection = HTTPConnection("127.0.0.1", served.port, timeout=30)  # sends a path as it is
                connection.request(method, trick, body=b"{}")
                code = connection.getresponse().status
                connection.close()
                tried += 1
                is_open = trick.split("?")[0] in OPEN and method in ("GET", "HEAD")
                closed = 403 if unquote(trick).startswith("/admin/") else 401  # the server was given no key for these
                assert code == (200 if is_open else closed) or (code == 400 and "\\" in trick), (method, trick, code)
    assert tried > 2000


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {KEYS[0]}x"},
        {"x-api-key": ""},
        {"x-api-key": KEYS[0][:-1]},
        {"authorization": f"Bearer {','.join(KEYS)}"},
    ],
)
def test_wrong_keys(served: Served, headers: dict[str, str]) -> None:
    response = httpx.get(f"{served.url}/v1/models", headers=headers)
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("given", [*KEYS, "", "k", KEYS[0][:-1], KEYS[0] + "x", "X" + KEYS[0][1:], "z" * 10_000])
def test_keys_are_compared_in_constant_time(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is compared, whichever fits, by a function that never stops early, on digests: no length, no beginning shows."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def noted(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr("trireme.api.transport.guard.hmac.compare_digest", noted)
    reached: list[str] = []
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message.get("status", 0))

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    guard = Guard(app, ServeOptions(api_key=KEYS), frozenset(), Tracer(""))
    headers = [(b"authorization", f"Bearer {given}".encode()), (b"host", b"localhost")]
    asyncio.run(guard({"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}, receive, send))
    assert (reached, sent[:1]) == ((["/v1/models"], []) if given in KEYS else ([], [401]))
    assert len(compared) == len(KEYS) and {len(part) for pair in compared for part in pair} == {hashlib.sha256().digest_size}


def test_right_keys(served: Served) -> None:
    for key in KEYS:
        assert httpx.get(f"{served.url}/v1/models", headers={"authorization": f"bearer {key}"}).status_code == 200
        assert httpx.get(f"{served.url}/v1/models", headers={"x-api-key": key}).status_code == 200


def test_huge_headers_and_bodies(served: Served, http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"x-long": "a" * 40_000}).status_code == 431
    key = f"authorization: Bearer {KEYS[0]}\r\nhost: localhost\r\n".encode()
    declared = raw(served, b"POST /v1/completions HTTP/1.1\r\n" + key + b"content-length: 99999999999\r\n\r\n")
    assert declared.startswith(b"HTTP/1.1 413")
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + key + b"transfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(40):
                connection.sendall(chunk)
            answer = connection.recv(100)
        except OSError:
            return  # cut off, which is an answer too
        assert answer.startswith(b"HTTP/1.1 413")


def test_nothing_listens_but_the_api(served: Served) -> None:
    processes = [served.process.pid, *descendants(served.process.pid)]
    assert len(processes) >= 5, "supervisor, router, detokenizer, HTTP, rank"
    assert {place for pid in processes for place in listening(pid)} == {("127.0.0.1", served.port)}


def test_request_ids_and_traces_are_carried(served: Served, http: httpx.Client) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"x-request-id": "my-own-id", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    response = http.get("/v1/models", headers=headers)
    assert response.headers["x-request-id"] == "my-own-id"
    line = json.loads(served.logged("my-own-id"))
    assert (line["trace_id"], line["status"], line["path"]) == (trace, 200, "/v1/models")
    made = http.get("/v1/models", headers={"x-request-id": "bad\tid"}).headers["x-request-id"]
    assert re.fullmatch(r"req-[0-9a-f]{24}", made)


def test_the_log_and_the_errors_tell_no_secrets(served: Served, http: httpx.Client) -> None:
    talk = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
    answers = [
        http.post("/v1/chat/completions", json=talk),
        http.post("/v1/chat/completions", json={**talk, "temperature": "x"}),
        http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 1}),
        http.post(f"/v1/completions?q={SECRET}", content=b"{broken"),
        httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {SECRET}"}),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 200, 400, 401]
    for answer in answers:
        assert not re.search(r"0x[0-9a-f]{6,}|/site-packages/|Traceback|\.py\b", answer.text)
        served.logged(answer.headers["x-request-id"])
    assert SECRET not in served.log
    assert not any(key in served.log for key in KEYS)


LONG_ANSWERS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/generate", "/generate"]


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", LONG_ANSWERS)
def test_a_client_that_leaves_ends_its_request(served: Served, path: str, stream: bool) -> None:
    # every API's own names of the same wish; greedy, for some have no ignore_eos and a sampled answer may end after two tokens
    ask = "Write a long story about a ship, its captain and the storm that they met."
    long = {"model": "smollm2", "stream": stream, "temperature": 0, "max_tokens": 7000, "ignore_eos": True}
    long |= {"/v1/responses": {"input": ask}, "/generate": {"inputs": ask}}.get(path, {"prompt": ask})
    long |= {"messages": [{"role": "user", "content": ask}]}
    long |= {"options": {"num_predict": 7000, "temperature": 0}, "parameters": {"max_new_tokens": 7000, "ignore_eos": True}}
    body = json.dumps(long).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[0]}\r\ncontent-length: {len(body)}\r\n\r\n"
    before = served.until_idle()["tokens_generated"]
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: served.stats()["tokens_generated"] > before + 2)
    after = served.until_idle()
    assert after["tokens_generated"] < before + 2000


def test_the_loop_goes_on_while_a_long_text_is_tokenized(served: Served) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 40_000
    ended = threading.Event()

    def tokenize() -> None:
        with served.client() as client:
            assert client.post("/tokenize", json={"prompt": text}).json()["count"] > 300_000
        ended.set()

    thread = threading.Thread(target=tokenize)
    answered = 0
    with served.client() as client:
        thread.start()
        while not ended.is_set():
            assert client.get("/live").status_code == 200
            answered += not ended.is_set()
    thread.join()
    assert answered >= 5


def test_traces_need_their_packages_or_work() -> None:
    if importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.sdk"):
        pytest.skip("OpenTelemetry is installed")
    with pytest.raises(BadConfig, match="pip install"):
        Tracer("http://127.0.0.1:4318/v1/traces")


# --- without keys: Host and Origin, in this process ------------------------------------------------------------------------------


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


def status(options: ServeOptions, headers: dict[str, str], method: str = "GET") -> httpx.Response:
    async def ask() -> httpx.Response:
        guard = Guard(_nothing, options, frozenset(), Tracer())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost:8000") as client:
            return await client.request(method, "/v1/models", headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("page.localhost", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:8000", 421),
        ("", 421),
        ("known.example", 200),
    ],
)
def test_only_own_host_names(host: str, code: int) -> None:
    assert status(ServeOptions(allowed_host=("known.example",)), {"host": host}).status_code == code


def test_other_origins_stay_out_unless_named() -> None:
    closed, opened = ServeOptions(), ServeOptions(cors_origin=("https://app.example",))
    assert status(closed, {"origin": "https://app.example"}).status_code == 403
    assert status(closed, {"origin": "null"}).status_code == 403
    assert status(closed, {"origin": "http://localhost:8000"}).status_code == 200
    allowed = status(opened, {"origin": "https://app.example"})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert status(opened, {"origin": "https://other.example"}).status_code == 403
    preflight = status(opened, {"origin": "https://app.example", "access-control-request-method": "POST"}, "OPTIONS")
    assert preflight.status_code == 204 and "POST" in preflight.headers["access-control-allow-methods"]
    assert "access-control-allow-origin" not in status(closed, {}).headers
