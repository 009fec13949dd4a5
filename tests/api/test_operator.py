"""What an operator sets: keys with names and limits, HTTPS, proxies, a path, names of the model, a template, systemd."""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.tiny_server_model import write_tiny
from trireme.api.transport.guard import Guard
from trireme.api.transport.tracing import Tracer
from trireme.config import ServeOptions, resolve
from trireme.errors import BadConfig
from trireme.hub.advice import CALM, chat_advice
from trireme.serve.keys import KeyRing, digest_of
from trireme.serve.systemd import notify

from .served import KEYS, MODEL, Served

LISTEN = """
import os, socket
theirs = socket.create_server(("127.0.0.1", 0))
os.dup2(theirs.fileno(), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
from trireme.config import ServeOptions
from trireme.serve.start import open_listener
ours, url = open_listener(ServeOptions())
assert ours.fileno() == 3 and "LISTEN_FDS" not in os.environ
assert url == "http://127.0.0.1:%d" % theirs.getsockname()[1], url
"""


async def _state(scope: Any, receive: Any, send: Any) -> None:
    body = str(scope["path"]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def ask(guard: Guard, method: str = "POST", path: str = "/v1/completions", **headers: str) -> httpx.Response:
    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(asked())


@pytest.fixture
def key_file(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / "keys"
    file.write_text("# key name limits\nsecret-1 alice rpm=2\nsecret-2 models=other\nsecret-3 bob models=m,other  # both\n")
    return file


def test_keys_have_names_and_limits(key_file: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ServeOptions(api_key=("plain", "spelt:carol"), api_key_file=str(key_file), served_model_name=("m",))
    guard = Guard(_state, options, frozenset(), Tracer())
    logging.getLogger("trireme").propagate = True
    with caplog.at_level(logging.INFO, "trireme.access"):
        codes = [ask(guard, authorization=f"Bearer {key}").status_code for key in ("plain", "spelt", "spelt:carol", "secret-3")]
    assert codes == [200, 200, 401, 200]
    assert [getattr(record, "key", None) for record in caplog.records] == [None, "carol", None, "bob"]
    assert "secret" not in str([record.__dict__ for record in caplog.records])
    denied = ask(guard, authorization="Bearer secret-2")
    assert denied.status_code == 403 and denied.json()["error"]["code"] == "model_denied"
    answers = [ask(guard, authorization="Bearer secret-1") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 0 < int(answers[2].headers["retry-after"]) <= 60
    assert ask(guard, "GET", authorization="Bearer secret-1").status_code == 200, "looking costs nothing"


def test_a_rate_is_shared_by_processes_and_comes_back(key_file: pathlib.Path) -> None:
    key = KeyRing(ServeOptions(api_key_file=str(key_file), http_workers=2)).find(digest_of(b"secret-1"))
    assert key is not None and key.per_minute == 1
    assert (key.wait(100.0), key.wait(130.0), key.wait(161.0)) == (0.0, 30.0, 0.0)


def test_what_is_asked_every_second_is_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("trireme").propagate = True
    with caplog.at_level(logging.DEBUG, "trireme.access"):
        for path in ("/load", "/metrics", "/ready", "/v1/models"):
            ask(Guard(_state, ServeOptions(), frozenset(), Tracer()), "GET", path)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 3 + [logging.INFO]


@pytest.mark.parametrize("text", ["", "# nothing\n", "key rpm=0\n", "key models=\n", "key a b\n", "key speed=3\n"])
def test_key_files_that_are_not_understood_are_refused_without_the_key(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(BadConfig) as caught:
        KeyRing(ServeOptions(api_key_file=str(tmp_path / "keys")))
    assert "key rpm" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        ((), "1.2.3.4", "127.0.0.1"),
        (("127.0.0.1",), "1.2.3.4", "1.2.3.4"),
        (("127.0.0.0/8", "10.0.0.0/8"), "6.6.6.6, 1.2.3.4, 10.0.0.7", "1.2.3.4"),
        (("127.0.0.1",), "nonsense", "127.0.0.1"),
        (("10.0.0.0/8",), "1.2.3.4", "127.0.0.1"),
    ],
)
def test_only_trusted_proxies_are_believed(
    trusted: tuple[str, ...], forwarded: str, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("trireme").propagate = True
    with caplog.at_level(logging.INFO, "trireme.access"):
        ask(Guard(_state, ServeOptions(trusted_proxy=trusted), frozenset(), Tracer()), **{"x-forwarded-for": forwarded})
    assert caplog.records[-1].client == client  # type: ignore[attr-defined]


def test_the_page_needs_no_origin_and_a_root_path_is_taken_off() -> None:
    """Browsers send Origin for the page's modules; a proxy changes Host. The API stays closed."""
    guard = Guard(_state, ServeOptions(root_path="/llm", api_key=("k",)), frozenset({"/", "/app.js"}), Tracer())
    foreign = {"origin": "https://chat.example"}
    for path in ("/app.js", "/llm/app.js"):
        answer = ask(guard, "GET", path, **foreign)
        assert (answer.status_code, answer.text) == (200, "/app.js")
    assert ask(guard, "POST", "/app.js", **foreign).status_code == 403
    assert ask(guard, "GET", "/llm/v1/models", **foreign).status_code == 403
    assert ask(guard, "GET", "/llm/v1/models").status_code == 401
    assert ask(guard, "POST", "/llm/admin/reload", authorization="Bearer k").status_code == 403
    with pytest.raises(BadConfig, match="root_path"):
        resolve({"root_path": "llm/"}, environ={})


def test_default_sampling() -> None:
    assert chat_advice({}, ()) == (CALM, "calm")
    assert chat_advice({"temperature": 0.6, "do_sample": True}, ()) == ({"temperature": 0.6}, "model")
    assert chat_advice({"temperature": 0.6}, ("top_k=5",)) == ({"temperature": 0.6, "top_k": 5}, "server")
    for wrong in ("heat=1", "temperature", "top_k=a", "temperature=9999"):
        with pytest.raises(BadConfig, match="default_sampling"):
            chat_advice({}, (wrong,))


def test_systemd_hands_over_a_socket_and_hears_of_readiness(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-c", LISTEN], check=True, timeout=60)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1", "STATUS=serving")
        assert listener.recv(100) == b"READY=1\nSTATUS=serving"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, "-keyout", file, "-out", f"{file}.crt"], check=True, capture_output=True)
    file.write_text(file.read_text() + pathlib.Path(f"{file}.crt").read_text())
    return file


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, certificate: pathlib.Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("srv")
    model = write_tiny(folder / "tiny")  # without a chat template of its own
    (folder / "template").write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    (folder / "keys").write_text("limited dora models=second\n")
    options = ["--tls-cert", str(certificate), "--chat-template", str(folder / "template"), "--served-model-name", "second"]
    options += ["--api-key-file", str(folder / "keys"), "--default-sampling", "calm", "--log-level", "debug"]
    options += ["--max-model-len", "64", "--fill-room", "--any-model-name"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(folder / "notify"))
        told.settimeout(120)
        os.environ["NOTIFY_SOCKET"] = str(folder / "notify")
        server = Served(folder, *options, model=str(model))
        del os.environ["NOTIFY_SOCKET"]
        try:
            assert told.recv(100).startswith(b"READY=1"), server.log
            yield server
        finally:
            server.end()


def test_a_server_with_https_two_names_a_template_and_default_sampling(secure: Served, certificate: pathlib.Path) -> None:
    trusted = ssl.create_default_context(cafile=str(certificate))
    assert secure.url.startswith("https://") and f"chat page {secure.url}/, API {secure.url}/v1, key needed" in secure.log
    with secure.client(verify=trusted) as http:
        cards = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == [MODEL, "second"]
        assert (cards[0]["sampling"], cards[0]["sampling_source"]) == (CALM, "server")
        question: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}
        answers = [http.post("/v1/chat/completions", json={**question, "model": name}).json() for name in (MODEL, "second")]
        assert [answer["model"] for answer in answers] == [MODEL, "second"]
        assert answers[0]["usage"]["prompt_tokens"] == 4, "the template's two signs around the text"
        assert http.post("/v1/chat/completions", json={**question, "model": "gpt-4o"}).json()["model"] == "gpt-4o"
        filled = http.post("/v1/chat/completions", json={**question, "max_tokens": 1000, "ignore_eos": True}).json()
        assert filled["usage"]["completion_tokens"] == 60 and filled["choices"][0]["finish_reason"] == "length"
        assert http.post("/v1/completions", json={"prompt": "x" * 64}).status_code == 400, "a prompt is never cut"
        with http.stream("POST", "/v1/chat/completions", json={**question, "stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
    with secure.client("limited", verify=trusted) as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["second"]
        assert http.post("/v1/chat/completions", json={**question, "model": MODEL}).status_code == 404
        assert http.post("/v1/chat/completions", json=question).json()["model"] == "second"
        assert http.get("/ready").status_code == 200
    assert 'key": "dora"' in secure.logged("dora").replace('":"', '": "') and KEYS[0] not in secure.log
    assert "/ready" in secure.logged('"/ready"'), "probes are logged at debug"
    assert f"chat page {secure.url}/, API {secure.url}/v1, key needed" in secure.logged("Ready at")


@pytest.mark.parametrize("flags", [["--tls-cert", "/nowhere.pem"], ["--tls-key", "/nowhere.pem"], ["--chat-template", "/nowhere"]])
def test_files_that_are_not_there_are_one_line(flags: list[str], tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "trireme", "serve", str(write_tiny(tmp_path / "tiny")), "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "Fix: " in done.stderr and "Traceback" not in done.stderr, done.stderr
