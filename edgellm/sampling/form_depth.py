"""How deep a form nests, references and rules followed: the grammar engine recurses as deep.

Each part is looked at once, in linear time and without recursion, in the order in which the engine compiles it; a cycle
ends where it meets itself.  What is malformed is left to the compiler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from edgellm.errors import InvalidArgumentError
from edgellm.sampling.literal_length import regex_literal_bytes, schema_literal_bytes
from edgellm.sampling.schema_keywords import SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS

MAX_FORM_DEPTH = 512

_TOKEN = re.compile(
    r"""(?P<blank> (?:\#|//)[^\n]* | [ \t\r]+ )
      | (?P<literal> "(?:[^"\\\n]|\\.)*"i? | /(?:[^/\\]|\\.)+/[imslux]* | <[^<>\s]+> | @[\w-]+ )
      | (?P<line> \n ) | (?P<opening> [(\[{] ) | (?P<closing> [)\]}] ) | (?P<colon> :(?!:) ) | (?P<double> :: )
      | (?P<keyword> %[a-z]+ ) | (?P<name> [A-Za-z_][\w-]* ) | (?P<broken> ["/] ) | (?P<other> . )""",
    re.VERBOSE | re.DOTALL,
)
_JSON_KEYWORDS = ("%json", "%llguidance", "%regex")
_START = "start"


def check_depth(name: str, depth: int) -> None:
    """Refuse a form that nests deeper than `MAX_FORM_DEPTH`.

    Raises:
        InvalidArgumentError: names form, depth and limit.
    """
    if depth > MAX_FORM_DEPTH:
        raise InvalidArgumentError(
            f"{name} nests {depth} levels deep when references and rules are followed, the limit is {MAX_FORM_DEPTH}; "
            "shorten chains of references: refer to what stands at their end"
        )


# ---- JSON Schema ----------------------------------------------------------------------------------------------------


def schema_depth(schema: object) -> int:
    """Most schemas inside each other on the way to any schema, `$ref` followed.

    Args:
        schema: as parsed JSON.
    """
    references = _References(schema)
    seen: set[int] = set()
    stack, deepest = [(schema, 1)], 0
    while stack:
        node, depth = stack.pop()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        deepest = max(deepest, depth)
        children = [(child, depth + 1) for child in _followed(node, references)]
        stack.extend(reversed(children))
    return deepest


def _followed(node: Mapping[str, Any], references: _References) -> Iterator[object]:
    """Schemas that compiling `node` compiles; those in `$defs` only where something refers to them."""
    for keyword, value in node.items():
        if keyword == "$ref":
            yield references.target(value)
        elif keyword in SCHEMAS or keyword in SCHEMA_LISTS:
            yield from value if isinstance(value, list) else [value]
        elif keyword in SCHEMA_MAPS and keyword not in ("$defs", "definitions") and isinstance(value, Mapping):
            yield from value.values()


class _References:
    """Finds what `$ref` means inside one document."""

    def __init__(self, document: object) -> None:
        self._document = document
        self._anchors: dict[str, object] | None = None

    def target(self, reference: object) -> object:
        """The schema, or None where there is none."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        fragment = unquote(reference[1:])
        if fragment and not fragment.startswith("/"):
            return self._by_anchor(fragment)
        node: Any = self._document
        for part in fragment.split("/")[1:]:
            node = _member(node, part.replace("~1", "/").replace("~0", "~"))
        found: object = node
        return found

    def _by_anchor(self, name: str) -> object:
        if self._anchors is None:
            self._anchors = {}
            stack = [self._document]
            while stack:
                node = stack.pop()
                if isinstance(node, Mapping):
                    anchor = node.get("$anchor")
                    if isinstance(anchor, str):
                        self._anchors[anchor] = node
                    stack.extend(node.values())
                elif isinstance(node, list):
                    stack.extend(node)
        return self._anchors.get(name)


def _member(node: Any, name: str) -> Any:
    if isinstance(node, Mapping):
        return node.get(name)
    if isinstance(node, list) and name.isdecimal() and len(name) < 10 and int(name) < len(node):
        return node[int(name)]
    return None


# ---- Lark -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrammarShape:
    """Attributes:
    depth: most rules and brackets inside each other on the way from rule `start`, names followed.
    literal_bytes: of the longest literal.
    """

    depth: int
    literal_bytes: int


def grammar_shape(grammar: str) -> GrammarShape:
    """How deep and long the parts of a grammar are.

    Args:
        grammar: in llguidance's dialect of Lark; schemas in it count as well.
    """
    reader = _GrammarReader(grammar)
    reader.read()
    return GrammarShape(max(reader.deepest, *(scope.depth() for scope in reader.scopes), 0), reader.literal_bytes)


def _literal_bytes(token: str) -> int:
    if token[0] not in '"/':  # a special token, or the name of another grammar
        return 0
    body = token[1 : token.rindex(token[0])]
    return len(body.encode()) if token[0] == '"' else regex_literal_bytes(body)


@dataclass(slots=True)
class _Scope:
    """Rules of one grammar; `%lark {...}` has its own.

    Attributes:
        uses: rule to the names its body uses, each with the number of levels it stands below the rule.
        rules: those whose body is being read.
        line: names of the line so far, which may yet turn out to be the head of a rule.
        nesting: brackets open.
    """

    uses: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    rules: list[str] = field(default_factory=lambda: [_START])
    line: list[tuple[str, int]] = field(default_factory=list)
    nesting: int = 0

    def begin_rule(self) -> None:
        self.rules = [name for name, levels in self.line if levels == 1]
        self.line = []

    def end_line(self) -> None:
        for rule in self.rules:
            self.uses.setdefault(rule, []).extend(self.line)
        self.line = []

    def depth(self) -> int:
        self.end_line()
        seen: set[str] = set()
        stack, deepest = [(_START, 1)], 0
        while stack:
            name, depth = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            deepest = max(deepest, depth)
            stack.extend((used, depth + levels) for used, levels in reversed(self.uses.get(name, ())))
        return deepest


class _GrammarReader:
    """Goes through a grammar token by token.

    Attributes:
        scopes: every scope that was met.
        deepest: of brackets, and of schemas.
        literal_bytes: of the longest literal.
    """

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._outer: list[_Scope | None] = []  # for each bracket the scope that goes on behind it, if another one
        self._scope = _Scope()
        self._lark_begins = False
        self.scopes = [self._scope]
        self.deepest = 0
        self.literal_bytes = 0

    def read(self) -> None:
        place = 0
        while place < len(self._grammar):
            token = _TOKEN.match(self._grammar, place)
            if token is None or token.lastgroup == "broken":  # no grammar: the compiler says so
                return
            place = token.end()
            if token[0] in _JSON_KEYWORDS:
                place = self._read_json(token[0], place)
            else:
                self._take(str(token.lastgroup), token[0])

    def _take(self, kind: str, text: str) -> None:
        scope = self._scope
        if kind == "name" and text != "_":  # the parameter of a rule
            scope.line.append((text, scope.nesting + 1))
        elif kind == "line":
            scope.end_line()
        elif kind == "literal":
            self.literal_bytes = max(self.literal_bytes, _literal_bytes(text))
        elif kind == "colon" and not scope.nesting:
            scope.begin_rule()
        elif kind == "keyword":
            self._keyword(text)
        elif kind == "opening":
            self._open()
        elif kind == "closing" and self._outer:
            self._close()

    def _keyword(self, text: str) -> None:
        self._lark_begins = text == "%lark"
        if text == "%ignore":  # belongs to the whole grammar
            self._scope.end_line()
            self._scope.rules = [_START]

    def _open(self) -> None:
        self._scope.nesting += 1
        self._outer.append(self._scope if self._lark_begins else None)
        self.deepest = max(self.deepest, len(self._outer))
        if self._lark_begins:
            self._scope, self._lark_begins = _Scope(), False
            self.scopes.append(self._scope)

    def _close(self) -> None:
        outer = self._outer.pop()
        if outer is not None:
            self._scope.end_line()
            self._scope = outer
        self._scope.nesting -= 1

    def _read_json(self, keyword: str, place: int) -> int:
        """Pass the JSON behind a keyword; returns where it ends."""
        while self._grammar[place : place + 1].isspace():
            place += 1
        try:
            value, end = json.JSONDecoder().raw_decode(self._grammar, place)
        except (ValueError, RecursionError):  # no JSON: the compiler says so
            return len(self._grammar)
        if keyword == "%json":
            self.deepest = max(self.deepest, schema_depth(value))
            self.literal_bytes = max(self.literal_bytes, schema_literal_bytes(value))
        return end
