"""Chat templates: Jinja in a sandbox, bounded in time and size. Knows messages as plain data, never tokens."""

from __future__ import annotations

import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trireme.errors import BadRequest

MAX_TEMPLATE = 1 << 20  # characters
MAX_TEXT = 16 << 20  # characters that a template may make at once or in all
MAX_SECONDS = 5.0


class TooMuch(Exception):
    """A template went past its bounds."""


class _Raised(Exception):
    """A template refused its messages with raise_exception()."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE:
            raise BadRequest(f"The chat template is longer than {MAX_TEMPLATE} characters.", "use a shorter one")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise BadRequest(f"The chat template cannot be read: {_line(error)}.", "mend the template") from None
        # Joining with `~` is compiled to this function and passes no other hook.
        self._template.root_render_func.__globals__["str_join"] = _bounded_join

    def render(self, variables: dict[str, Any]) -> str:
        """The text, or BadRequest saying what the template did not like."""
        try:
            with _Deadline(MAX_SECONDS):
                return "".join(_measured(self._template.generate(variables)))
        except _Raised as error:
            raise BadRequest(f"The chat template refuses these messages: {_line(error)}.", param="messages") from None
        except TooMuch as error:
            raise BadRequest(f"The chat template {error}.", "shorten the conversation", "messages") from None
        except Exception as error:  # whatever a template can provoke is about this request alone
            raise BadRequest(f"The chat template failed on these messages: {_line(error)}.", param="messages") from None


class _Deadline:
    """Stops a template that runs too long, even in a loop that writes nothing, by watching its own lines."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._check if frame.f_code.co_filename == "<template>" else None

    def _check(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if time.monotonic() > self._end:
            raise TooMuch(f"ran longer than {MAX_SECONDS:g} seconds")
        return self._check


class _Sandbox(ImmutableSandboxedEnvironment):
    """Adds bounds on size to jinja's bounds on reach."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1 << 20 or abs(right) > 64):
            raise TooMuch("computes too large a power")
        if operator == "*" and max(_size(left), 1) * _count(right) + max(_size(right), 1) * _count(left) > MAX_TEXT:
            raise TooMuch(f"makes a text of more than {MAX_TEXT} characters")
        if operator == "%" and isinstance(left, str):
            raise TooMuch("formats text with %, which is not allowed here")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _check_arguments(getattr(function, "__self__", None), *args, *kwargs.values())
        return _bounded(super().call(context, function, *args, **kwargs))


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _bounded_filter(function)
    return environment


def _raise_exception(message: str) -> str:
    raise _Raised(message)


def _tojson(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, separators: Any = None, sort_keys: bool = False
) -> str:
    # Plain JSON: jinja's own filter would escape <, > and & for web pages.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(*args, *kwargs.values())
        return _bounded(function(*args, **kwargs))

    return bounded


def _bounded_join(parts: Iterator[Any]) -> str:
    return _bounded(str_join(parts))


def _check_arguments(*values: Any) -> None:
    """Refuses a call whose result could be huge before it is made: a large count, or long texts multiplied."""
    if any(_count(value) > MAX_TEXT for value in values):
        raise TooMuch("asks for too large a number")
    lengths = sorted(_size(value) for value in values)
    if len(lengths) > 1 and lengths[-1] * max(lengths[-2], 1) > 64 * MAX_TEXT:
        raise TooMuch("multiplies texts that are too long")


def _bounded(value: Any) -> Any:
    if _size(value) > MAX_TEXT:
        raise TooMuch(f"makes a text of more than {MAX_TEXT} characters")
    return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _count(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _measured(pieces: Iterator[str]) -> Iterator[str]:
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_TEXT:
            raise TooMuch(f"makes a text of more than {MAX_TEXT} characters")
        yield piece


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300].rstrip(".")
