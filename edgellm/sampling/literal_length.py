"""How long single literals of a form are: the grammar engine goes through a text without choices in one step.

That step costs everybody in the batch some two microseconds a byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from edgellm.errors import InvalidArgumentError

MAX_LITERAL_BYTES = 16 << 10

_SYNTAX = re.compile(r"[\\()\[\]{}|*+?.^$]")


def check_literal(name: str, num_bytes: int) -> None:
    """Refuse a literal above `MAX_LITERAL_BYTES`.

    Args:
        name: what it is part of, for the message.
    Raises:
        InvalidArgumentError: names its size and the limit.
    """
    if num_bytes > MAX_LITERAL_BYTES:
        raise InvalidArgumentError(
            f"{name} has a literal of {num_bytes} bytes, the limit is {MAX_LITERAL_BYTES}; shorten it, and put "
            "a long fixed text around the answer yourself"
        )


def regex_literal_bytes(regex: str) -> int:
    """Bytes of the longest piece of a regular expression without any syntax."""
    return max(len(piece.encode(errors="surrogatepass")) for piece in _SYNTAX.split(regex))


def schema_literal_bytes(schema: object) -> int:
    """Bytes of the longest text that a JSON Schema spells out: in const, enum, pattern and names of properties.

    Args:
        schema: as parsed JSON, without lone surrogates.
    """
    longest, stack = 0, [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            longest = max(longest, *map(_num_bytes, _texts(node)), 0)
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return longest


def _texts(node: Mapping[str, object]) -> Iterator[object]:
    names = node.get("properties")
    if isinstance(names, Mapping):
        yield from names
    for keyword in ("required", "enum"):
        values = node.get(keyword)
        if isinstance(values, list):
            yield from values
    yield node.get("const")
    pattern = node.get("pattern")
    if isinstance(pattern, str):
        yield max(_SYNTAX.split(pattern), key=len)


def _num_bytes(value: object) -> int:
    return len(value.encode(errors="surrogatepass")) if isinstance(value, str) else 0
