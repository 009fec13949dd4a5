"""Hub ids against a fake hub on loopback, in a process of its own: the library reads its variables once, at import."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator

import pytest

from tests.hub.gguf_writer import gguf_bytes, llama_metadata, llama_tensors

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GGUF = gguf_bytes(llama_metadata(), llama_tensors())
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "me/tensors": {
        "config.json": b'{"architectures": ["X"]}',
        "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"hi",
        "modeling_evil.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "README.md": b"# me",
    },
    "me/quantized": {"m-Q4_0.gguf": GGUF, "m-Q8_0.gguf": GGUF + bytes(8), "mmproj-f16.gguf": GGUF, "config.json": b"{}"},
    "me/single": {"only.gguf": GGUF},
    "me/code": {"model.py": b"x", "pytorch_model.bin": b"x"},
}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as fetching takes."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, str, str | None]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        Hub.asked.append((self.command, path, self.headers.get("Authorization")))
        words = path.strip("/").split("/")
        repo = "/".join(words[2:4] if words[0] == "api" else words[:2])
        if repo == "me/gated" and self.headers.get("Authorization") != "Bearer hf_token":
            return self.refuse(403, "GatedRepo")
        files = REPOSITORIES.get(repo) if repo != "me/gated" else REPOSITORIES["me/single"]
        if files is None:
            return self.refuse(404, "RepoNotFound")
        if words[0] == "api":
            return self.describe(repo, files, words[4:])
        name = "/".join(words[4:])
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        self.reply(200, files[name], {"ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def describe(self, repo: str, files: dict[str, bytes], rest: list[str]) -> None:
        if rest[:1] == ["tree"]:
            listed: object = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            listed = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        self.reply(200, json.dumps(listed).encode(), {"Content-Type": "application/json", "X-Repo-Commit": COMMIT})

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"})

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


SCRIPT = """
import sys
from trireme.errors import TriremeError
from trireme.hub.resolve import resolve_model
for name in sys.argv[1:]:
    try:
        path = resolve_model(name)
        print(path.name, *sorted(p.name for p in path.iterdir()) if path.is_dir() else "")
    except TriremeError as error:
        print(type(error).__name__, str(error))
assert "torch" not in sys.modules
"""


def resolved(endpoint: str, home: pathlib.Path, *names: str, **variables: str) -> list[str]:
    """What each name became, one line each."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy") and not name.startswith("HF_")
    }
    environment = {**inherited, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **variables}
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], env=environment, cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_models_come_by_hub_id(endpoint: str, tmp_path: pathlib.Path) -> None:
    names = ["me/tensors", "me/single", "me/quantized:q8_0", "me/quantized", "me/code", "me/nobody", "me/gated"]
    lines = resolved(endpoint, tmp_path, *names)
    assert lines[0].split() == [COMMIT, "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert lines[1].split() == ["only.gguf"]
    assert lines[2].split() == ["m-Q8_0.gguf"]
    assert lines[3].startswith(
        "ModelNotFound me/quantized has 2 GGUF models. Fix: add :QUANTIZATION to choose one of: m-Q4_0, m-Q8_0"
    )
    assert lines[4].startswith("BadCheckpoint me/code")
    assert lines[5].startswith("ModelNotFound The hub has no me/nobody")
    assert lines[6].startswith("FetchFailed me/gated is gated")
    assert len(lines) == len(names)
    fetched = {path for method, path, _ in Hub.asked if method == "GET" and "/resolve/" in path}
    assert not any(path.endswith((".py", ".bin", ".md")) for path in fetched)


def test_variables_are_heard(endpoint: str, tmp_path: pathlib.Path) -> None:
    assert resolved(endpoint, tmp_path, "me/gated", HF_TOKEN="hf_token") == ["only.gguf"]
    assert resolved(endpoint, tmp_path, "me/tensors")[0].split()[0] == COMMIT
    before = len(Hub.asked)
    lines = resolved(endpoint, tmp_path, "me/gated", "me/tensors", "me/nobody", HF_HUB_OFFLINE="1")
    assert lines[0] == "only.gguf" and lines[1].split()[0] == COMMIT
    assert lines[2].startswith("FetchFailed me/nobody is not cached") and len(Hub.asked) == before
    assert resolved("http://127.0.0.1:9", tmp_path, "me/tensors")[0].split()[0] == COMMIT
    (line,) = resolved("http://127.0.0.1:9", tmp_path / "empty", "me/tensors")
    assert line.startswith("FetchFailed") and "Fix:" in line
