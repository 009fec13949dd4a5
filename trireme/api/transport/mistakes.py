"""What is wrong with a body, in plain words: the field, what it is, what it must be, and a fix. Knows types and msgspec's texts.

A text of msgspec's that is not known here is passed on as it is. Knows no routes and no error shapes.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec
from msgspec import inspect

MAX_SHOWN = 60  # characters of a client's value that are shown
AROUND = 20  # bytes shown on either side of invalid JSON

_GOT = {
    "array": "a list",
    "object": "an object",
    "str": "a string",
    "int": "a whole number",
    "float": "a decimal number",
    "bool": "a boolean",
    "null": "null",
}
# The words for one of a type, and for several.
_EXPECTED: dict[type, tuple[str, str]] = {
    inspect.StrType: ("a string", "strings"),
    inspect.IntType: ("a whole number", "whole numbers"),
    inspect.FloatType: ("a number", "numbers"),
    inspect.StructType: ("an object", "objects"),
    inspect.DictType: ("an object", "objects"),
}
_TYPE_MISMATCH = re.compile(r"Expected `[^`]*`, got `([^`]*)`")
_NO_CHOICE = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_OUT_OF_RANGE = re.compile(r"(?:Number|Integer value) out of range")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MALFORMED = re.compile(r"JSON is malformed: (.*) \(byte (\d+)\)")

# What to send, by the place in the request. It holds for every API that has such a field.
_MESSAGE = '{"role": "user", "content": "..."}'
EXAMPLES = {
    "messages": f"[{_MESSAGE}]",
    "messages[]": _MESSAGE,
    "messages[].role": '"user"',
    "messages[].content[]": '{"type": "text", "text": "..."}',
    "messages[].content[].type": '"text"',
    "max_tokens": "256",
    "response_format": '{"type": "json_object"}',
    "response_format.type": '"json_object"',
}


def field_of(error: msgspec.ValidationError) -> str | None:
    """The path of the wrong field, such as messages[0].role. For a missing field inside another, the path of that other field."""
    text, path = _parted(error)
    missing = _MISSING.fullmatch(text)
    return path or (missing[1] if missing else None)


def field_mistake(error: msgspec.ValidationError, kind: Any) -> str:
    """Explains in one line why a value is not a valid `kind`."""
    text, path = _parted(error)
    if missing := _MISSING.fullmatch(text):
        return _missing(f"{path}.{missing[1]}" if path else missing[1], kind)
    if path and (chosen := _NO_CHOICE.fullmatch(text)):
        return f"{path} is {shortened(chosen[1])}{_must_be(expected_at(kind, path))}."
    if mismatch := _TYPE_MISMATCH.fullmatch(text):
        return _mismatch(path, mismatch[1], kind)
    if _OUT_OF_RANGE.fullmatch(text):
        return f"{path or 'The body'} is too large a number. Fix: send one nearer to 0"
    return f"{error}."


def body_mistake(error: Exception, body: bytes, name: str = "The body") -> str:
    """Explains in one line why `body` is not valid JSON. `name` is what the message calls it."""
    if not body.strip():
        return f"{name} is empty; it must be a JSON object. Fix: send one (with curl: -d '{{...}}')"
    cause, fix = str(error), ""
    if isinstance(error, UnicodeDecodeError):
        cause, fix = "it has bytes that are not UTF-8", "send it as UTF-8"
    elif cause == "Input data was truncated":
        cause, fix = _cut_off(body)
    elif malformed := _MALFORMED.fullmatch(cause):
        at = int(malformed[2])
        what, fix = _malformed(malformed[1], body, at)
        cause = f"{what} at byte {at}, near {_near(body, at)}"
    return f"{name} is not valid JSON: {cause}." + (f" Fix: {fix}" if fix else "")


def expected_at(kind: Any, path: str) -> str:
    """What the field at `path` must be, such as "a string or a list of strings". Empty if that is not known."""
    return _choices(_nodes_at(kind, path))


def shortened(shown: str) -> str:
    """A client's value, shortened for an error message."""
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


def _parted(error: msgspec.ValidationError) -> tuple[str, str]:
    """Splits the text from the path. A value in the text may look like a path, so the last match is used."""
    text, mark, path = str(error).rpartition(" - at `$")
    return (text, path.strip("`.")) if mark else (path, "")


def _missing(path: str, kind: Any) -> str:
    nodes = _nodes_at(kind, path)
    example = EXAMPLES.get(_place(path)) or ('"..."' if any(isinstance(node, inspect.StrType) for node in nodes) else "")
    fix = f' Fix: send "{path.rpartition(".")[2]}": {example}' if example else ""
    return f"{path} is missing{_must_be(_choices(nodes))}.{fix}"


def _mismatch(path: str, got: str, kind: Any) -> str:
    nodes = _nodes_at(kind, path)
    fix = _mismatch_fix(path, got, nodes)
    cause = f"{path or 'The body'} is {_GOT.get(got, got)}{_must_be(_choices(nodes))}."
    return f"{cause} Fix: {fix}" if fix else cause


def _mismatch_fix(path: str, got: str, nodes: list[Any]) -> str:
    kinds = {type(node) for node in nodes}
    if not path and kinds == {inspect.StructType}:
        return "send {" + ", ".join(f'"{field.encode_name}": ...' for field in nodes[0].fields if field.required) + "}"
    if example := EXAMPLES.get(_place(path)):
        return f"send {example}"
    if got == "str" and kinds & {inspect.IntType, inspect.FloatType}:
        return "send a number without quotes"
    if got == "str" and inspect.BoolType in kinds:
        return "send true or false without quotes"
    if got == "str" and any(isinstance(node, inspect.ListType) and isinstance(node.item_type, inspect.StrType) for node in nodes):
        return 'send ["..."]'
    if got == "float" and inspect.IntType in kinds:
        return "send it without a decimal point"
    return ""


def _must_be(expected: str) -> str:
    return f"; it must be {expected}" if expected else ""


def _place(path: str) -> str:
    """The path without its list indices."""
    return re.sub(r"\[[^\]]*\]", "[]", path)


# --- types ----------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _tree(kind: Any) -> Any:
    return inspect.type_info(kind)


def _nodes_at(kind: Any, path: str) -> list[Any]:
    """The types allowed at `path`, without null: a field that may be null may also be left out."""
    nodes = _alternatives(_tree(kind))
    for name, _ in _STEP.findall(f".{path}" if path and not path.startswith("[") else path):
        inner: list[Any] = []
        for node in nodes:
            if name and isinstance(node, inspect.StructType):
                inner += [field.type for field in node.fields if field.encode_name == name]
            elif not name and isinstance(node, inspect.ListType):
                inner.append(node.item_type)
            elif not name and isinstance(node, inspect.DictType):
                inner.append(node.value_type)
        nodes = [alternative for node in inner for alternative in _alternatives(node)]
    return nodes


def _alternatives(node: Any) -> list[Any]:
    nodes = node.types if isinstance(node, inspect.UnionType) else (node,)
    return [each for each in nodes if not isinstance(each, inspect.NoneType)]


def _choices(nodes: list[Any], many: bool = False) -> str:
    """The alternatives in words. Empty if one of them cannot be described."""
    words = [word for node in sorted(nodes, key=_order) for word in _words(node, many)]
    if not all(words):
        return ""
    listed = ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else "".join(words)
    only_values = len(words) > 1 and all(isinstance(node, inspect.LiteralType) for node in nodes)
    return f"one of {', '.join(words)}" if only_values else listed


def _order(node: Any) -> int:
    """Sorts plain types before lists, so that the words for a list's items end the sentence."""
    return 1 if isinstance(node, inspect.ListType) else 0


def _words(node: Any, many: bool) -> list[str]:
    if isinstance(node, inspect.LiteralType):
        return [repr(value) for value in node.values]
    if isinstance(node, inspect.BoolType):
        return ["booleans"] if many else ["true", "false"]
    if isinstance(node, inspect.ListType):
        items = _choices(_alternatives(node.item_type), many=True)
        return [("lists" if many else "a list") + (f" of {items}" if items else "")]
    return [_EXPECTED.get(type(node), ("", ""))[many]]


# --- JSON -----------------------------------------------------------------------------------------------------------------------


def _near(body: bytes, at: int) -> str:
    return repr(body[max(0, at - AROUND) : at + AROUND].decode("utf-8", "replace"))


def _cut_off(body: bytes) -> tuple[str, str]:
    if body.rstrip().endswith((b"}", b"]")) and b"\\u" in body:  # the decoder also reports half of a surrogate pair as truncated
        return "it has a \\u escape that is not whole", "write four digits, and both halves of a pair"
    return f"it breaks off after {_near(body, len(body))}", "close what was opened, and send all of it"


def _malformed(what: str, body: bytes, at: int) -> tuple[str, str]:
    """What is wrong at the position `at`, and a fix if one is known."""
    found = body[at : at + 1]
    if what.startswith("trailing comma"):
        return what, "leave out the last comma"
    if what == "object keys must be strings":
        return "a name without double quotes", 'write names as "name"'
    if found == b"'":
        return what, "use double quotes"
    if what != "invalid character":
        return what, ""
    if at == 0:
        return what, "begin with { and send JSON alone"
    if found and found in b"TFNI":
        return what, "write true, false, null or a number"
    if found and found < b" ":
        return "a line break or another control character in a string", "write a line break as \\n"
    return what, ""
