"""The gate before every route: header bounds, Host and Origin checks, API keys, request ids, the access log.

Knows ASGI and the serve options; nothing of what lies behind. What is not on its list of open paths needs a key.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import secrets
import time
import urllib.parse
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trireme.api.transport.failures import Failure, failure_body, shape_of_path
from trireme.api.transport.proxies import Proxies
from trireme.api.transport.tracing import Tracer
from trireme.config import ServeOptions
from trireme.serve.keys import ApiKey, KeyRing, digest_of, retry_after
from trireme.serve.patience import PUSH

MAX_HEADERS = 32 << 10  # bytes of all headers together
ADMIN = "/admin/"  # paths with this beginning need the admin key
PROBES = frozenset({"/health", "/live", "/ready"})
# Monitoring reads these every second or so, so they are logged at debug, like the probes.
LOOKED_AT = frozenset({"/metrics", "/load"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")

access = logging.getLogger("trireme.access")

Count = Callable[[str, int], None]  # counts an answer by its route and status


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, options: ServeOptions, open_paths: frozenset[str], tracer: Tracer, count: Count | None = None):
        self.app, self.options, self.tracer, self._count = app, options, tracer, count
        self._page, self._keys = open_paths, KeyRing(options)
        self._proxies = Proxies(options.trusted_proxy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # the server has no websockets
        scope = _without_root(scope, self.options.root_path)
        headers = {name.lower(): value for name, value in scope["headers"]}
        exchange = _Exchange(scope, headers, send, self._proxies.client(scope, headers))
        scope["state"] = {**scope.get("state", {}), "request_id": exchange.request_id, "tenant": "", "begun": exchange.begun}
        if exchange.pushes:
            scope["state"]["push"] = exchange.push
        exchange.extra = self._cors_headers(headers)
        with self.tracer.span(headers, scope) as trace:
            scope["state"]["trace"] = trace
            try:
                self._check(scope, headers)
                if scope["method"] == "OPTIONS" and exchange.extra:
                    await exchange.preflight()
                else:
                    await self.app(scope, receive, exchange.send)
            except Failure as failure:
                await exchange.fail(failure)
            finally:
                trace.finish(exchange.status)
                exchange.log(trace.trace_id)
                if self._count is not None:
                    self._count(scope["state"].get("route", "other"), exchange.final_status)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            raise Failure(431, f"The headers are larger than {MAX_HEADERS} bytes.", code="headers_too_large")
        self._check_host(headers)
        reads = scope["method"] in ("GET", "HEAD")
        # The page's files are the same for everybody. Browsers send Origin when they load the page's modules.
        page = scope["path"] in self._page and reads
        if not page:
            self._check_origin(headers)
        preflight = scope["method"] == "OPTIONS" and self._known_origin(headers)
        is_open = page or (scope["path"] in PROBES and reads)
        if scope["path"].startswith(ADMIN):
            self._check_admin(headers)
            return
        if not self._keys or is_open or preflight:
            return
        key = self._key(headers)
        scope["state"] |= {"tenant": key.tenant, "key": key.name, "models": key.models}
        if key.models and not set(key.models) & set(self.options.served_model_name):
            raise Failure(403, "This key may use no model that is served here.", kind="permission_error", code="model_denied")
        if not reads and (seconds := retry_after(key)):
            raise Failure(
                429,
                f"This key has had its {key.per_minute} requests of the minute. Fix: send this again in {seconds} s.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"retry-after": str(seconds)},
            )

    def _check_admin(self, headers: dict[bytes, bytes]) -> None:
        """Refuses the request unless the server has an admin key and the request has the same. Other API keys do not count."""
        if not self.options.admin_key:
            cause = "This server takes no admin requests. Fix: start it with --admin-key, and send that key."
            raise Failure(403, cause, kind="permission_error", code="admin_denied")
        if not hmac.compare_digest(_given(headers), digest_of(self.options.admin_key.encode())):
            raise _unauthorized("No valid admin key came with the request. Fix: send `Authorization: Bearer ADMIN_KEY`.")

    def _key(self, headers: dict[bytes, bytes]) -> ApiKey:
        """The key that was sent. Raises a 401 if it is missing or wrong."""
        key = self._keys.find(_given(headers))
        if key is None:
            raise _unauthorized("No valid API key came with the request. Fix: send `Authorization: Bearer KEY`.")
        return key

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Checks Host if the server has no key: an attacker's domain may resolve to this address, so only known names pass."""
        if self._keys or self.options.uds:
            return
        host = _host_of(headers.get(b"host", b"").decode("latin-1"))
        allowed = {self.options.host, "localhost", *self.options.allowed_host}
        if host in allowed or host.endswith(".localhost") or _is_address(host):
            return
        raise Failure(421, f"This server does not answer for the host {host[:80]!r}. Fix: start it with --allowed-host, or a key.")

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        """Refuses requests that a page of another site makes a browser send."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not origin or self._known_origin(headers):
            return
        if urllib.parse.urlsplit(origin).netloc != headers.get(b"host", b"").decode("latin-1"):
            cause = "Pages of other origins may not call this server."
            raise Failure(403, f"{cause} Fix: start it with --cors-origin; a proxy must pass on Host.")

    def _known_origin(self, headers: dict[bytes, bytes]) -> bool:
        origin = headers.get(b"origin", b"").decode("latin-1")
        return bool(origin) and (origin in self.options.cors_origin or "*" in self.options.cors_origin)

    def _cors_headers(self, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        if not self._known_origin(headers):
            return []
        return [(b"access-control-allow-origin", headers[b"origin"]), (b"vary", b"origin")]


class _Exchange:
    """One exchange, as the access log records it. Bodies, query strings and keys are never recorded."""

    def __init__(self, scope: Scope, headers: dict[bytes, bytes], send: Send, client: str | None):
        self._scope, self._send, self._client = scope, send, client
        self._push: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(PUSH)
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        self.begun = time.monotonic()
        self.status, self.sent, self.first = 0, 0, 0.0
        self.extra: list[tuple[bytes, bytes]] = []
        self._anthropic = b"anthropic-version" in headers or scope["path"].startswith("/v1/messages")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            marks = [(b"x-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff")]
            if self._anthropic:  # Anthropic's SDKs read the id from this header
                marks.append((b"request-id", self.request_id.encode()))
            message = {**message, "headers": [*message.get("headers", []), *marks, *self.extra]}
        elif message["type"] == "http.response.body":
            self.first = self.first or time.monotonic()
            self.sent += len(message.get("body", b""))
        await self._send(message)

    @property
    def final_status(self) -> int:
        """The status for the log: 499 if the client left before the end."""
        return 499 if self._scope["state"].get("disconnected") else self.status

    @property
    def pushes(self) -> bool:
        return self._push is not None

    def push(self, body: bytes) -> bool:
        """Writes a piece of a started stream past all ASGI layers. Returns False if that is not possible now."""
        assert self._push is not None
        if not self._push(body):
            return False
        self.first = self.first or time.monotonic()
        self.sent += len(body)
        return True

    async def fail(self, failure: Failure) -> None:
        body = failure_body(failure, shape_of_path(self._scope["path"]))
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **failure.headers}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": failure.status, "headers": pairs})
        await self.send({"type": "http.response.body", "body": body if self._scope["method"] != "HEAD" else b""})

    async def preflight(self) -> None:
        allowed = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (
                b"access-control-allow-headers",
                b"authorization, content-type, x-api-key, x-request-id, traceparent, anthropic-version",
            ),
            (b"access-control-max-age", b"600"),
        ]
        await self.send({"type": "http.response.start", "status": 204, "headers": allowed})
        await self.send({"type": "http.response.body", "body": b""})

    def log(self, trace_id: str) -> None:
        now = time.monotonic()
        quiet = self._scope["path"] in PROBES | LOOKED_AT
        access.log(
            logging.DEBUG if quiet else logging.INFO,
            "request",
            extra={
                "request_id": self.request_id,
                "trace_id": trace_id,
                "method": self._scope["method"],
                "path": self._scope["path"][:200],
                "status": self.final_status,
                "failure": self._scope["state"].get("failure"),
                "bytes": self.sent,
                "seconds": round(now - self.begun, 4),
                "first_byte": round(self.first - self.begun, 4) if self.first else None,
                "client": self._client,
                "key": self._scope["state"].get("key") or None,
            },
        )


def _given(headers: dict[bytes, bytes]) -> bytes:
    """The digest of the key that was sent."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return digest_of(token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b""))


def _unauthorized(message: str) -> Failure:
    bearer = {"www-authenticate": "Bearer"}
    return Failure(401, message, kind="authentication_error", code="invalid_api_key", headers=bearer)


def _without_root(scope: Scope, root: str) -> Scope:
    """The scope with the path that the routes expect. A proxy may or may not have removed --root-path already."""
    if root and scope["path"].startswith(f"{root}/"):
        return {**scope, "path": scope["path"][len(root) :]}
    return scope


def _host_of(header: str) -> str:
    """The Host header without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if header.rpartition(":")[2].isdigit() and ":" in header else header.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
