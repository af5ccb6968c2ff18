"""`StructuredOutput`: exactly one form, limits, and every schema keyword either enforced or refused by its name."""

from __future__ import annotations

import copy
import json
import pickle
import time
import types
from typing import Any

import pytest

from edgellm.errors import InvalidArgumentError
from edgellm.sampling.guidance import Guidance
from edgellm.sampling.literal_length import MAX_LITERAL_BYTES
from edgellm.sampling.params import SamplingParams
from edgellm.sampling.schema_keywords import ANNOTATIONS, ENFORCED_KEYWORDS, FORMATS, MAX_SCHEMA_DEPTH
from edgellm.sampling.structured import MAX_GUIDE_BYTES, StructuredOutput
from edgellm.testing.toy_tokenizer import ToyTokenizer

STRANGE = ['a"b', "a\\b", "a\nb", "\x00\x7f\x80", "\u2028", "猫 \U0001f600", "<|x|>"]
GUIDANCE = Guidance(ToyTokenizer(258), 258, max_cached_grammars=4)


def accepts(structured: StructuredOutput, text: str) -> bool:
    """Whether the whole of `text`, byte by byte, has the form."""
    guide = GUIDANCE.start(structured)
    for token_id in ToyTokenizer(258).encode(text):
        guide.record(token_id)
    return guide.complete


def refused(match: str, **form: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        StructuredOutput(**form)


class TestForms:
    def test_exactly_one(self):
        refused("exactly one of json_schema, json_object, regex, ebnf, choice; this one has none")
        refused("this one has regex, choice", regex="a", choice=["a"])
        refused("this one has none", json_object=False)
        refused("json_object is 1; it must be True or False", json_object=1)

    @pytest.mark.parametrize(
        ("form", "mode"),
        [
            ({"json_schema": {}}, "json_schema"),
            ({"json_object": True}, "json_object"),
            ({"regex": ""}, "regex"),
            ({"ebnf": 'start: "a"'}, "ebnf"),
            ({"choice": ["a"]}, "choice"),
        ],
    )
    def test_mode(self, form, mode):
        assert StructuredOutput(**form).mode == mode

    def test_compared_hashed_pickled_and_copied_by_value(self):
        schema = {"type": "object", "properties": {"b": {}, "a": {}}}
        made = StructuredOutput(json_schema=schema)
        assert made == StructuredOutput(json_schema=json.dumps(schema, indent=2))
        assert made != StructuredOutput(json_schema={"type": "object", "properties": {"a": {}, "b": {}}})  # the order
        assert made == StructuredOutput(json_schema=types.MappingProxyType(schema))
        listed = StructuredOutput(choice=["x", "y"])
        assert listed.choice == ("x", "y")
        for one in (made, listed):
            for twin in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
                assert (twin, hash(twin)) == (one, hash(one))
        with pytest.raises(AttributeError):
            made.regex = "a"  # type: ignore[misc]

    def test_a_schema_is_a_copy(self):
        schema = {"type": "integer"}
        made = StructuredOutput(json_schema=schema)
        schema["type"] = "string"
        assert made.json_schema == '{"type":"integer"}'

    @pytest.mark.parametrize("name", ["regex", "ebnf", "json_schema", "choice"])
    def test_size_limit(self, name):
        long = "a" * (MAX_GUIDE_BYTES + 1)
        value = {"json_schema": {"title": long}, "choice": ["a", long], "regex": long, "ebnf": f'start: "{long}"'}[name]
        refused(f"{name} has [0-9]+ bytes, the limit is 131072; shorten it", **{name: value})

    def test_the_limit_itself_is_allowed(self):
        texts = tuple(
            f"{number:016}" * (MAX_LITERAL_BYTES // 16) for number in range(MAX_GUIDE_BYTES // MAX_LITERAL_BYTES)
        )
        assert StructuredOutput(choice=texts).choice == texts
        refused("131074 bytes", choice=["a" * (MAX_GUIDE_BYTES - 2), "é", "é"])

    @pytest.mark.parametrize(
        ("form", "match"),
        [
            ({"regex": 5}, "regex is a int; it must be text"),
            ({"ebnf": b"x"}, "ebnf is a bytes; it must be text"),
            ({"regex": "\ud800"}, "regex is not valid Unicode text"),
            ({"choice": []}, "choice is empty; give at least one text"),
            ({"choice": "ab"}, "choice is 'ab'; it must be a list of texts"),
            ({"choice": ["a", ""]}, "choice contains ''"),
            ({"choice": ["a", 5]}, "choice contains 5"),
            ({"json_schema": 5}, "json_schema is a int; pass a dict or JSON text"),
            ({"json_schema": "{"}, "json_schema is not JSON: .* line 1 column 2"),
            (
                {"json_schema": '{"type":"string","type":"integer"}'},
                "json_schema has the key 'type' twice in one object",
            ),
            ({"json_schema": '{"const":{"a":1,"b":{"c":1,"c":1}}}'}, "json_schema has the key 'c' twice"),
            ({"json_schema": {"const": {1: 2, "1": 3}}}, "json_schema has the key '1' twice"),
            ({"json_schema": "5"}, "json_schema is 5; the whole schema must be an object"),
            ({"json_schema": "true"}, "json_schema is true; the whole schema must be an object"),
            ({"json_schema": {"const": float("nan")}}, "cannot be written as JSON: Out of range"),
            ({"json_schema": {"enum": [{1}]}}, "cannot be written as JSON: a set is no JSON value"),
        ],
    )
    def test_wrong_values(self, form, match):
        refused(match, **form)

    @pytest.mark.parametrize(
        ("form", "match"),
        [
            ({"regex": "("}, r"^regex '\(' cannot be enforced: unclosed group; change that part$"),
            (
                {"regex": "a/\n[z-a]"},
                r"^regex 'a/\\n\[z-a\]' cannot be enforced: invalid character class range, the start",
            ),
            ({"regex": r"\bfoo"}, r"^regex '.*foo' cannot be enforced: lookarounds not supported yet; WordUnicode;"),
            ({"regex": r"(a)\1"}, "cannot be enforced: backreferences are not supported; change that part$"),
            ({"regex": "a" * 500 + "("}, "^regex '(?=.{,90}cannot)a{40,}.* cannot be enforced: unclosed group"),
            ({"ebnf": "start: foo"}, '^ebnf cannot be enforced: line 1, column 8: unknown name: "foo"'),
            ({"ebnf": 'start: "a" |\n "'}, "^ebnf cannot be enforced: line 2, column 3: lexer error"),
            ({"ebnf": 'root ::= "a" foo\nfoo ::= [z-a]'}, "^ebnf cannot be enforced: (?!line)"),
            ({"ebnf": "root ::= foo"}, "ebnf cannot be read: .*Rule 'foo' not found"),
            ({"ebnf": "garbage"}, "ebnf cannot be read"),
            ({"ebnf": "start: x\nx[temperature=0.5]: /a+/"}, "ebnf sets temperature on a rule"),
            ({"ebnf": 'start: x "b"\nx[lazy, stop="b"]: /a+/'}, "ebnf sets stop on a rule"),
            ({"ebnf": 'start: x "b"\nx[suffix="]", temperature=0.5]: /a+/'}, "ebnf sets temperature on a rule"),
            ({"ebnf": 'start: x "b"\nx[suffix="\\"]", temperature=0.5]: /a+/'}, "ebnf sets temperature on a rule"),
            ({"ebnf": 'start: x "b"\n  x[suffix=/]/, temperature=0.5]: /a+/'}, "ebnf sets temperature on a rule"),
            ({"ebnf": 'start: %json {"uniqueItems": true}'}, 'Unimplemented keys: ."uniqueItems"'),
            (
                {"ebnf": 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'},
                'ebnf cannot be enforced: Unimplemented keys: ."uniqueItems"',
            ),
        ],
    )
    def test_what_does_not_compile(self, form, match):
        refused(match, **form)

    @pytest.mark.parametrize("suffix", ['"stop=1"', "/stop=b/", '"[temperature=0.5]"'])
    def test_what_only_looks_like_a_refused_attribute_is_none(self, suffix):
        assert StructuredOutput(ebnf=f"start: x\nx[suffix={suffix}]: /a+/").mode == "ebnf"

    def test_a_grammar_of_blank_lines_is_read_at_once(self):
        """Looking at the lines behind each line were 8 * 10**9 steps, minutes instead of this."""
        started = time.process_time()
        assert StructuredOutput(ebnf='start: "a"' + "\n" * 128_000).mode == "ebnf"
        assert time.process_time() - started < 10

    def test_messages_have_one_line(self):
        with pytest.raises(InvalidArgumentError) as caught:
            StructuredOutput(ebnf='start: "a"\n  b\n')
        assert "\n" not in str(caught.value)


class TestTexts:
    @pytest.mark.parametrize(
        ("form", "good", "bad"),
        [
            ({"regex": r"[ab]{2}"}, ["ab", "bb"], ["", "a", "abc", "xab"]),
            ({"regex": r"^a|b$"}, ["a", "b"], ["ab"]),
            ({"regex": "a/b\n[é猫]"}, ["a/b\né", "a/b\n猫"], ["a/b\n", "a/b\nx"]),
            ({"regex": ""}, [""], ["a"]),
            ({"choice": STRANGE}, STRANGE, ["a", "", "<|x|>x"]),
            ({"choice": ["a", "ab"]}, ["a", "ab"], ["b", "aba"]),
            ({"json_object": True}, ["{}", '{\n  "a": "\\n"\n}'], ["[]", "1", '{"a"}', " {}", "{} "]),
            ({"json_schema": {}}, ["1", '"x"'], ["", "x"]),
            ({"ebnf": 'start: "(" start ")" | "x"'}, ["x", "((x))"], ["(x", "()"]),
            ({"ebnf": 'root ::= "x" [0-9]+ ws "y"\nws ::= " "*'}, ["x1y", "x12  y"], ["xy", "x1"]),
        ],
    )  # fmt: skip
    def test_exact(self, form, good, bad):
        structured = StructuredOutput(**form)
        assert [text for text in good if not accepts(structured, text)] == []
        assert [text for text in bad if accepts(structured, text)] == []

    def test_whitespace_of_json_is_bounded(self):
        array = StructuredOutput(json_schema={"type": "array"})
        assert accepts(array, "[1," + " " * 20 + "2]")
        assert not accepts(array, "[1," + " " * 21 + "2]")

    def test_a_listed_property_cannot_come_twice_in_another_spelling(self):
        schema = StructuredOutput(json_schema={"type": "object", "properties": {"a\nb": {"type": "integer"}}})
        assert accepts(schema, '{"a\\nb": 1, "c": "x"}')
        for name in ("a\\nb", "a\\u000ab", "\\u0061\\nb"):
            assert not accepts(schema, f'{{"a\\nb": 1, "{name}": "x"}}')

    def test_control_characters_of_a_schema_can_be_written(self):
        assert accepts(StructuredOutput(json_schema={"enum": ["a\x01"]}), '"a\\u0001"')


# Each enforced keyword: a schema that needs it, values it allows and values it does not.
ENFORCED: dict[str, tuple[Any, list[str], list[str]]] = {
    "$anchor": ({"$ref": "#n", "$defs": {"a": {"$anchor": "n", "type": "integer"}}}, ["1"], ['"x"']),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, ["1"], ['"x"']),
    "$id": ({"$id": "http://x/y", "$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, ["1"], ['"x"']),
    "$ref": (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
        ["[]", "[[], [[]]]"],
        ["1", "[1]"],
    ),
    "additionalItems": ({"items": [{"type": "integer"}], "additionalItems": False}, ["[1]"], ["[1,2]"]),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        ['{"a":"x","b":1}'],
        ['{"a":"x","b":"y"}'],
    ),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ["3"], ["2", '"x"']),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["3", "null"], ['"x"']),
    "const": ({"const": {"a": [1, "x"]}}, ['{"a": [1, "x"]}'], ["1", '{"a": []}']),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "integer"}}}, ["1"], ['"x"']),
    "enum": ({"enum": [1, "a", None]}, ["1", '"a"', "null"], ["2", '"b"']),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 5}, ["4.9", "-7"], ["5", "5.0", "6"]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, ["6", "100"], ["5", "-6"]),
    "format": ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"x"', '"2024-13-01"']),
    "items": ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ['[1, "x"]']),
    "maxItems": ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1, 2]"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"猫猫"'], ['"abc"']),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    "maximum": ({"type": "integer", "maximum": 5}, ["5", "-10"], ["6", "50"]),
    "minItems": ({"type": "array", "minItems": 1}, ["[1]"], ["[]"]),
    "minLength": ({"type": "string", "minLength": 2}, ['"ab"'], ['"a"']),
    "minProperties": ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    "minimum": ({"type": "number", "minimum": 0.5}, ["0.5", "1"], ["0.4", "-1"]),
    "multipleOf": ({"type": "integer", "multipleOf": 5, "maximum": 100}, ["0", "15", "-5"], ["12", "105"]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"x"'], ["null"]),
    "pattern": ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"ab"', '""']),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
        ['{"ab":1}'],
        ['{"b":1}', '{"ab":"x"}'],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": False, "minItems": 1},
        ["[1]"],
        ["[]", '["x"]', "[1,2]"],
    ),
    "properties": ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"a":1}', "{}"], ['{"a":"x"}']),
    "required": ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, ['{"a":1}'], ["{}", '{"b":1}']),
    "type": ({"type": ["integer", "null"]}, ["1", "null"], ['"x"', "1.5"]),
}  # fmt: skip

FORMAT_TEXTS = {
    "date": ("2024-02-29", "2024-02-30"),
    "date-time": ("2024-02-29T10:11:12Z", "2024-02-29"),
    "duration": ("P1DT2H", "1 day"),
    "email": ("a@b.org", "a.org"),
    "hostname": ("a.b-c.org", "a b"),
    "ipv4": ("1.2.3.4", "1.2.3.400"),
    "ipv6": ("::1", "1.2"),
    "time": ("10:11:12Z", "25:00:00Z"),
    "uri": ("http://a.org/b?c", "not a uri"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
}

REFUSED = (
    "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "contains", "contentEncoding", "contentMediaType",
    "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
    "minContains", "minLenght", "not", "nullable", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems", "x-guidance",
)  # fmt: skip


class TestSchemaKeywords:
    def test_every_enforced_keyword_is_shown_here(self):
        assert set(ENFORCED) == ENFORCED_KEYWORDS
        assert set(FORMAT_TEXTS) == FORMATS
        for keyword, (schema, _, _) in ENFORCED.items():
            assert f'"{keyword}"' in json.dumps(schema)

    @pytest.mark.parametrize("keyword", sorted(ENFORCED))
    def test_enforced(self, keyword):
        schema, good, bad = ENFORCED[keyword]
        structured = StructuredOutput(json_schema=schema)
        assert [text for text in good if not accepts(structured, text)] == []
        assert [text for text in bad if accepts(structured, text)] == []

    @pytest.mark.parametrize("name", sorted(FORMATS))
    def test_formats(self, name):
        structured = StructuredOutput(json_schema={"type": "string", "format": name})
        good, bad = FORMAT_TEXTS[name]
        assert accepts(structured, json.dumps(good))
        assert not accepts(structured, json.dumps(bad))

    @pytest.mark.parametrize("keyword", REFUSED)
    def test_refused_by_name(self, keyword):
        schema = {"type": "object", "properties": {"a": {"type": "string", keyword: True}}}
        place = r"json_schema\.properties\['a'\]"
        refused(
            f"{place} has the keyword '{keyword.replace('$', '[$]')}', which cannot be enforced; ", json_schema=schema
        )

    @pytest.mark.parametrize("name", ["int32", "iri", "regex", "password", 5])
    def test_unknown_formats_are_refused(self, name):
        refused(f"has the format {name!r}; formats that are enforced: date, ", json_schema={"format": name})

    def test_annotations_change_nothing(self):
        notes = dict.fromkeys(ANNOTATIONS, "x") | {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "x-note": 1,
        }
        structured = StructuredOutput(json_schema={"type": "integer", **notes})
        assert accepts(structured, "1")
        assert not accepts(structured, '"x"')

    @pytest.mark.parametrize(
        "place",
        ["$defs", "definitions", "patternProperties", "properties", "allOf", "anyOf", "oneOf", "prefixItems", "items",
         "additionalItems", "additionalProperties"],
    )  # fmt: skip
    def test_keywords_are_found_wherever_a_schema_is(self, place):
        bad: Any = {"uniqueItems": True}
        maps, lists = (
            ("$defs", "definitions", "patternProperties", "properties"),
            ("allOf", "anyOf", "oneOf", "prefixItems"),
        )
        value = {"a": bad} if place in maps else [bad] if place in lists else bad
        refused("uniqueItems", json_schema={place: value})

    def test_values_are_no_schemas(self):
        value = {"uniqueItems": True}
        schema = {"const": value, "default": value, "examples": [value]}
        assert accepts(StructuredOutput(json_schema=schema), '{"uniqueItems": true}')
        assert accepts(StructuredOutput(json_schema={"properties": {"uniqueItems": {}}}), '{"uniqueItems": 1}')

    @pytest.mark.parametrize(
        ("schema", "match"),
        [
            ({"$ref": "http://x.org/y"}, "refers to 'http://x.org/y'; only references inside"),
            ({"$ref": 5}, "refers to 5"),
            ({"$ref": "#/$defs/none"}, "Pointer '/[$]defs/none' does not exist"),
            ({"type": "frob"}, "Invalid type: frob"),
            ({"properties": [1]}, "properties is .1.; it must be an object of schemas"),
            ({"anyOf": {}}, "anyOf is {}; it must be a list of schemas"),
            ({"items": [5]}, r"items\[0\] is 5; a schema is an object"),
            ({"type": "string", "minLength": 5, "maxLength": 3}, "Unsatisfiable schema: minLength"),
            ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf branches that may overlap .*use anyOf"),
            ({"type": "string", "pattern": "(?=a)"}, "look-around"),
            (False, "json_schema is a bool; pass a dict"),
            (
                {"properties": {"a": False}, "required": ["a"], "type": "object"},
                "required property 'a' is unsatisfiable",
            ),
            ({"patternProperties": {"^a": {}, "b$": {"type": "integer"}}}, "are not disjoint"),
            ({"minProperties": 2}, "minProperties 2 with 0 required properties; more than 1 cannot be enforced"),
            ({"minProperties": 3, "required": ["a"], "properties": {"a": {}}}, "more than 2 cannot"),
        ],
    )
    def test_values_that_cannot_be_enforced(self, schema, match):
        refused(match, json_schema=schema)

    def test_depth_is_bounded(self):
        def nested(levels: int) -> dict[str, Any]:
            schema: dict[str, Any] = {"type": "integer"}
            for _ in range(levels):
                schema = {"items": schema}
            return schema

        refused("nested more than 100 levels deep", json_schema=nested(MAX_SCHEMA_DEPTH + 1))
        refused("json_schema", json_schema=nested(5000))
        refused("json_schema", json_schema="[" * 100_000)


class TestParams:
    def test_only_a_structured_output(self):
        with pytest.raises(InvalidArgumentError, match=r"structured is a dict; pass edgellm\.StructuredOutput"):
            SamplingParams(structured={"type": "object"})  # type: ignore[arg-type]

    def test_ignore_eos_does_not_go_with_it(self):
        with pytest.raises(InvalidArgumentError, match="ignore_eos is True and structured is set"):
            SamplingParams(structured=StructuredOutput(regex="a"), ignore_eos=True)
