"""Two HTTP processes, one server: stored things and metrics are told by either; the vLLM prefix for dashboards."""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import Iterator

import pytest

from .served import Served


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, smollm2_path: pathlib.Path) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("two"), "--http-workers", "2", "--metrics-prefix", "vllm")
    try:
        server.wait()
        yield server
    finally:
        server.end()


@pytest.mark.xdist_group("api-server")
def test_either_process_tells_of_both(pair: Served) -> None:
    made, seen, end = [], set(), time.monotonic() + 60
    # A connection each: the kernel hands them to one process or the other, once both have started.
    while len(made) < 12 or (len(list(pair.folder.rglob("counter_*.db"))) < 2 and time.monotonic() < end):
        with pair.client() as client:
            answer = client.post("/v1/responses", json={"input": f"{len(made)}", "max_output_tokens": 2})
            assert answer.status_code == 200
            made.append(answer.json()["id"])
    for name in made[-12:]:
        with pair.client() as client:
            assert client.get(f"/v1/responses/{name}").json()["id"] == name
            text = client.get("/metrics").text
            seen.add(re.search(r'^vllm:generation_tokens_total{model_name="smollm2"} (\S+)', text, re.M)[1])  # type: ignore[index]
    (total,) = seen
    assert len(made) <= float(total) <= 2 * len(made)
    assert len(list(pair.folder.rglob("counter_*.db"))) == 2
