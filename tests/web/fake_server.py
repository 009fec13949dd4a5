"""A server for the page alone: its real files under the real headers, answers from a script. Knows no model."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import mimetypes
import threading
import time
from typing import Any

import trireme
from trireme.api.app import _PAGE_HEADERS as PAGE_HEADERS
from trireme.api.app import WEB


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # a page's modules are asked for at once


class FakeServer:
    """Answers every chat with `answer` in pieces; `requests` keeps the bodies that came. `prefix`: the path a proxy gives it."""

    def __init__(self, key: str = "", prefix: str = ""):
        self.prefix = prefix
        self.models = [card("smollm2")]
        self.calls: list[tuple[str, str]] = []  # name and arguments of the tools that are called
        self.odds = False  # whether log-probabilities come, too
        self.comments = 0  # of comments before the first word, a tenth of a second apart
        self.finish = "stop"
        self.state = {"status": "ready", "phase": "", "percent": 100}
        self.answer, self.reasoning, self.key = "Hello.", "", key
        self.piece, self.pause = 7, 0.0
        self.failure: tuple[int, str] | None = None
        self.failure_code = ""
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.begun = time.monotonic()
        self.loads = 0
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}{self.prefix}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def load(self) -> dict[str, Any]:
        """Numbers that move as a busy server's do."""
        self.loads += 1
        n = self.loads
        wave = 0.5 + 0.5 * math.sin(n / 7)
        return {
            "state": "ready",
            "kv_usage": 0.2 + 0.5 * wave,
            "totals": {"requests": 3 * n},
            "stats": {
                "running": int(4 + 28 * wave),
                "waiting": int(9 * wave * wave),
                "pages_total": 1024,
                "pages_free": int(700 - 500 * wave),
                "preemptions": 2,
                "cache_queries": 1000 * n,
                "cache_hits": 630 * n,
                "steps": 40 * n,
                "tokens_scheduled": int(40 * n * 20 + 9000 * math.sin(n / 5)),
                "tokens_generated": int(780 * n + 900 * math.sin(n / 5)),
                "uptime": time.monotonic() - self.begun + 4000,
            },
            "percentiles": {
                "time_to_first_token": {"p50": 0.03 + 0.01 * wave, "p90": 0.06 + 0.02 * wave, "p99": 0.11 + 0.05 * wave},
                "inter_token_latency": {"p50": 0.011, "p90": 0.014 + 0.004 * wave, "p99": 0.021 + 0.01 * wave},
            },
        }


def card(name: str, **more: Any) -> dict[str, Any]:
    """A model as the server lists it."""
    sampling = {"temperature": 0.2, "top_p": 0.9}
    return {"id": name, "max_model_len": 8192, "sampling": sampling, "sampling_source": "calm", **more}


def _handler(fake: FakeServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if not path.startswith(fake.prefix):
                self._json({"error": {"message": "This is outside of the proxy's path."}}, 404)
                return
            path = path[len(fake.prefix) :]
            fake.paths.append(path)
            file = WEB / (path.lstrip("/") or "index.html")
            if file.is_file():
                kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
                self._send(200, file.read_bytes(), kind, PAGE_HEADERS)
            elif path == "/ready":
                self._json(fake.state)
            elif fake.key and self.headers.get("authorization") != f"Bearer {fake.key}":
                self._json({"error": {"message": "No valid API key came with the request."}}, 401)
            elif path == "/v1/models":
                self._json({"data": fake.models})
            elif path == "/version":
                self._json({"version": trireme.__version__})
            elif path == "/load":
                self._json(fake.load())
            else:
                self._json({"error": {"message": "There is nothing here."}}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fake.requests.append(body)
            if fake.failure:
                self._json({"error": {"message": fake.failure[1], "code": fake.failure_code}}, fake.failure[0])
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._stream()

        def _stream(self) -> None:
            for _ in range(fake.comments):
                self.wfile.write(b": still here\n\n")
                time.sleep(0.1)
            made = 0
            for name, text in (("reasoning_content", fake.reasoning), ("content", fake.answer)):
                for at in range(0, len(text), fake.piece):
                    made += 1
                    self._piece({name: text[at : at + fake.piece]}, made)
                    time.sleep(fake.pause)
            for index, (name, arguments) in enumerate(fake.calls):
                function = {"name": name, "arguments": arguments}
                self._piece(
                    {"tool_calls": [{"index": index, "id": f"call_{index}", "type": "function", "function": function}]}, made
                )
            finish = "tool_calls" if fake.calls else fake.finish
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
            self._event({"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": made}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _piece(self, delta: dict[str, Any], made: int) -> None:
            choice: dict[str, Any] = {"index": 0, "delta": delta}
            if fake.odds and "content" in delta:
                others = [{"token": delta["content"], "logprob": -0.1}, {"token": " other", "logprob": -2.5}]
                choice["logprobs"] = {"content": [{"token": delta["content"], "logprob": -0.1, "top_logprobs": others}]}
            self._event({"choices": [choice], "usage": {"prompt_tokens": 21, "completion_tokens": made}})

        def _event(self, document: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")
            self.wfile.flush()

        def _json(self, document: dict[str, Any], status: int = 200) -> None:
            self._send(status, json.dumps(document).encode(), "application/json", {})

        def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the tests say what they saw."""

    return Handler
