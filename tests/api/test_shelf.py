"""The shelf's bounds are each owner's own, and a write that fails leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib

import pytest

from trireme.api.stored import shelf as shelf_module
from trireme.api.stored.batches import Batches
from trireme.api.stored.files import Files, owned
from trireme.api.stored.shelf import Shelf
from trireme.api.transport.failures import Failure
from trireme.api.transport.http import Call
from trireme.errors import DiskFull


@pytest.fixture
def shelf(tmp_path: pathlib.Path) -> Shelf:
    return Shelf(tmp_path / "data")


def test_one_owners_writes_never_remove_anothers(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "MAX_RECORDS", 20)
    files = Files(shelf)
    kept = files.store("bob", "kept", b"bob's", "batch")
    for _ in range(200):
        files.store("alice", "many", b"alice's", "batch")
    assert shelf.get(kept["id"], "bob") == kept and shelf.data(kept["id"]) == b"bob's"
    assert 20 <= len(owned(shelf, "file", "alice")) < 20 + shelf_module.LOOK_EVERY
    assert owned(shelf, "file", "bob") == [kept]


def test_one_owners_bytes_are_not_anothers(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "MAX_BYTES", 1000)
    files = Files(shelf)
    files.store("alice", "large", b"x" * 900, "batch")
    with pytest.raises(Failure) as caught:
        files.store("alice", "more", b"x" * 200, "batch")
    assert caught.value.status == 413
    files.store("bob", "large", b"x" * 900, "batch")


def test_a_write_that_fails_leaves_nothing(shelf: Shelf, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set((tmp_path / "data").iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(DiskFull):
        patched.setattr(os, "replace", full)
        Files(shelf).store("alice", "large", b"x" * 900, "batch")
    with monkeypatch.context() as patched, pytest.raises(DiskFull):  # the bytes are there, their record is not
        patched.setattr(Shelf, "put", lambda *_: (_ for _ in ()).throw(DiskFull("Cannot store this.", "make room")))
        Files(shelf).store("alice", "large", b"x" * 900, "batch")
    assert set((tmp_path / "data").iterdir()) == before


def test_a_batch_whose_answers_cannot_be_stored_fails(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(shelf)

    async def handler(call: Call):
        monkeypatch.setattr(shelf_module, "MAX_BYTES", 10)
        raise Failure(400, "no")

    async def go() -> dict:
        batches = Batches(shelf, files, {"/v1/completions": handler})
        line = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {}}).encode()
        source = files.store("alice", "in.jsonl", line, "batch")
        asked = json.dumps({"input_file_id": source["id"], "endpoint": "/v1/completions"}).encode()
        made = json.loads((await batches.create(Call("/v1/batches", {}, asked, {}, {}, "id", "alice"))).body)
        async with batches.working(), asyncio.timeout(10):
            while (document := shelf.get(made["id"], "alice"))["status"] != "failed":
                await asyncio.sleep(0.01)
        return document

    document = asyncio.run(go())
    assert "larger than 10 bytes" in document["errors"]["data"][0]["message"]
