"""`StructuredOutput`: what the text of one request must look like."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgellm.errors import InvalidArgumentError
from edgellm.sampling.deep_stack import on_deep_stack
from edgellm.sampling.form_depth import check_depth, grammar_shape, schema_depth
from edgellm.sampling.literal_length import check_literal, regex_literal_bytes, schema_literal_bytes
from edgellm.sampling.schema_keywords import check_schema, needs_unicode_escapes

MAX_GUIDE_BYTES = 128 << 10
_MAX_MESSAGE = 500

# Without a bound a weak model may write spaces until its budget is gone.
_WHITESPACE = r"[ \n\r\t]{1,20}"
# Rule attributes that ask for more than a token mask: they would be accepted and ignored.
# Strings and regexes are passed over: a bracket in one ends no attributes, and a word in one is none.
_REFUSED_ATTRIBUTE = re.compile(
    r"""^[ \t]*[?!]?[A-Za-z_][\w-]*\s*
    \[ (?: "(?:[^"\\\n]|\\.)*" | /(?:[^/\\\n]|\\.)*/ | [^]"/\n] )*?
    \b(temperature|stop)\s*=""",
    re.MULTILINE | re.VERBOSE,
)
# How the grammar engine begins a message about a place in a grammar: "at 2(4): " is line 2, column 4.
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
FormKey = tuple[str, Any]
_MODES = ("json_schema", "json_object", "regex", "ebnf", "choice")


class _Referable:
    """Lets weak references be made to objects of a class with slots."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True)
class StructuredOutput(_Referable):
    """Exactly one form that the generated text is guaranteed to have.

    The guarantee covers text that ended by itself (`finish_reason` "stop" without a stop string): one that `max_tokens`
    or a stop string cut is the beginning of such a text.  Compared and hashed by value.

    Attributes:
        json_schema: a JSON Schema (draft 2020-12) as a dict or as JSON text; kept as JSON text.  Properties come in the
            schema's order.  Keywords that cannot be enforced are refused, see `schema_keywords`.
        json_object: any JSON object.
        regex: the whole text matches it, as in `re.fullmatch`; syntax of the Rust crate regex (no look-around, no
            backreferences).
        ebnf: a grammar in llguidance's dialect of Lark, beginning at rule `start`; or GBNF (`root ::= ...`), which is
            converted.
        choice: the whole text is one of these; kept as a tuple.
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    ebnf: str | None = None
    choice: list[str] | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check everything that can be known without a tokenizer.

        Raises:
            InvalidArgumentError: no form or several, a form above `MAX_GUIDE_BYTES`, nested above `MAX_FORM_DEPTH` or
                with a literal above `MAX_LITERAL_BYTES`, a schema with a key twice in one object or a keyword that
                cannot be enforced, or a form that does not compile.
        Cost: the grammar is compiled once: microseconds to tenths of a second for 128 KiB of schema.
        """
        if not isinstance(self.json_object, bool):
            raise InvalidArgumentError(f"json_object is {self.json_object!r}; it must be True or False")
        given = self._given()
        if len(given) != 1:
            raise InvalidArgumentError(
                f"a StructuredOutput has exactly one of {', '.join(_MODES)}; this one has "
                f"{', '.join(given) if given else 'none'}"
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "ebnf"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        if self.regex is not None:
            check_literal("regex", regex_literal_bytes(self.regex))
        self._check_compiles()

    @property
    def mode(self) -> str:
        """Name of the field that is set."""
        return self._given()[0]

    @property
    def key(self) -> FormKey:
        """Equal for equal forms, and keeps no `StructuredOutput` alive."""
        return self.mode, getattr(self, self.mode)

    def grammar(self) -> str:
        """The form as llguidance takes it."""
        from llguidance import LLMatcher, grammar_from

        if self.json_object:
            return _json_grammar('{"type":"object"}')
        if isinstance(self.json_schema, str):
            return _json_grammar(self.json_schema)
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.ebnf is not None:
            return grammar_from("ebnf", self.ebnf)
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice or ())
        # The one character that JSON leaves as it is and Lark does not take so.
        return LLMatcher.grammar_from_lark(f"start: {options}".replace("\x7f", r"\u007f"))

    def complaint(self, message: str) -> str:
        """The grammar engine's message about this form in one line, speaking of what was given and not of the grammar
        made of it."""
        text = _one_line(message)
        is_grammar = self.ebnf is not None and self.grammar() == self.ebnf  # not converted from GBNF
        text = _PLACE.sub(r"line \1, column \2: " if is_grammar else "", text)
        if self.regex is not None:
            text = text.rpartition("(in regex): ")[2]
            if text.startswith("regex parse error: "):
                text = text.rpartition(" error: ")[2]
            text = text.partition(" in regex /")[0]
        return text[:_MAX_MESSAGE]

    def _given(self) -> list[str]:
        others = [name for name in _MODES if name != "json_object" and getattr(self, name) is not None]
        return ["json_object", *others] if self.json_object else others

    def _check_compiles(self) -> None:
        from llguidance import LLMatcher

        if self.ebnf is not None and (found := _REFUSED_ATTRIBUTE.search(self.ebnf)):
            raise InvalidArgumentError(
                f"ebnf sets {found[1]} on a rule, which is not supported; use SamplingParams.temperature, or suffix or "
                "lazy in place of stop"
            )
        try:
            grammar = self.grammar()
        # The converter from GBNF raises plain Exceptions.
        except Exception as error:
            raise InvalidArgumentError(
                f"{self.mode} cannot be read: {explain(str(error)) or type(error).__name__}; correct it"
            ) from error
        if self.ebnf is not None:
            shape = grammar_shape(grammar)
            check_depth(self.mode, shape.depth)
            check_literal(self.mode, shape.literal_bytes)
        failed, messages = on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar))
        # Special tokens in a grammar are judged when the tokenizer is known.
        ignored = [text for text in messages if not text.startswith("no tokenizer")]
        if failed or ignored:
            form = self.mode if self.regex is None else f"regex {self.regex!r:.80}"
            raise InvalidArgumentError(f"{form} cannot be enforced: {self.complaint(ignored[0])}; change that part")


def explain(message: str) -> str:
    """The grammar engine's message in one line, without its internal state and its advice about options we set."""
    return _one_line(message)[:_MAX_MESSAGE]


def _one_line(message: str) -> str:
    message = message.split("<state>")[0].replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "")
    if "oneOf constraints are not supported" in message:
        return "oneOf branches that may overlap are not supported (use anyOf)"
    lines = [line.strip() for line in message.strip().splitlines()]
    kept = [line for line in lines if line and not re.match(r"^(\d+ \||\^)", line)]
    return " ".join(kept)


def _schema_text(schema: object) -> str:
    if isinstance(schema, str):
        _check_size("json_schema", schema)
        schema = _parse(schema)
    elif not isinstance(schema, Mapping):
        raise InvalidArgumentError(
            f"json_schema is a {type(schema).__name__}; pass a dict or JSON text (of a pydantic model: "
            "Model.model_json_schema())"
        )
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"json_schema cannot be written as JSON: {error}; use plain values") from error
    _check_size("json_schema", text)
    plain = _parse(text)
    if not isinstance(plain, dict):
        raise InvalidArgumentError(f"json_schema is {text:.80}; the whole schema must be an object")
    check_schema(plain)
    check_depth("json_schema", schema_depth(plain))
    check_literal("json_schema", schema_literal_bytes(plain))
    return text


def _parse(schema_text: str) -> Any:
    try:
        return json.loads(schema_text, object_pairs_hook=_unique)
    except InvalidArgumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"json_schema is not JSON: {error}; pass a dict or JSON text") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON readers take the last of two equal keys; which one was meant is not known."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise InvalidArgumentError(f"json_schema has the key {twice!r:.80} twice in one object; keep one of them")
    return found


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _choices(choice: object) -> tuple[str, ...]:
    if isinstance(choice, (str, bytes, Mapping)) or not isinstance(choice, Iterable):
        raise InvalidArgumentError(f"choice is {choice!r:.80}; it must be a list of texts")
    texts = tuple(choice)
    if not texts:
        raise InvalidArgumentError("choice is empty; give at least one text")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError(f"choice contains {text!r:.80}; each choice must be non-empty text")
    _check_size("choice", "".join(texts))
    check_literal("choice", max(len(text.encode()) for text in texts))
    return texts


def _check_size(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidArgumentError(f"{name} is a {type(text).__name__}; it must be text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{name} is not valid Unicode text ({error.reason}); remove lone surrogates"
        ) from error
    if size > MAX_GUIDE_BYTES:
        raise InvalidArgumentError(f"{name} has {size} bytes, the limit is {MAX_GUIDE_BYTES}; shorten it")


def _json_grammar(schema_text: str) -> str:
    from llguidance import LLMatcher

    # A name written with \u escapes would pass for another one and repeat a listed property.
    escapes = 'nrbtf\\"' + ("u" if needs_unicode_escapes(schema_text) else "")
    return LLMatcher.grammar_from_json_schema(
        schema_text,
        overrides={
            "lenient": False,
            "coerce_one_of": False,
            "whitespace_pattern": _WHITESPACE,
            "json_allowed_escapes": escapes,
        },
    )
