"""Kernel tests run on a GPU where there is one and under Triton's interpreter elsewhere."""

from __future__ import annotations

import os
import pathlib

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    import swift

    swift.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--public-launcher", action="store_true", help="start kernels as with a release of Triton that was never tried"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--public-launcher", default=False):
        from trireme.kernels import launch

        launch.TRIED = ("none",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def cache_of_kernels(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _own_cache_of_kernels(cache_of_kernels: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has tuned decides nothing here. Set for these tests alone: all others share the user's cache of models."""
    monkeypatch.setenv("TRIREME_CACHE", os.environ.get("TRIREME_CACHE") or str(cache_of_kernels))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def ours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our products even where torch's are faster and the library leaves them to it: ours are what is tested."""
    from trireme.kernels.aten.products import matmul

    monkeypatch.setattr(matmul, "OURS_ONLY", True)
