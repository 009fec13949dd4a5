"""/v1/batches: a file of requests, answered when there is room, into a file of answers.

A batch is a record on the shelf; one process claims it and works at it, and if that process dies another goes on from the
answers already written. Knows JSON lines and handlers; nothing of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec

from trireme.api.stored.files import Files, owned, page
from trireme.api.stored.shelf import Shelf, absent
from trireme.api.transport.failures import Failure, Shape, failure_document, failure_of
from trireme.api.transport.http import Call, Events, Handler, Reply, decode, json_reply
from trireme.errors import DiskFull, Overloaded, TriremeError

MAX_LINES = 50_000
MAX_ACTIVE = 64  # unfinished batches of one owner
AT_ONCE = 16  # requests of one batch that run in the engine at the same time
LOOK_SECONDS = 2.0  # seconds between checks for work and for cancellation
TRIES = 8  # attempts when the queue is full, with growing pauses
_DONE = frozenset({"completed", "failed", "expired", "cancelled"})

log = logging.getLogger("trireme.batches")


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches"""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchLine(msgspec.Struct, kw_only=True):
    """One line of the input file."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class Batches:
    """The handlers of /v1/batches, and the worker that answers batches."""

    def __init__(self, shelf: Shelf, files: Files, endpoints: Mapping[str, Handler]):
        self.shelf, self.files, self.endpoints = shelf, files, endpoints
        self._wake = asyncio.Event()
        self._running: set[asyncio.Task] = set()
        self._done: set[str] = set()  # names of batches that need no further check

    async def create(self, call: Call) -> Reply:
        request = await call.read(BatchRequest)
        if request.endpoint not in self.endpoints:
            known = ", ".join(map(repr, self.endpoints))
            raise Failure(400, f"endpoint is {request.endpoint[:40]!r}; it must be one of {known}.", param="endpoint")
        if not request.input_file_id.startswith("file-"):
            raise absent(request.input_file_id)
        file = self.shelf.get(request.input_file_id, call.tenant)
        active = [b for b in await asyncio.to_thread(owned, self.shelf, "batch", call.tenant) if b["status"] not in _DONE]
        if len(active) >= MAX_ACTIVE:
            raise Overloaded(f"{len(active)} batches are at work; at most {MAX_ACTIVE} may be.", "wait for one to end")
        self.shelf.make_room("batch", call.tenant)
        now = int(time.time())
        document = {
            "id": self.shelf.new_name("batch", call.tenant, "_"),
            "object": "batch",
            "endpoint": request.endpoint,
            "errors": None,
            "input_file_id": file["id"],
            "completion_window": request.completion_window[:16],
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + 24 * 3600,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": request.metadata,
        }
        self.shelf.put(document["id"], call.tenant, document)
        self._wake.set()
        return json_reply(document)

    async def listed(self, call: Call) -> Reply:
        return json_reply(page(await asyncio.to_thread(owned, self.shelf, "batch", call.tenant), call, 100))

    async def get(self, call: Call) -> Reply:
        return json_reply(self._document(call))

    async def cancel(self, call: Call) -> Reply:
        document = self._document(call)
        if document["status"] not in _DONE:
            self.shelf.mark(document["id"])
            document |= {"status": "cancelling", "cancelling_at": int(time.time())}
            self.shelf.put(document["id"], call.tenant, document)
            self._wake.set()
        return json_reply(document)

    def _document(self, call: Call) -> dict[str, Any]:
        name = call.path_params["id"]
        if not name.startswith("batch_"):
            raise absent(name)
        return self.shelf.get(name, call.tenant)

    # --- work -----------------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Answers batches while the application runs."""
        task = asyncio.create_task(self._look())
        try:
            yield
        finally:
            for running in (task, *self._running):
                running.cancel()
            await asyncio.gather(task, *self._running, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            for name in await asyncio.to_thread(self._unfinished):
                task = asyncio.create_task(self._claimed(name), name=name)
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)
            self._wake.clear()

    def _unfinished(self) -> list[str]:
        held = {task.get_name() for task in self._running}
        found = []
        names = self.shelf.names("batch")
        self._done.intersection_update(names)
        for name in (name for name in reversed(names) if name not in held | self._done):
            with contextlib.suppress(Failure, OSError, msgspec.DecodeError):
                if self.shelf.get(name, self.shelf.owner(name))["status"] in _DONE:
                    self._done.add(name)
                else:
                    found.append(name)
        return found

    async def _claimed(self, name: str) -> None:
        with self.shelf.claim(name) as mine:
            if not mine:
                return
            try:
                owner = self.shelf.owner(name)
                await _Work(self, name, owner, self.shelf.get(name, owner)).run()
            except (Failure, TriremeError, OSError) as error:
                log.error("batch lost", extra={"batch": name, "error": type(error).__name__})


class _Work:
    """One batch that is being answered."""

    def __init__(self, batches: Batches, name: str, owner: str, document: dict[str, Any]):
        self._batches, self._shelf, self._name, self._owner, self._document = batches, batches.shelf, name, owner, document
        # Answer lines in order of arrival; at the end they are split into two files.
        self._answers: pathlib.Path = batches.shelf.data_path(name)
        self._handler = batches.endpoints[document["endpoint"]]

    async def run(self) -> None:
        try:
            lines = await asyncio.to_thread(self._lines)
        except Failure as failure:
            self._fail("invalid_file", failure.message)
            return
        done = await asyncio.to_thread(self._answered)
        self._count(len(lines))
        self._save(status="in_progress", in_progress_at=int(time.time()))
        places = asyncio.Semaphore(AT_ONCE)
        left = [line for line in lines if line.custom_id not in done]
        cancelled = await self._answer_all(left, places)
        try:
            await asyncio.to_thread(self._finish, cancelled, len(lines))
        except (Failure, DiskFull) as error:  # there is no room for the answers
            self._fail("storage_full", failure_of(error).message)

    def _fail(self, code: str, message: str) -> None:
        errors = {"object": "list", "data": [{"code": code, "message": message, "line": None, "param": None}]}
        self._save(status="failed", failed_at=int(time.time()), errors=errors)

    async def _answer_all(self, lines: list[BatchLine], places: asyncio.Semaphore) -> bool:
        """Answers all lines. Returns whether the batch was cancelled meanwhile."""

        async def one(line: BatchLine) -> None:
            async with places:
                self._write(await self._answer(line))

        tasks: set[asyncio.Task] = set()
        waiting = iter(lines)
        with open(self._answers, "ab") as self._file:
            while True:
                while len(tasks) < 2 * AT_ONCE and (line := next(waiting, None)) is not None:
                    tasks.add(asyncio.create_task(one(line)))
                if not tasks:
                    return False
                try:
                    _, tasks = await asyncio.wait(tasks, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    await _end(tasks)
                    raise
                if self._shelf.marked(self._name) or time.time() > self._document["expires_at"]:
                    await _end(tasks)
                    return True

    async def _answer(self, line: BatchLine) -> dict[str, Any]:
        for attempt in range(TRIES):
            call = Call(
                path=line.url,
                headers={},
                body=bytes(line.body),
                path_params={},
                query={},
                request_id=f"{self._name}.{line.custom_id[:64]}",
                tenant=self._owner,
            )
            try:
                async with call.exits:
                    reply = await self._handler(call)
                    if isinstance(reply, Events):
                        raise Failure(400, "A batch cannot stream.", param="stream")
                return self._line(line, reply.status, msgspec.Raw(reply.body))
            except Overloaded as error:
                failure = failure_of(error)
                await asyncio.sleep(min(0.5 * 2**attempt, 15.0))
            except Exception as error:
                failure = failure_of(error)
                if failure.status >= 500:
                    log.error("batch request failed", exc_info=error, extra={"batch": self._name})
                break
        return self._line(line, failure.status, failure_document(failure, Shape.OPENAI))

    def _line(self, line: BatchLine, status: int, body: Any) -> dict[str, Any]:
        request_id = f"{self._name}.{line.custom_id[:64]}"
        response = {"status_code": status, "request_id": request_id, "body": body}
        return {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": response, "error": None}

    def _write(self, answer: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()
        counts = self._document["request_counts"]
        counts["completed" if answer["response"]["status_code"] == 200 else "failed"] += 1
        done = counts["completed"] + counts["failed"]
        if done < 100 or done % 100 == 0:
            self._save()

    def _lines(self) -> list[BatchLine]:
        data = self._shelf.data(self._document["input_file_id"])
        lines, seen = [], set()
        for number, text in enumerate(filter(None, map(bytes.strip, data.split(b"\n"))), 1):
            if number > MAX_LINES:
                raise Failure(400, f"The file has more than {MAX_LINES} requests.")
            try:
                line = decode(text, BatchLine)
            except Failure as failure:
                raise Failure(400, f"Line {number}: {failure.message}") from None
            if line.url != self._document["endpoint"] or line.method != "POST":
                raise Failure(400, f"Line {number}: the batch is for POST {self._document['endpoint']}.")
            if line.custom_id in seen:
                raise Failure(400, f"Line {number}: custom_id {line.custom_id[:64]!r} is there twice.")
            seen.add(line.custom_id)
            lines.append(line)
        if not lines:
            raise Failure(400, "The file has no requests.")
        return lines

    def _answered(self) -> set[str]:
        """Reads the answers that an earlier worker wrote for this batch. A last line that is incomplete is dropped."""
        if not self._answers.exists():
            return set()
        whole = self._answers.read_bytes().rpartition(b"\n")[0]
        self._answers.write_bytes(whole + b"\n" if whole else b"")
        return {answer["custom_id"] for answer in map(msgspec.json.decode, whole.split(b"\n") if whole else ())}

    def _count(self, total: int) -> None:
        codes = [answer["response"]["status_code"] for answer in self._read_answers()]
        completed = codes.count(200)
        self._document["request_counts"] = {"total": total, "completed": completed, "failed": len(codes) - completed}

    def _read_answers(self) -> list[dict[str, Any]]:
        if not self._answers.exists():
            return []
        return [msgspec.json.decode(line) for line in self._answers.read_bytes().split(b"\n") if line]

    def _finish(self, cancelled: bool, total: int) -> None:
        self._count(total)
        good: list[bytes] = []
        bad: list[bytes] = []
        for line in self._answers.read_bytes().split(b"\n"):
            if line:
                (good if msgspec.json.decode(line)["response"]["status_code"] == 200 else bad).append(line + b"\n")
        changes: dict[str, Any] = {}
        for key, lines in (("output_file_id", good), ("error_file_id", bad)):
            if lines:
                filename = f"{self._name}_{key.partition('_')[0]}.jsonl"
                changes[key] = self._batches.files.store(self._owner, filename, b"".join(lines), "batch")["id"]
        expired = time.time() > self._document["expires_at"]
        status = ("expired" if expired else "cancelled") if cancelled else "completed"
        self._save(status=status, **changes, **{f"{status}_at": int(time.time())})
        self._answers.unlink(missing_ok=True)

    def _save(self, **changes: Any) -> None:
        self._document |= changes
        if self._shelf.marked(self._name) and self._document["status"] not in _DONE:
            self._document["status"] = "cancelling"
        self._shelf.put(self._name, self._owner, self._document)


async def _end(tasks: set[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
