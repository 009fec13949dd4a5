"""axe-core, the checker of web pages for accessibility: fetched once from npm, pinned; tests skip where it cannot be had."""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import tarfile
import tempfile
from typing import Any

import pytest

VERSION = "4.10.3"
SHA256 = "0f2b4d7dcdf7d1219df8d1959ad68e565f51d14c3f0d88bb71cd59abeb956292"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def axe_source() -> str:
    """The script, from the cache or from npm."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "trireme-tests"
    file = cache / f"axe-core-{VERSION}.tgz"
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        _fetch(file)
    with tarfile.open(file) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def _fetch(file: pathlib.Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on this machine: the page is not checked by axe (apt-get install npm)")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"axe-core@{VERSION}", "--silent", "--pack-destination", folder]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
        found = pathlib.Path(folder) / f"axe-core-{VERSION}.tgz"
        if done.returncode or not found.is_file():
            pytest.skip("npm does not give axe-core: the page is not checked by axe")
        assert hashlib.sha256(found.read_bytes()).hexdigest() == SHA256, "not the axe-core that is pinned"
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, file)


def violations(page: Any, source: str, colours_alone: bool = False) -> list[str]:
    """What axe finds wrong with the page as it is now, one line each."""
    only = {"type": "rule", "values": ["color-contrast"]} if colours_alone else {"type": "tag", "values": RULES}
    page.evaluate(f"void (window.axe || (() => {{ {source} }})())")
    found = page.evaluate("options => axe.run(document, options)", {"runOnly": only, "resultTypes": ["violations"]})["violations"]
    return [f"{one['id']}: {node['target']} {node.get('failureSummary', '')[:300]}" for one in found for node in one["nodes"]]
