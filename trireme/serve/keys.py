"""The API's keys, from flags and a file, each with a name and limits. Knows digests and times; nothing of requests."""

from __future__ import annotations

import collections
import hashlib
import hmac
import math
import pathlib
import re
import time
from dataclasses import dataclass, field

from trireme.config import ServeOptions
from trireme.errors import BadConfig

MINUTE = 60.0  # seconds
_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}")


@dataclass
class ApiKey:
    """One key. Only a digest of its text is kept, which is enough to recognise it."""

    digest: bytes
    name: str = ""  # in the log
    models: tuple[str, ...] = ()  # served names it may use; () is all
    per_minute: int = 0  # requests; 0 is without limit
    _recent: collections.deque[float] = field(default_factory=collections.deque)

    def wait(self, now: float) -> float:
        """Seconds until one more request is within the limit. If this is 0, the request is counted."""
        while self._recent and self._recent[0] <= now - MINUTE:
            self._recent.popleft()
        if self.per_minute and len(self._recent) >= self.per_minute:
            return self._recent[0] + MINUTE - now
        if self.per_minute:
            self._recent.append(now)
        return 0.0

    @property
    def tenant(self) -> str:
        """A name that separates this key's cached prefixes and stored files from others'. It reveals nothing of the key."""
        return hashlib.sha256(b"trireme tenant" + self.digest).hexdigest()[:32]


class KeyRing:
    """All keys of one HTTP process. With several processes, each allows its share of a key's rate."""

    def __init__(self, options: ServeOptions):
        self.keys = [_from_flag(given) for given in options.api_key]
        if options.api_key_file:
            self.keys += _from_file(pathlib.Path(options.api_key_file))
        for key in self.keys:
            key.per_minute = math.ceil(key.per_minute / options.http_workers)

    def find(self, digest: bytes) -> ApiKey | None:
        """The key with this digest. Every key is compared, each in constant time."""
        matches = [hmac.compare_digest(digest, key.digest) for key in self.keys]
        return self.keys[matches.index(True)] if any(matches) else None

    def __bool__(self) -> bool:
        return bool(self.keys)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def retry_after(key: ApiKey) -> int:
    """Takes one request of this key; the whole seconds it must wait if there is no room for it, else 0."""
    return math.ceil(key.wait(time.monotonic()))


def _from_flag(given: str) -> ApiKey:
    """KEY or KEY:NAME. The name follows the last colon, and begins with a letter."""
    key, colon, name = given.rpartition(":")
    if not colon or not _NAME.fullmatch(name):
        key, name = given, ""
    if not key:
        raise BadConfig("An --api-key is empty before its name.", "write KEY:NAME")
    return ApiKey(digest_of(key.encode()), name)


def _from_file(path: pathlib.Path) -> list[ApiKey]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is not text"
        raise BadConfig(f"Cannot read the key file {path}: {cause}.", "check --api-key-file") from None
    keys = [_from_line(words, path, number) for number, line in enumerate(lines, 1) if (words := line.partition(" #")[0].split())]
    keys = [key for key in keys if key is not None]
    if not keys:
        raise BadConfig(f"The key file {path} holds no key.", "write one key on each line")
    return keys  # type: ignore[return-value]


def _from_line(words: list[str], path: pathlib.Path, number: int) -> ApiKey | None:
    """KEY [NAME] [models=A,B] [rpm=N]; a line that begins with # is a comment. The key itself is never shown."""
    if words[0].startswith("#"):
        return None
    key = ApiKey(digest_of(words[0].encode()))
    for word in words[1:]:
        what, equals, value = word.partition("=")
        if equals and what == "models" and value:
            key.models = tuple(name for name in value.split(",") if name)
        elif equals and what == "rpm" and value.isdecimal() and int(value):
            key.per_minute = int(value)
        elif not equals and not key.name and _NAME.fullmatch(word):
            key.name = word
        else:
            raise BadConfig(f"Line {number} of {path} is not understood.", "write KEY [NAME] [models=A,B] [rpm=N]")
    return key
