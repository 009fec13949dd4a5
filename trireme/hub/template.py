"""Chat templates: Jinja in a sandbox, bounded in time and size. Knows messages as plain data, never tokens."""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from trireme.errors import BadRequest

MAX_TEMPLATE = 1 << 20  # characters
MAX_TEXT = 16 << 20  # characters that a template may make at once or in all
MAX_ITEMS = 1 << 18  # values, at every depth, that one operation may look through
LOOK = 4096  # values after which the clock is looked at
# Seconds of the rendering thread's own CPU time, so that a busy machine does not cause refusals. Long conversations get more;
# a message of three values takes about 0.03 ms.
MIN_SECONDS, SECONDS_PER_ITEM, MAX_SECONDS = 0.3, 1e-4, 5.0

# Filters that neither look into a list's items nor turn it into text. `messages | length` stands in many a loop.
_SHALLOW = {"attr", "batch", "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map"} | {
    *("reject", "rejectattr", "reverse", "safe", "select", "selectattr", "slice")
}
# Filters and methods that take a microsecond for a few characters, and methods that could multiply a text at once.
_SLOW = {"capitalize", "casefold", "lower", "swapcase", "title", "upper", "wordcount", "wordwrap"}
_REFUSED = {"encode", "expandtabs", "translate"}
MAX_SLOW_TEXT = 1 << 21
# Jinja's own machinery, whose functions are short and called at every step: their calls are watched, not their lines.
_MACHINERY = frozenset({jinja2.environment.__file__, jinja2.runtime.__file__, jinja2.sandbox.__file__, __file__})


class TooMuch(Exception):
    """A template went past its bounds."""


class _OutOfTime(BaseException):
    """A template ran too long. It is raised only once, so no handler in Jinja may catch it."""


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
        """The rendered text. Raises BadRequest with the template's reason if it refuses the messages."""
        try:
            with _Deadline(_allowance(variables)):
                return "".join(_measured(self._template.generate(variables)))
        except _Raised as error:
            raise BadRequest(f"The chat template refuses these messages: {_line(error)}.", param="messages") from None
        except (TooMuch, _OutOfTime) as error:
            raise BadRequest(f"The chat template {error}.", "shorten the conversation", "messages") from None
        except Exception as error:  # any error of a template concerns only this request
            raise BadRequest(f"The chat template failed on these messages: {_line(error)}.", param="messages") from None


class _Deadline:
    """Stops a template that runs too long, even in a loop that writes nothing, by watching its lines and calls.

    One operation of the interpreter itself is not interrupted: the bounds on sizes keep each of them short."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._ends = time.monotonic() + self._seconds
        self._thread_ends = time.thread_time() + self._seconds
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        self._check()
        return None if frame.f_code.co_filename in _MACHINERY else self._enter_line

    def _enter_line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self._check()
        return self._enter_line

    def _check(self) -> None:
        # Wall time is read first, without a system call: a thread cannot use more CPU time than that.
        if time.monotonic() > self._ends and time.thread_time() > self._thread_ends:
            raise _OutOfTime(f"ran longer than {self._seconds:.2g} seconds")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds on the size of values added."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Weighing().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1 << 20 or abs(right) > 64):
            raise TooMuch("computes too large a power")
        if operator == "*" and max(_size(left), 1) * _count(right) + max(_size(right), 1) * _count(left) > MAX_TEXT:
            raise TooMuch(f"makes a text of more than {MAX_TEXT} characters")
        if isinstance(left, tuple) or isinstance(right, tuple):
            _weighed([left, right] * (max(_count(left), _count(right), 1) if operator == "*" else 1))
        if operator == "%" and isinstance(left, str):
            raise TooMuch("formats text with %, which is not allowed here")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # Jinja wraps the methods that format
        owner = getattr(method, "__self__", None)
        _check_arguments(owner, *args, *kwargs.values())
        if isinstance(owner, str | list | tuple):  # the arguments of macros are not checked
            _weighed(owner)
            args = tuple(_weighed(value) for value in args)
        if isinstance(owner, str):
            _check_method(owner, method.__name__)
        return _bounded(super().call(context, function, *args, **kwargs))


class _Weighing(NodeTransformer):
    """Has tuples (they can be keys) and both sides of a comparison weighed, for which Jinja has no hook."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(_is_constant(side) for side in (node.expr, *(operand.expr for operand in node.ops))):
            node.expr = _weighed_node(node.expr)
            for operand in node.ops:
                operand.expr = _weighed_node(operand.expr)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_constant(node) else _weighed_node(node)


def _weighed_node(node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, "weighed", [], [], None, None, lineno=node.lineno, environment=node.environment)


def _is_constant(node: nodes.Expr) -> bool:
    try:
        node.as_const()
    except nodes.Impossible:
        return False
    return True


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=_weighed)
    environment.filters |= {"tojson": _tojson, "format": _format}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _bounded_filter(name, function)
    for name, function in list(environment.tests.items()):
        environment.tests[name] = _weighed_test(function)
    environment.filters["weighed"] = _weighed
    for name in ("urlize", "striptags"):  # only useful for web pages, and their patterns take quadratic time
        del environment.filters[name]
    del environment.globals["lipsum"]
    return environment


def _raise_exception(message: str) -> str:
    raise _Raised(message)


def _tojson(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, separators: Any = None, sort_keys: bool = False
) -> str:
    # Plain JSON: jinja's own filter would escape <, > and & for web pages.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(*args, *kwargs.values())
        if name in _SLOW and any(_size(value) > MAX_SLOW_TEXT for value in args):
            raise TooMuch(f"uses {name} on a text of more than {MAX_SLOW_TEXT} characters")
        if name not in _SHALLOW:
            args, kwargs = tuple(map(_weighed, args)), {key: _weighed(value) for key, value in kwargs.items()}
        return _bounded(function(*args, **kwargs))

    return bounded


def _format(pattern: Any, *args: Any, **kwargs: Any) -> str:
    _check_widths(str(pattern))
    return do_format(pattern, *args, **kwargs)


def _weighed_test(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def weighed(*args: Any) -> Any:
        return function(*map(_weighed, args)) if len(args) > 1 else function(*args)  # tests with two arguments compare them

    return weighed


def _bounded_join(parts: Iterator[Any]) -> str:
    return _bounded(str_join(_weighed(list(parts))))


def _check_arguments(*values: Any) -> None:
    """Refuses a call whose result could be huge before it is made: a large count, or long texts multiplied."""
    if any(_count(value) > MAX_TEXT for value in values):
        raise TooMuch("asks for too large a number")
    lengths = sorted(_size(value) for value in values)
    if len(lengths) > 1 and lengths[-1] * max(lengths[-2], 1) > 64 * MAX_TEXT:
        raise TooMuch("multiplies texts that are too long")


def _check_method(text: str, name: str) -> None:
    if name in _REFUSED or (name in _SLOW and len(text) > MAX_SLOW_TEXT):
        raise TooMuch(f"uses {name}() on a text of {len(text)} characters")
    if name in ("format", "format_map"):
        _check_widths(text)


def _check_widths(text: str) -> None:
    """Refuses a pattern for format() that would pad its values to a huge width."""
    if re.search(r"\d{6}", text):
        raise TooMuch("formats text to too large a width")


def _allowance(variables: dict[str, Any]) -> float:
    return min(MIN_SECONDS + SECONDS_PER_ITEM * _weigh(variables)[0], MAX_SECONDS)


def _weighed(value: Any) -> Any:
    """`value`, unless it is too large to be looked through: values that hold one another many times over seem small."""
    if isinstance(value, list | tuple | dict):
        items, characters = _weigh(value)
        if items > MAX_ITEMS or characters > MAX_TEXT:
            raise TooMuch(f"handles more than {MAX_ITEMS} values or {MAX_TEXT} characters at once")
    return _weighed_stream(value) if isinstance(value, Iterator) else value


def _weighed_stream(values: Iterator[Any]) -> Iterator[Any]:
    items = characters = 0
    for value in values:
        more = _weigh(value)
        items, characters = items + more[0], characters + more[1]
        if items > MAX_ITEMS or characters > MAX_TEXT:
            raise TooMuch(f"handles more than {MAX_ITEMS} values or {MAX_TEXT} characters at once")
        yield value


def _weigh(value: Any) -> tuple[int, int]:
    """Values at every depth, and the characters of the texts among them; counted until there are too many."""
    items = characters = 0
    waiting: list[Any] = [value]
    while waiting and items <= MAX_ITEMS and characters <= MAX_TEXT:
        value = waiting.pop()
        items += 1
        if items % LOOK == 0:
            _moment()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, list | tuple | dict):
            if len(value) > MAX_ITEMS:
                return len(value), characters
            waiting += (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return items, characters


def _moment() -> None:
    """Nothing; but its call is watched, so that a render that ran too long ends here."""


def _bounded(value: Any) -> Any:
    if _size(value) > (MAX_TEXT if isinstance(value, str) else MAX_ITEMS):
        raise TooMuch(f"makes a text of more than {MAX_TEXT} characters or a list of more than {MAX_ITEMS} values")
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
