"""The client without the processes behind it: a request that never leaves holds nothing; states are told in percent."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

from trireme.config import resolve
from trireme.errors import BadRequest, Overloaded, Unavailable
from trireme.ipc.messages import Ready
from trireme.ipc.serving import Abort, Begin, Crowd, Gain, Said, Standing, Submit, Taken
from trireme.serve.client import Client
from trireme.types import FinishReason, SamplingParams

READY = Ready(8, 16, 128, 100, True, 1, "fake", "float32", 1, 1)


class BrokenChannel:
    def post(self, message: Any) -> None:
        raise OverflowError("too large to be written")


class TakingChannel:
    """Takes every submission as the router does, and keeps what was posted."""

    def __init__(self, client: Client):
        self.client, self.posted = client, list[Any]()

    def post(self, message: Any) -> None:
        self.posted.append(message)
        if isinstance(message, Submit):
            self.client._heard(Taken(message.requests[0].id))


def _client(path: pathlib.Path) -> Client:
    begin = Begin("http-0.1", {}, str(path), "tiny", "/nowhere")
    return Client(begin, resolve({"model": str(path)}, environ={}), None)


def test_a_submission_that_cannot_be_written_leaves_nothing_behind(tiny_path: pathlib.Path) -> None:
    async def work() -> None:
        client = _client(tiny_path)
        client.stand(Standing("ready", ready=READY))
        client._detokenizer = object()  # type: ignore[assignment]
        client._router = BrokenChannel()  # type: ignore[assignment]
        with pytest.raises(OverflowError):
            await client.open([1, 2], SamplingParams(), request_id="r")
        assert client.num_open == 0

    asyncio.run(work())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_nobody_reads_is_cut_only_where_it_is_a_stream(streamed: bool, tiny_path: pathlib.Path) -> None:
    """One that is sent whole waits until its end, however much of it comes at once."""

    async def work() -> None:
        client = _client(tiny_path)
        client.stand(Standing("ready", ready=READY))
        client._detokenizer = object()  # type: ignore[assignment]
        channel = client._router = TakingChannel(client)  # type: ignore[assignment]
        stream = await client.open([1, 2], SamplingParams(max_tokens=100), request_id="r", streamed=streamed)
        (submit,) = channel.posted  # type: ignore[attr-defined]
        most, text = client._backlog, "x" * 100_000
        gains = [Gain(id=submit.requests[0].id, text=text, tokens=[5]) for _ in range(2 * most // len(text))]
        gains[-1].finish = FinishReason.LENGTH
        client._heard(Said(gains))
        if streamed:
            with pytest.raises(BadRequest, match="read faster"):
                _ = [piece async for piece in stream]
            assert isinstance(channel.posted[1], Abort)  # type: ignore[attr-defined]
        else:
            assert sum([len(piece.text) async for piece in stream]) == len(gains) * len(text) > most
        assert client.num_open == 0

    asyncio.run(work())


def test_percent_tells_of_the_start_and_is_a_hundred_after_it(tiny_path: pathlib.Path) -> None:
    async def work() -> None:
        client = _client(tiny_path)
        client._router = client._detokenizer = object()  # type: ignore[assignment]
        client.stand(Standing("starting", "weights", 0.4))
        assert client.state().percent == pytest.approx(40.0)
        with pytest.raises(Unavailable, match="weights, 40 %"):
            await client.open([1], SamplingParams(), request_id="r")
        for name in ("ready", "sleeping", "draining"):
            client.stand(Standing(name, ready=READY))
            assert client.state().percent == 100.0

    asyncio.run(work())


def test_a_full_queue_is_known_without_asking(tiny_path: pathlib.Path) -> None:
    async def work() -> None:
        client = _client(tiny_path)
        client.stand(Standing("ready", ready=READY))
        client._router = client._detokenizer = object()  # type: ignore[assignment]  # whatever is posted there raises
        client.check_open()
        client._heard(Crowd(64, True))
        with pytest.raises(Overloaded, match="64 requests are waiting"):
            await client.open([1, 2], SamplingParams(), request_id="r")
        client._heard(Crowd(63, False))
        client.check_open()

    asyncio.run(work())
