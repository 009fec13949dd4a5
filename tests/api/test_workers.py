"""Two HTTP processes, one server: stored things and metrics are told by either; the vLLM prefix for dashboards."""

from __future__ import annotations

import pathlib
import re
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
    made, seen = [], set()
    for number in range(12):  # a connection each: the kernel hands them to one process or the other
        with pair.client() as client:
            answer = client.post("/v1/responses", json={"input": f"{number}", "max_output_tokens": 2})
            assert answer.status_code == 200
            made.append(answer.json()["id"])
    for name in made:
        with pair.client() as client:
            assert client.get(f"/v1/responses/{name}").json()["id"] == name
            text = client.get("/metrics").text
            seen.add(re.search(r'^vllm:generation_tokens_total{model_name="smollm2"} (\S+)', text, re.M)[1])  # type: ignore[index]
    (total,) = seen
    assert 12 <= float(total) <= 24
    assert len(list(pair.folder.rglob("counter_*.db"))) == 2
