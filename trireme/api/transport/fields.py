"""Fields of a request that its shape does not name: misspelt ones and those that would change the answer are refused.

Any other is taken and named, in the answer's header and in the log. Knows names and values; which matter is told by the shape.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
import time
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trireme.api.transport.failures import Failure

IGNORED_HEADER = "x-ignored-fields"
MAX_SHOWN = 16  # names shown in a header or in the log
NEARLY = 0.85  # a name at least this similar to a known one counts as a misspelling
LOG_SECONDS = 60.0

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_logged_at = -LOG_SECONDS

log = logging.getLogger("trireme.fields")


@dataclass(frozen=True)
class OtherFields:
    """What a shape says of fields that it does not have.

    `refused` are known to clients and would change the answer: name -> why not, or what to do. One that is empty, or has its
    `neutral` value, asks for nothing. `harmless` ones change nothing that an answer says.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()
    details: Mapping[str, str] = field(default_factory=dict)  # name -> the error code by which clients recognise the refusal


_NONE = OtherFields()


def check_fields(body: bytes, kind: type) -> list[str]:
    """Returns the names of fields that are ignored. Raises a 400 for a field that must not be. Objects inside the body are looked
    into where their shape has an `others` of its own."""
    if not _names(kind):
        return []
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    unknown = _ignored(given, kind, "")
    for place, inner in _objects(kind).items():
        inside = msgspec.json.decode(given[place], type=dict[str, msgspec.Raw] | None) if place in given else None
        unknown += _ignored(inside or {}, inner, f"{place}.")
    shown = [name for name in unknown if _NAME.fullmatch(name)][:MAX_SHOWN]
    if shown:
        _tell(shown)
    return shown


def _ignored(given: Mapping[str, msgspec.Raw], kind: type, place: str) -> list[str]:
    """The names, after their place in the body, of given fields that the shape neither has nor refuses."""
    known, others = _names(kind), getattr(kind, "others", _NONE)
    unknown = [name for name in given if name not in known]
    refused = [name for name in unknown if name in others.refused and _asks(given[name], others.neutral.get(name, ()))]
    if refused:
        raise _refusal(refused, others, place)
    unknown = [name for name in unknown if name not in others.refused and name not in others.harmless]
    for name in unknown[:MAX_SHOWN]:
        if near := difflib.get_close_matches(name[:64], known, 1, NEARLY):
            wrong = place + name[:64]
            raise Failure(400, f"There is no field {wrong!r}. Fix: write {place + near[0]!r}", param=wrong, code="unknown_field")
    return [place + name for name in unknown]


def _refusal(names: list[str], others: OtherFields, place: str) -> Failure:
    name = names[0]
    code = others.details.get(name)
    details = {"error_code": code, "unsupported": [name for name in names if name in others.details]} if code else None
    cause = f"{place}{name} is not supported here. Fix: {others.refused[name]}"
    return Failure(400, cause, param=place + name, code="unsupported_field", details=details)


@functools.lru_cache(maxsize=64)
def _names(kind: type) -> frozenset[str]:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return frozenset(found.encode_name for found in msgspec.structs.fields(kind)) if is_struct else frozenset()


@functools.lru_cache(maxsize=64)
def _objects(kind: type) -> dict[str, type]:
    """The fields whose value is an object of a shape with an `others`: name -> shape."""
    found = {field.encode_name: typing.get_args(field.type) or (field.type,) for field in msgspec.structs.fields(kind)}
    return {name: shape for name, shapes in found.items() for shape in shapes if hasattr(shape, "others")}


def _asks(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    value = msgspec.json.decode(raw)
    return bool(value) and value not in neutral


def _tell(names: list[str]) -> None:
    global _logged_at
    now = time.monotonic()
    if now - _logged_at >= LOG_SECONDS:
        _logged_at = now
        log.warning("fields of a request are not known here and were passed over", extra={"fields": ", ".join(names)})
