"""The proxies of docs/proxy.md, as they are printed there, in front of the real server. Skipped where a proxy is not installed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from .served import KEYS, Served

PAGE = pathlib.Path(__file__).parents[2] / "docs/proxy.md"
NAME = "llm.example.org"
KEY = {"authorization": f"Bearer {KEYS[0]}"}


def printed(language: str, served: Served) -> str:
    """The page's block, pointed at this server."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "127.0.0.1:8000" in text
    return text.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], port: int, folder: pathlib.Path) -> Iterator[None]:
    """A proxy in the foreground, once it accepts connections."""
    log = folder / "output"
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder)}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 20
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def nginx(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
    if program is None or shutil.which("openssl") is None:
        pytest.skip("no nginx or openssl on this machine (apt-get install nginx-light openssl)")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    files = ["-keyout", str(folder / "key"), "-out", str(folder / "pem"), "-days", "2", "-nodes"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", *files, *names], check=True, capture_output=True)
    text = printed("nginx", served).replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    text = text.replace(f"/etc/ssl/{NAME}.pem", str(folder / "pem")).replace(f"/etc/ssl/{NAME}.key", str(folder / "key"))
    places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    owner = "user root;" if os.geteuid() == 0 else ""  # else its workers may not write into our folder
    (folder / "conf").write_text(f"{owner} daemon off; pid {folder}/pid; events {{}} http {{ access_log off; {places} {text} }}")
    with (
        running([program, "-p", str(folder), "-e", "stderr", "-c", str(folder / "conf")], port, folder),
        httpx.Client(base_url=f"https://127.0.0.1:{port}", headers={"host": f"{NAME}:{port}"}, verify=False, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def caddy(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("no caddy on this machine (apt-get install caddy)")
    folder, port = tmp_path_factory.mktemp("caddy"), free_port()
    text = printed("caddy", served).replace(f"{NAME} {{", f"http://{NAME}:{port} {{")
    (folder / "Caddyfile").write_text("{\n\tadmin off\n\tauto_https off\n}\n" + text)
    command = [program, "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
    with (
        running(command, port, folder),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"host": f"{NAME}:{port}"}, timeout=60) as client,
    ):
        yield client


def check_page(client: httpx.Client, root: str) -> None:
    """As a browser does it: the page by its address, its script and the API with the page's origin."""
    origin = f"{client.base_url.scheme}://{client.headers['host']}"
    page = client.get(f"{root}/")
    assert page.status_code == 200 and "<html" in page.text
    (script,) = re.findall(r'<script[^>]*type="module"[^>]*src="([^"]+)"', page.text)
    assert not script.startswith("/"), "an absolute path would leave the sub-path"
    assert client.get(f"{root}/{script}", headers={"origin": origin}).status_code == 200
    for page_origin, status in ((origin, 200), ("https://elsewhere.example", 403)):
        headers = {"origin": page_origin, **KEY}
        assert client.post(f"{root}/tokenize", json={"prompt": "Hello"}, headers=headers).status_code == status


def check_stream(client: httpx.Client, root: str) -> None:
    """A key is needed, and pieces come before the answer's end."""
    body = {"messages": [{"role": "user", "content": "Count to fifty."}], "max_tokens": 40, "stream": True, "temperature": 0}
    assert client.post(f"{root}/v1/chat/completions", json=body).status_code == 401
    times = []
    with client.stream("POST", f"{root}/v1/chat/completions", json=body, headers=KEY) as answer:
        assert answer.status_code == 200
        times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
    assert len(times) > 10
    assert times[-1] - times[0] > 0.02, "the stream came in one piece"


@pytest.mark.parametrize("root", ["", "/llm"])
def test_nginx_as_printed(nginx: httpx.Client, root: str) -> None:
    check_page(nginx, root)
    check_stream(nginx, root)


def test_nginx_sends_a_sub_path_to_its_slash_and_takes_large_bodies(nginx: httpx.Client) -> None:
    away = nginx.get("/llm")
    assert away.status_code == 301 and away.headers["location"].endswith("/llm/")
    large = nginx.post("/v1/chat/completions", content=b" " * (2 << 20), headers=KEY)
    assert large.status_code == 400 and "error" in large.json()  # Trireme's own answer, not nginx's 413


def test_caddy_as_printed(caddy: httpx.Client) -> None:
    check_page(caddy, "")
    check_stream(caddy, "")
