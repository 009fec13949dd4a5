"""`bench serve`: workloads are what they say, the pace is kept, figures add up; driven against a server of known answers."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pathlib
import statistics

import pytest

from trireme.bench import serve
from trireme.bench.flags import serve_flags
from trireme.bench.load import Load, Pace, Sample, Shape, asks_of
from trireme.bench.sse import RequestFailed, Server
from trireme.errors import BadConfig


async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Three chunks of text and the usage, in HTTP chunks that cut events anywhere; a prompt with `fail` is refused."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.startswith(b"GET"):
        body = b'{"data": [{"id": "echo"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    else:
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked = json.loads(await reader.readexactly(length))
        if "fail" in asked["prompt"]:
            writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": asked["max_tokens"]}
            lines = [{"choices": [{"text": f"w{i} "}]} for i in range(3)] + [{"choices": [], "usage": usage}]
            data = b"".join(b"data: %b\n\n" % json.dumps(line).encode() for line in lines) + b"data: [DONE]\n\n"
            for start in range(0, len(data), 37):
                piece = data[start : start + 37]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


def with_server(action):
    async def run():
        server = await asyncio.start_server(answering, "127.0.0.1", 0)
        async with server:
            return await action(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    return asyncio.run(run())


def test_a_request_is_timed_and_counted() -> None:
    sample = with_server(lambda url: Load(Server(url), "echo").ask("a b c", 9))
    assert (sample.error, sample.text, sample.prompt_tokens, sample.output_tokens) == (None, "w0 w1 w2 ", 3, 9)
    assert 0 < sample.first <= sample.whole and len(sample.gaps) == 2


def test_events_carry_the_time_of_their_last_byte() -> None:
    """Two events whose bytes come in three pieces, cut within an HTTP chunk's frame and within an event."""

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        events = [b"data: one\n\n", b"data: two\n\n"]
        raw = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        raw += b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
        first, second = raw.index(b"one") + 1, raw.index(b"two") - 9
        for piece in (raw[:first], raw[first:second], raw[second:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.close()

    async def run() -> tuple[list[tuple[float, bytes]], list[float]]:
        server = await asyncio.start_server(slowly, "127.0.0.1", 0)
        async with server:
            answer = await Server(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").post("/", b"")
            return answer.events(), answer.times

    events, times = asyncio.run(run())
    assert [data for _, data in events] == [b"one", b"two"]
    assert [when for when, _ in events] == [times[1], times[2]]


def test_an_answer_that_breaks_off_is_a_failure() -> None:
    async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\ndata: one\n\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(breaking, "127.0.0.1", 0)
        async with server:
            await Server(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").post("/", b"")

    with pytest.raises(RequestFailed, match="mid-answer"):
        asyncio.run(run())


def test_failures_are_samples_too() -> None:
    refused = with_server(lambda url: Load(Server(url), "echo").ask("fail", 9))
    assert refused.error is not None and "503" in refused.error
    unreachable = asyncio.run(Load(Server("http://127.0.0.1:1"), "echo").ask("x", 1))
    assert unreachable.error is not None and "connect" in unreachable.error
    with pytest.raises(BadConfig):
        Server("ftp://x")


def test_conversations_grow() -> None:
    shape = Shape(requests=6, turns=3, prompt_tokens=2)
    samples, _ = with_server(lambda url: Load(Server(url), "echo").run(asks_of("multiturn", shape), Pace(concurrency=2)))
    assert sorted(sample.prompt_tokens for sample in samples) == [2, 2, 7, 7, 12, 12]


def test_workloads() -> None:
    assert {len(ask.prompt.split()) for ask in asks_of("random", Shape(requests=5, prompt_tokens=7))} == {7}
    shared = asks_of("prefix", Shape(requests=8, prefix_tokens=20, groups=2, prompt_tokens=3))
    assert len({" ".join(ask.prompt.split()[:20]) for ask in shared}) == 2 and len({ask.prompt for ask in shared}) == 8
    real = asks_of("sharegpt", Shape(requests=200, max_tokens=1000))
    assert len({ask.output_tokens for ask in real}) > 50
    assert all(len(ask.prompt.split()) + ask.output_tokens <= 1000 for ask in real)
    with pytest.raises(BadConfig):
        asks_of("other", Shape())


def test_open_loop_keeps_its_rate() -> None:
    times = Pace(rate=10.0).times(5000)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1) and statistics.stdev(gaps) == pytest.approx(0.1, rel=0.15)
    assert Pace().times(3) == [0.0, 0.0, 0.0]


def test_figures() -> None:
    samples = [
        Sample(0.0, first=0.1 * i, whole=0.1 * i + 0.9, gaps=[0.1] * 9, prompt_tokens=5, output_tokens=10) for i in range(1, 5)
    ]
    found = serve.figures([*samples, Sample(0.0, error="lost")], 2.0, {"ttft": 0.25})
    assert (found["requests"], found["failed"], found["errors"]) == (5, 1, ["lost"])
    assert (found["output_tokens_per_second"], found["total_tokens_per_second"], found["requests_per_second"]) == (20, 30, 2)
    assert (found["goodput"], found["good_share"]) == (1.0, 0.4)
    assert found["ttft_ms"]["p50"] == pytest.approx(300) and found["tpot_ms"]["p99"] == pytest.approx(100)


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    serve_flags(parser)

    async def go(url: str) -> int:
        arguments = [
            "--url",
            url,
            "--requests",
            "6",
            "--concurrency",
            "1",
            "3",
            "--goodput",
            "ttft:9999",
            "--json",
            str(tmp_path / "o.json"),
        ]
        return await asyncio.to_thread(serve.run, parser.parse_args([*arguments, "--plot", str(tmp_path / "o.png")]))

    assert with_server(go) == 0
    assert "TTFT p99, ms" in capsys.readouterr().out
    results = json.loads((tmp_path / "o.json").read_text())
    assert [result["concurrency"] for result in results] == [1, 3] and (tmp_path / "o.png").stat().st_size > 1000


def test_columns_say_how_requests_were_sent() -> None:
    assert serve._paced({"concurrency": 8, "rate": "inf"}) == "8 at once"
    assert serve._paced({"concurrency": 0, "rate": "inf"}) == "all at once"
    assert serve._paced({"concurrency": 4, "rate": "2.5"}) == "2.5 per second, at most 4"


def test_errors_are_told() -> None:
    with pytest.raises(RequestFailed):
        asyncio.run(Server("http://127.0.0.1:1").get("/v1/models"))
    with pytest.raises(BadConfig):
        serve._bounds(["ttft"])
