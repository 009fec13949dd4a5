"""Schemas closed by default: an object that names its properties takes no others, unless its schema says so. Knows schemas alone.

Small models otherwise invent keys up to the limit. What a closed schema lets through, the open one does, too; where closing
could leave nothing to write, a schema stays as it is.
"""

from __future__ import annotations

from typing import Any

# If a schema has one of these keywords, other parts of it may name further keys, or forbid them.
_SHARED = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas", "patternProperties"}
)
_SAID = frozenset({"additionalProperties", "unevaluatedProperties", "x-guidance"})
_MIXING = frozenset({"allOf", "not", "if", "dependentSchemas", "$dynamicRef"})  # a definition may be one part of a whole


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` added where the keyword is missing and adding it is safe."""
    return _closed(schema, not _mentions(schema, _MIXING))


def _closed(schema: Any, with_definitions: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    mixed = bool(_MIXING & schema.keys())
    if not mixed:
        for name in ("properties", *(("$defs", "definitions") if with_definitions else ())):
            if isinstance(found.get(name), dict):
                found[name] = {key: _closed(value, with_definitions) for key, value in found[name].items()}
        for name in ("items", "additionalProperties"):
            if name in found:
                found[name] = _closed(found[name], with_definitions)
        for name in ("prefixItems", *(() if "properties" in schema else ("anyOf", "oneOf"))):
            if isinstance(found.get(name), list):
                found[name] = [_closed(value, with_definitions) for value in found[name]]
    if _may_close(schema):
        found["additionalProperties"] = False
    return found


def _may_close(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or (_SHARED | _SAID) & schema.keys():
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    all_named = isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)
    return all_named and isinstance(least, int) and least <= len(properties)


def _mentions(schema: Any, names: frozenset[str]) -> bool:
    layer = [schema] if isinstance(schema, dict | list) else []
    while layer:
        node = layer.pop()
        if isinstance(node, dict):
            if names & node.keys():
                return True
            # A reference with other keywords beside it is also only one part of a whole.
            if "$ref" in node and "properties" in node:
                return True
        layer += [child for child in (node.values() if isinstance(node, dict) else node) if isinstance(child, dict | list)]
    return False
