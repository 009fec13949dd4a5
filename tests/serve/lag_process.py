"""An HTTP process that tells how long its event loop was held up: the real application, and GET /lag.

/lag answers with the longest hold-up in seconds since it was last asked. /open, /state and /stats are those of the other tests.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from tests.serve import http_process
from trireme.api import app
from trireme.serve.client import Context
from trireme.serve.http import serve_http

TICK = 0.002


class Probe:
    """Wakes every few milliseconds and notes how much later than asked."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(TICK)
            self.worst = max(self.worst, time.perf_counter() - begun - TICK)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        worst, self.worst = self.worst, 0.0
        body = msgspec.json.encode(worst)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})


def create_app(context: Context) -> Any:
    real, plain, probe = app.create_app(context), http_process.create_app(context), Probe()
    paths = {"/lag": probe, "/open": plain, "/state": plain, "/stats": plain}

    async def either(scope: Any, receive: Any, send: Any) -> None:
        await paths.get(scope.get("path"), real)(scope, receive, send)

    return either


if __name__ == "__main__":
    serve_http(create_app)
