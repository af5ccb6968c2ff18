"""Which JSON Schema keywords the grammar engine enforces; every other one is refused by its name.

A keyword that is accepted and then ignored would give text that the schema does not allow.  So the list is closed:
a keyword is enforced, says nothing about the value (a title), or is refused, misspelled ones included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from edgellm.errors import InvalidArgumentError

MAX_SCHEMA_DEPTH = 100

FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
"""Values of `format` that are enforced."""

ENFORCED_KEYWORDS = frozenset(
    {
        *("$anchor", "$defs", "$id", "$ref", "definitions"),
        *("allOf", "anyOf", "const", "enum", "oneOf", "type"),
        *("additionalProperties", "maxProperties", "minProperties", "patternProperties", "properties", "required"),
        *("additionalItems", "items", "maxItems", "minItems", "prefixItems"),
        *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
        *("format", "maxLength", "minLength", "pattern"),
    }
)

ANNOTATIONS = frozenset(
    {
        *("$comment", "$schema", "$vocabulary", "default", "deprecated", "description", "discriminator"),
        *("example", "examples", "readOnly", "title", "writeOnly"),
    }
)
"""Say nothing about which values are valid."""

_REMEDIES = {
    "not": "state what is allowed instead",
    **dict.fromkeys(
        ("if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        "use anyOf with one branch for each case",
    ),
    "uniqueItems": "leave it out and check the answer, or list the allowed arrays in enum",
    **dict.fromkeys(
        ("contains", "minContains", "maxContains"), "use prefixItems for places with a schema of their own"
    ),
    "propertyNames": "use patternProperties with additionalProperties false",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "nullable": 'write the type as ["...", "null"]',
    "contentEncoding": "use pattern",
    "x-guidance": "options of the grammar engine are set by the runtime",
}
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMA_MAPS = ("$defs", "definitions", "patternProperties", "properties")
SCHEMAS = ("additionalItems", "additionalProperties", "items")


def check_schema(schema: object) -> None:
    """Refuse what cannot be enforced.

    Args:
        schema: a JSON Schema as parsed JSON.
    Raises:
        InvalidArgumentError: names the keyword and its place.  Whether the values of keywords make sense is left to
            the compiler.
    """
    stack: list[tuple[str, object, int]] = [("json_schema", schema, 0)]
    while stack:
        place, node, depth = stack.pop()
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidArgumentError(
                f"json_schema is nested more than {MAX_SCHEMA_DEPTH} levels deep; move parts to $defs and use $ref"
            )
        if isinstance(node, bool):
            continue
        if not isinstance(node, Mapping):
            raise InvalidArgumentError(f"{place} is {node!r:.80}; a schema is an object, true or false")
        _check_keywords(place, node)
        stack.extend((name, child, depth + 1) for name, child in _children(place, node))


def _check_keywords(place: str, node: Mapping[str, Any]) -> None:
    for keyword in node:
        if keyword in ENFORCED_KEYWORDS or keyword in ANNOTATIONS:
            continue
        if keyword.startswith("x-") and keyword not in _REMEDIES:
            continue  # extensions of other tools
        remedy = _REMEDIES.get(keyword, "leave it out, or check its spelling")
        raise InvalidArgumentError(f"{place} has the keyword {keyword!r}, which cannot be enforced; {remedy}")
    if "format" in node and node["format"] not in FORMATS:
        raise InvalidArgumentError(
            f"{place} has the format {node['format']!r}; formats that are enforced: {', '.join(sorted(FORMATS))}; "
            "use pattern for others"
        )
    reference = node.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise InvalidArgumentError(
            f"{place} refers to {reference!r}; only references inside the schema (#/$defs/...) are followed, nothing "
            "is fetched: copy it into $defs"
        )
    _check_min_properties(place, node)


def _check_min_properties(place: str, node: Mapping[str, Any]) -> None:
    """Names beside the listed ones may repeat, so more than one of them cannot be counted."""
    least, required = node.get("minProperties", 0), node.get("required", ())
    known = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > known + 1:
        raise InvalidArgumentError(
            f"{place} has minProperties {least} with {known} required properties; more than {known + 1} cannot be "
            "enforced: list the properties in required"
        )


def _children(place: str, node: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The schemas directly inside `node`, with their places; values of enum, const and default are no schemas."""
    for keyword in SCHEMAS:
        if keyword in node:
            child = node[keyword]
            if keyword == "items" and isinstance(child, list):
                yield from ((f"{place}.items[{index}]", one) for index, one in enumerate(child))
            else:
                yield f"{place}.{keyword}", child
    for keyword in SCHEMA_LISTS:
        for index, child in enumerate(_typed(place, node, keyword, list)):
            yield f"{place}.{keyword}[{index}]", child
    for keyword in SCHEMA_MAPS:
        for name, child in _typed(place, node, keyword, dict).items():
            yield f"{place}.{keyword}[{name!r}]", child


def _typed(place: str, node: Mapping[str, Any], keyword: str, kind: type) -> Any:
    value = node.get(keyword, kind())
    if not isinstance(value, kind):
        wanted = "a list of schemas" if kind is list else "an object of schemas"
        raise InvalidArgumentError(f"{place}.{keyword} is {value!r:.80}; it must be {wanted}")
    return value


def needs_unicode_escapes(schema_text: str) -> bool:
    r"""Whether a string of the schema has a control character that JSON can only write as `\uXXXX`.

    Args:
        schema_text: JSON with other characters written as themselves.
    """
    return re.search(r"\\u00[01]", schema_text) is not None
