"""Routes for whoever operates the server: /admin/reload. The guard lets in only who has the admin key. Generates nothing."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated

import msgspec

from trireme.api.service import Service
from trireme.api.transport.http import Call, Reply, json_reply
from trireme.errors import BadRequest


class ReloadRequest(msgspec.Struct):
    path: str  # a folder or file on the server's machine, with weights of the same shape
    timeout: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0  # seconds that running answers get to finish


class Admin:
    """The handlers of the admin routes."""

    def __init__(self, service: Service):
        self.service = service

    async def reload(self, call: Call) -> Reply:
        """Replaces the weights while the server runs. New requests wait until that is done."""
        request = await call.read(ReloadRequest)
        begun = time.monotonic()
        if not pathlib.Path(request.path).exists():
            raise BadRequest(f"{request.path[:200]} is not there.", "give the path of a model on the server's machine", "path")
        version = await self.service.client.reload(request.path, request.timeout)
        return json_reply({"version": version, "path": request.path, "seconds": round(time.monotonic() - begun, 3)})
