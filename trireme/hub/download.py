"""Downloads over HTTP: resumes where it stopped, checks the hash, and reports each failure in one line.

Knows URLs and files, not what is in them.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import http.client
import os
import pathlib
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

from trireme.errors import DiskFull, FetchFailed

# progress(what, bytes so far, bytes in all)
Progress = Callable[[str, int, int], None]
CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte from a server that is connected
CONNECT_TIMEOUT = 10.0  # seconds for one address to take a connection
MAX_ATTEMPTS = 20  # an attempt that receives no further bytes ends the download at once
MAX_PAGE = 32 * 2**20


def disk_full(error: OSError, path: pathlib.Path) -> DiskFull | None:
    """The error to show when `error` means that the disk is full or not writable."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DiskFull(f"No room left to write {path}.", "free some space, or set TRIREME_CACHE to another disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DiskFull(f"{path} may not be written.", "set TRIREME_CACHE to a folder of yours")
    return None


def fetch_page(url: str, accept: str) -> tuple[bytes, str]:
    """A small page and its content type."""
    with _open(url, {"Accept": accept}) as answer:
        body = _read(answer, MAX_PAGE + 1, url)
        if len(body) > MAX_PAGE:
            raise FetchFailed(f"{_shown(url)} is too long to be an index page.", "check TRIREME_INDEX_URL")
        return body, answer.headers.get_content_type()


def fetch_file(url: str, target: pathlib.Path, sha256: str, size: int, progress: Progress | None) -> None:
    """Downloads `url` to `target`. Resumes an earlier `target`.part, and renames it to `target` only after its hash is verified."""
    part = target.with_name(target.name + ".part")
    if not 0 < _size(part) <= size:
        part.unlink(missing_ok=True)
    resumed = part.exists()
    for attempt in range(MAX_ATTEMPTS):
        before = _size(part)
        if before >= size:
            break
        try:
            _append(url, part, before, size, progress)
        except FetchFailed:
            if _size(part) <= before or attempt + 1 == MAX_ATTEMPTS:
                raise
    if _size(part) == size and file_sha256(part) == sha256:
        part.replace(target)
        return
    part.unlink()
    if resumed:  # the earlier part may belong to another file: retry from the start
        fetch_file(url, target, sha256, size, progress)
        return
    raise FetchFailed(f"What {_shown(url)} sent is not the pinned file.", "try again, or from another index")


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def file_sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _append(url: str, part: pathlib.Path, done: int, size: int, progress: Progress | None) -> None:
    headers = {"Range": f"bytes={done}-"} if done else {}
    with _open(url, headers) as answer:
        if done and answer.status != 206:
            done = 0
        promised = answer.headers.get("Content-Length", "")
        if promised.isdecimal() and done + int(promised) != size:
            part.unlink(missing_ok=True)
            raise FetchFailed(f"{_shown(url)} has another length than pinned.", "try again, or from another index")
        try:
            with open(part, "ab" if done else "wb") as file:
                while chunk := _read(answer, CHUNK, url):
                    file.write(chunk)
                    done += len(chunk)
                    if done > size:
                        break  # longer than the pinned size: the check below refuses it
                    if progress:
                        progress(part.name.removesuffix(".part"), done, size)
        except OSError as error:
            raise disk_full(error, part) or error from None
    if done < size:
        raise _broken_off(url, "it ended early")


def _broken_off(url: str, why: object) -> FetchFailed:
    return FetchFailed(f"The connection to {_shown(url)} broke ({why}).", "run it again: it goes on from here")


def _read(answer: http.client.HTTPResponse, count: int, url: str) -> bytes:
    try:
        return answer.read(count)
    except (OSError, http.client.HTTPException) as error:
        raise _broken_off(url, error) from None


def _open(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise FetchFailed(f"{_shown(url)} is no http address.", "check TRIREME_INDEX_URL")
    if parts.username:
        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers = headers | {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    request = urllib.request.Request(url, headers={"User-Agent": "trireme", **headers})
    opener = urllib.request.build_opener(_Plain(), _Secure(context=_certificates()))
    try:
        return opener.open(request, timeout=CONNECT_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchFailed(f"{_shown(url)} answered {error.code} {error.reason}.", "check the name and the index") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise OutOfReach(
            f"{_shown(url)} is out of reach ({reason}).",
            "go online, or set TRIREME_INDEX_URL or a proxy; a local path needs no network",
        ) from None


class OutOfReach(FetchFailed):
    """No connection to the server could be made."""


class _PlainConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(TIMEOUT)


class _SecureConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(TIMEOUT)


class _Plain(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_PlainConnection, request)


class _Secure(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request, context=self._context)  # type: ignore[attr-defined]


def _certificates() -> ssl.SSLContext:
    """The system's certificate authorities, or those configured for pip and requests."""
    for variable in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"):
        file = os.environ.get(variable)
        if file and os.path.isfile(file):
            return ssl.create_default_context(cafile=file)
    return ssl.create_default_context()


def _shown(url: str) -> str:
    """The address without a login or a query."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
