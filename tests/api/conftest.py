"""One real server for all tests of the APIs; they run in one group so that it is started once."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from .served import KEYS, Served


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "served" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("api-server"))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2_path: pathlib.Path) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("srv"))
    try:
        server.wait()
        yield server
    finally:
        server.end()


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def sdk(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS[0], max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key=KEYS[0], max_retries=0, timeout=120) as client:
        yield client
