"""What the service hands to the engine: a salt of bounded length, a priority only where the server allows one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trireme.api.service import Service
from trireme.api.transport.http import Call
from trireme.config import resolve
from trireme.errors import BadRequest
from trireme.serve.answers import Answer
from trireme.serve.client import Context, ModelInfo
from trireme.types import SamplingParams


class RecordingClient:
    """Takes every request, and remembers how it was asked."""

    def __init__(self) -> None:
        self.info = ModelInfo("tiny", "/nowhere", 0, max_model_len=64, vocab_size=100)
        self.asked: list[dict[str, Any]] = []

    async def open(self, tokens: list[int], sampling: SamplingParams, **how: Any) -> Any:
        self.asked.append(how)
        return self

    answer = Answer("r", None, [1], SamplingParams())
    was_lost, watch = False, None

    def leave(self) -> None:
        pass


def _asked(tenant: str = "", settings: dict[str, Any] | None = None, **how: Any) -> dict[str, Any]:
    client = RecordingClient()

    async def work() -> None:
        config = resolve(settings or {}, environ={})
        service = Service(Context(client, config.serve, config))  # type: ignore[arg-type]
        call = Call("/", {}, b"", {}, {}, "r", tenant)
        async with call.exits:
            await service.open(call, [1], SamplingParams(max_tokens=1), **how)
        service.close()

    asyncio.run(work())
    return client.asked[0]


def test_a_salt_is_hashed_and_bounded() -> None:
    salts = {(tenant, salt): _asked(tenant, salt=salt)["salt"] for tenant in ("", "a", "b") for salt in (None, "x", "y" * 256)}
    assert salts.pop(("", None)) == ""
    assert len(set(salts.values())) == len(salts) and {len(salt) for salt in salts.values()} == {32}
    with pytest.raises(BadRequest, match="257 characters") as caught:
        _asked(salt="y" * 257)
    assert caught.value.param == "cache_salt"


def test_priority_counts_only_where_it_is_allowed() -> None:
    assert _asked(priority=-1000)["priority"] == 0
    assert _asked(priority=-1000, settings={"allow_priority": True})["priority"] == -1000
