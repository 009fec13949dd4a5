"""The tiny model that most server tests serve, and short folders for its sockets."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from tiny_server_model import write_tiny


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def short_folder() -> Iterator[pathlib.Path]:
    """A folder whose name leaves room for sockets: their paths end at 107 bytes."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tri-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
