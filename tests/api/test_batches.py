"""Files and batches by OpenAI's SDK: answers in order of custom ids, errors apart, cancelling, owners."""

from __future__ import annotations

import asyncio
import json
import pathlib
import time
from typing import Any

import httpx
import msgspec
import openai
import pytest

from trireme.api.stored.batches import Batches
from trireme.api.stored.files import Files, form_parts
from trireme.api.stored.shelf import Shelf
from trireme.api.transport.failures import Failure
from trireme.api.transport.http import Call, Reply, json_reply

from .served import KEYS, MODEL, PATIENCE, Served


def line(number: int, **body: Any) -> bytes:
    whole = {"model": MODEL, "prompt": f"{number} and", "temperature": 0, "max_tokens": 3, **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": whole}).encode()


def until_done(sdk: openai.OpenAI, name: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        batch = sdk.batches.retrieve(name)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        time.sleep(0.1)
    raise AssertionError(batch)


def test_a_batch(sdk: openai.OpenAI) -> None:
    data = b"\n".join([*(line(number) for number in range(6)), line(6, temperature=-5), line(7, stream=True)])
    file = sdk.files.create(file=("requests.jsonl", data), purpose="batch")
    assert sdk.files.retrieve(file.id).filename == "requests.jsonl"
    assert sdk.files.content(file.id).content == data
    begun = sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"})
    batch = until_done(sdk, begun.id)
    assert batch.status == "completed" and batch.metadata == {"a": "b"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (8, 6, 2)
    good = [json.loads(text) for text in sdk.files.content(batch.output_file_id).text.splitlines()]
    bad = [json.loads(text) for text in sdk.files.content(batch.error_file_id).text.splitlines()]
    assert sorted(answer["custom_id"] for answer in good) == [f"r{number}" for number in range(6)]
    for answer in good:
        alone = sdk.completions.create(model=MODEL, prompt=f"{answer['custom_id'][1:]} and", temperature=0, max_tokens=3)
        assert answer["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    assert {answer["response"]["status_code"] for answer in bad} == {400}
    assert begun.id in [listed.id for listed in sdk.batches.list()]
    sdk.files.delete(file.id)
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(file.id)


def test_a_cancelled_batch_ends(sdk: openai.OpenAI, served: Served) -> None:
    data = b"\n".join(line(number, max_tokens=2000, ignore_eos=True) for number in range(4))
    file = sdk.files.create(file=("long.jsonl", data), purpose="batch")
    begun = sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert sdk.batches.cancel(begun.id).status == "cancelling"
    assert until_done(sdk, begun.id).status == "cancelled"
    served.until_idle()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"not json", line(1) + b"\n" + line(1), line(1).replace(b"/v1/completions", b"/v1/x")]
)
def test_a_file_that_is_no_batch_fails_with_the_reason(sdk: openai.OpenAI, data: bytes) -> None:
    file = sdk.files.create(file=("bad.jsonl", data), purpose="batch")
    batch = until_done(sdk, sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id)
    assert batch.status == "failed" and batch.errors.data[0].message


def test_files_are_their_owners_alone(sdk: openai.OpenAI, served: Served) -> None:
    file = sdk.files.create(file=("mine.jsonl", b"x"), purpose="batch")
    other = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS[1], max_retries=0)
    assert file.id not in [listed.id for listed in other.files.list()]
    for refused in (other.files.retrieve, other.files.delete, other.files.content):
        with pytest.raises(openai.NotFoundError):
            refused(file.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "file-../x", "file-" + "0" * 32, "%00", "file-" + "g" * 32])
def test_no_path_from_outside(http: httpx.Client, name: str) -> None:
    assert http.get(f"/v1/files/{name}/content").status_code == 404


def test_forms() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n1\r\n2\r\n--b--\r\n'
    purpose, file = form_parts("multipart/form-data; boundary=b", body)
    assert (purpose.name, purpose.data, file.name, file.filename, file.data) == ("purpose", b"batch", "file", "a", b"1\r\n2")
    for broken in (b"", b"--b", body[:-6], b"--b\r\nno end"):
        with pytest.raises(Failure):
            form_parts("multipart/form-data; boundary=b", broken)
    with pytest.raises(Failure):
        form_parts("application/json", body)


def test_a_batch_goes_on_where_a_dead_process_left_it(tmp_path: pathlib.Path) -> None:
    shelf = Shelf(tmp_path / "data")
    files = Files(shelf)
    answered: list[str] = []

    async def handler(call: Call) -> Reply:
        answered.append((await call.read(dict))["prompt"])
        return json_reply({"said": answered[-1]})

    async def go() -> dict[str, Any]:
        batches = Batches(shelf, files, {"/v1/completions": handler})
        source = files.store("alice", "in.jsonl", b"\n".join(line(number) for number in range(4)), "batch")
        asked = json.dumps({"input_file_id": source["id"], "endpoint": "/v1/completions"}).encode()
        call = Call("/v1/batches", {}, asked, {}, {}, "id", "alice")
        name = msgspec.json.decode((await batches.create(call)).body)["id"]
        whole = {"custom_id": "r1", "response": {"status_code": 200, "body": {}}}
        shelf.data_path(name).write_bytes(json.dumps(whole).encode() + b'\n{"custom_id": "r2", "resp')  # it died while writing
        with shelf.claim(name) as mine:
            assert mine
            async with batches.working():
                await asyncio.sleep(0.2)
                assert not answered  # another process is at it
        async with batches.working():
            while (document := shelf.get(name, "alice"))["status"] != "completed":
                await asyncio.sleep(0.01)
        return document

    document = asyncio.run(go())
    assert sorted(answered) == ["0 and", "2 and", "3 and"]
    assert document["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    with pytest.raises(Failure):
        shelf.get(document["id"], "bob")
