"""Two ranks behind one server: the tokens of one process, loopback alone between them, and neither outlives the other."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import pathlib
import signal

import pytest
from running_server import RunningServer, command_of, descendants, listening

from trireme import LLM, SamplingParams

PROMPTS = [[i + 1, 40, 7] for i in range(6)]
GREEDY = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}


def _ranks(server: RunningServer) -> list[int]:
    return [pid for pid in descendants(server.process.pid) if "trireme.worker.rank" in command_of(pid)]


@pytest.mark.xdist_group("serve-traffic")
def test_two_ranks_serve_as_one_process_does(tiny_path: pathlib.Path, short_folder: pathlib.Path) -> None:
    with LLM(str(tiny_path), backend="reference", kv_tokens=4096, max_model_len=1024) as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, SamplingParams(**GREEDY))]
    server = RunningServer(tiny_path, short_folder / "ranks", tp=2, kv_tokens=4096, max_model_len=1024)

    async def work() -> None:
        await server.until("ready")
        ranks = _ranks(server)
        assert len(ranks) == 2
        answers = await asyncio.gather(*(server.answer(prompt, **GREEDY) for prompt in PROMPTS))
        assert [answer["token_ids"] for answer in answers] == expected
        found = {place for pid in [server.process.pid, *descendants(server.process.pid)] for place in listening(pid)}
        assert found and all(ipaddress.ip_address(address).is_loopback for address, _ in found), found  # gloo's meeting points
        await server.until_idle()
        os.kill(ranks[1], signal.SIGKILL)
        await server.until("starting")
        assert not set(ranks) & set(_ranks(server)), "a rank outlived its group"

    try:
        asyncio.run(work())
    finally:
        server.end()
