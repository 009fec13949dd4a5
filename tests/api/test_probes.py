"""The probes tell the truth in every state: who waits, who is hung, how far a start is."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from trireme.api.operation.probes import Probes
from trireme.api.transport.http import Call, Reply
from trireme.serve.client import State


class _Client:
    def __init__(self, state: State):
        self._state = state

    def state(self) -> State:
        return self._state


class _Service:
    def __init__(self, state: State):
        self.client = _Client(state)


def _asked(route: str, state: State) -> tuple[Reply, dict[str, Any]]:
    probes = Probes(_Service(state), None)  # type: ignore[arg-type]  # no conversation is rendered here
    call = Call(path=f"/{route}", headers={}, body=b"", path_params={}, query={}, request_id="r")
    reply = asyncio.run(getattr(probes, route)(call))
    return reply, msgspec.json.decode(reply.body)


@pytest.mark.parametrize(
    ("state", "live", "ready"),
    [
        (State("ready", percent=100.0), 200, 200),
        (State("sleeping", percent=100.0), 200, 200),
        (State("starting", "weights", 40.0), 200, 503),
        (State("draining", percent=100.0), 200, 503),
        (State("failed", reason="A worker was killed."), 200, 503),
        (State("failed", reason="A process gives no sign of life.", hung=True), 503, 503),
        (State("ready", percent=100.0, hung=True), 503, 503),
    ],
)
def test_probes_in_every_state(state: State, live: int, ready: int) -> None:
    reply, document = _asked("live", state)
    assert reply.status == live and document["state"] == state.name
    reply, document = _asked("ready", state)
    assert (
        reply.status == ready
        and document["status"] == state.name
        and document["percent"] == state.percent
        and document.get("reason", "") == state.reason
    )
    assert ("retry-after" in reply.headers) == (ready == 503)
