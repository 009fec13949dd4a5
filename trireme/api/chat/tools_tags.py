"""Tool calls whose arguments are written one by one between tags, as text. Knows three spellings of such tags.

What is no string in the tool's schema is taken as JSON where it is JSON; everything else is a string.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.api.chat.parsing_json import encoded, is_json
from trireme.api.chat.parsing_stream import WHITE, Steps, Stream

Schemas = Mapping[str, Mapping[str, Any]]  # the parameters of each tool, by the tool's name
MAX_NAME = 256


class _Arguments:
    """Writes a JSON object, one member after another."""

    def __init__(self, stream: Stream, name: str, schemas: Schemas):
        self._stream, self._count = stream, 0
        properties = schemas.get(name, {}).get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        stream.call(name)
        stream.argue("{")

    def put(self, key: str, text: str, is_string: bool | None = None) -> None:
        if is_string is None:
            is_string = _is_string(self._properties.get(key))
        value = text.strip(WHITE) if is_string is not True and is_json(text.strip(WHITE)) else encoded(text)
        self._stream.argue(f"{', ' if self._count else ''}{encoded(key)}: {value}")
        self._count += 1

    def end(self) -> None:
        self._stream.argue("}")


def _is_string(schema: Any) -> bool | None:
    """Whether a parameter is a string. None if the schema does not say."""
    if not isinstance(schema, Mapping) or "type" not in schema:
        return None
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return kinds == ["string"] or (None if "string" in kinds else False)


def read_function_tags(stream: Stream, schemas: Schemas) -> Steps[bool]:
    """Reads <function=NAME> <parameter=KEY> value </parameter> </function>. The first marker has already been read."""
    name, marker = yield from stream.text_until(">", "\n")
    if marker != ">" or not name or len(name) > MAX_NAME:
        return False
    arguments = _Arguments(stream, name, schemas)
    while True:
        yield from stream.skip_space()
        if not (yield from stream.follows("<parameter=")):
            break
        key, marker = yield from stream.text_until(">")
        text, marker = yield from stream.text_until("</parameter>")
        if not marker:
            return True  # the text ended early: the arguments stay incomplete
        arguments.put(key, _inner_lines(text))
    arguments.end()
    yield from stream.follows("</function>")
    return True


def _inner_lines(text: str) -> str:
    """Removes the line breaks between a value and its tags."""
    return text.removeprefix("\n").removesuffix("\n")


def read_key_values(stream: Stream, schemas: Schemas, end: str) -> Steps[bool]:
    """Reads NAME <arg_key>k</arg_key> <arg_value>v</arg_value> ..., up to the marker `end`, which stays unread."""
    name = ""
    while len(name) <= MAX_NAME and not (yield from stream.sees(end)) and not (yield from stream.sees("<arg_key>")):
        character = yield from stream.take()
        if not character:
            return False
        name += character
    name = name.strip(WHITE)
    if not name or len(name) > MAX_NAME or any(c in name for c in ' \n{}[]"'):
        return False
    arguments = _Arguments(stream, name, schemas)
    while (yield from stream.follows("<arg_key>")):
        key, _ = yield from stream.text_until("</arg_key>")
        yield from stream.skip_space()
        yield from stream.follows("<arg_value>")
        text, marker = yield from stream.text_until("</arg_value>")
        if not marker:
            return True
        arguments.put(key.strip(WHITE), text)
        yield from stream.skip_space()
    arguments.end()
    return True


def read_invocations(stream: Stream, schemas: Schemas, prefix: str) -> Steps[bool]:
    """Reads calls like <invoke name="NAME"> <parameter name="KEY" string="true">value</parameter> </invoke>, with a prefix."""
    found = False
    while True:
        yield from stream.skip_space()
        if not (yield from stream.follows(f"<{prefix}invoke ")):
            return found
        attributes, marker = yield from stream.text_until(">")
        name = _attribute(attributes, "name")
        if not marker or not name:
            return found
        found = True
        arguments = _Arguments(stream, name, schemas)
        while True:
            yield from stream.skip_space()
            if not (yield from stream.follows(f"<{prefix}parameter ")):
                break
            attributes, _ = yield from stream.text_until(">")
            text, marker = yield from stream.text_until(f"</{prefix}parameter>")
            if not marker:
                return True
            told = _attribute(attributes, "string")
            arguments.put(_attribute(attributes, "name"), _inner_lines(text), None if not told else told == "true")
        arguments.end()
        yield from stream.follows(f"</{prefix}invoke>")


def _attribute(attributes: str, name: str) -> str:
    """The value of an attribute, with or without quotes. Empty if the attribute is missing."""
    for part in attributes.split(" "):
        key, _, value = part.partition("=")
        if key.strip(WHITE) == name:
            return value.strip("\"'")
    return ""
