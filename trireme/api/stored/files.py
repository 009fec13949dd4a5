"""/v1/files: what a client uploads for a batch, and what a batch leaves for it. Knows multipart forms and the shelf."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any

from trireme.api.stored.shelf import Shelf, absent
from trireme.api.transport.failures import Failure
from trireme.api.transport.http import Call, Reply, json_reply
from trireme.errors import DiskFull

PURPOSES = frozenset({"batch", "assistants", "fine-tune", "vision", "user_data", "evals"})
MAX_PARTS = 32
PAGE = 10_000

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^;,\s]{1,200}))')
_ATTRIBUTE = re.compile(r'(name|filename)="([^"]*)"')


@dataclass
class Part:
    """One field of a multipart form."""

    name: str
    filename: str
    data: bytes


class Files:
    """The handlers of /v1/files."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf

    async def create(self, call: Call) -> Reply:
        parts = {part.name: part for part in form_parts(call.headers.get("content-type", ""), call.body)}
        purpose = parts["purpose"].data.decode("utf-8", "replace") if "purpose" in parts else "batch"
        if purpose not in PURPOSES:
            raise Failure(400, f"purpose is {purpose[:40]!r}; it must be one of: {', '.join(sorted(PURPOSES))}.", param="purpose")
        if "file" not in parts:
            raise Failure(400, "The form has no field `file`.", param="file")
        file = parts["file"]
        return json_reply(await asyncio.to_thread(self.store, call.tenant, file.filename or "upload", file.data, purpose))

    def store(self, owner: str, filename: str, data: bytes, purpose: str) -> dict[str, Any]:
        """Stores bytes as a file of `owner`. The client's file name is recorded but never used as a path."""
        self.shelf.make_room("file", owner)
        name = self.shelf.new_name("file", owner)
        self.shelf.put_data(name, owner, data)
        document = {
            "id": name,
            "object": "file",
            "bytes": len(data),
            "created_at": int(time.time()),
            "filename": filename[:255],
            "purpose": purpose,
            "status": "processed",
        }
        try:
            self.shelf.put(name, owner, document)
        except DiskFull:
            self.shelf.remove(name)
            raise
        return document

    async def listed(self, call: Call) -> Reply:
        purpose = call.query.get("purpose")
        found = await asyncio.to_thread(owned, self.shelf, "file", call.tenant)
        return json_reply(page([document for document in found if purpose in (None, document["purpose"])], call, PAGE))

    async def get(self, call: Call) -> Reply:
        return json_reply(self.shelf.get(_file_id(call), call.tenant))

    async def content(self, call: Call) -> Reply:
        document = self.shelf.get(_file_id(call), call.tenant)
        data = await asyncio.to_thread(self.shelf.data, document["id"])
        return Reply(data, media_type="application/octet-stream", headers={"content-disposition": "attachment"})

    async def delete(self, call: Call) -> Reply:
        document = self.shelf.get(_file_id(call), call.tenant)
        self.shelf.remove(document["id"])
        return json_reply({"id": document["id"], "object": "file", "deleted": True})


def _file_id(call: Call) -> str:
    name = call.path_params["id"]
    if not name.startswith("file-"):
        raise absent(name)
    return name


def owned(shelf: Shelf, kind: str, owner: str) -> list[dict[str, Any]]:
    """The owner's documents of one kind, newest first."""
    found = []
    for name in shelf.names(kind, owner):
        try:
            found.append(shelf.get(name, owner))
        except Failure:
            continue
    return found


def page(documents: list[dict[str, Any]], call: Call, most: int) -> dict[str, Any]:
    """One page of a list. It begins after the entry with the id `after`."""
    limit = call.query.get("limit", str(min(most, 100)))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise Failure(400, f"limit must lie between 1 and {most}.", param="limit")
    after = call.query.get("after")
    if after is not None:
        ids = [document["id"] for document in documents]
        documents = documents[ids.index(after) + 1 :] if after in ids else []
    shown = documents[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(documents),
    }


def form_parts(content_type: str, body: bytes) -> list[Part]:
    """The fields of a multipart form."""
    match = _BOUNDARY.search(content_type)
    if not content_type.startswith("multipart/form-data") or match is None:
        raise Failure(400, "This route takes multipart/form-data.", param="file")
    mark = b"\r\n--" + (match[1] or match[2]).encode("latin-1", "replace")
    pieces = (b"\r\n" + body).split(mark, MAX_PARTS + 1)
    if len(pieces) > MAX_PARTS + 1:
        raise Failure(400, f"The form has more than {MAX_PARTS} fields.")
    parts: list[Part] = []
    for piece in pieces[1:]:
        if piece.startswith(b"--"):
            return parts
        head, gap, data = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if not gap:
            break
        attributes = dict(_ATTRIBUTE.findall(head[:4096].decode("utf-8", "replace")))
        parts.append(Part(attributes.get("name", ""), attributes.get("filename", ""), data))
    raise Failure(400, "The multipart form does not end.")
