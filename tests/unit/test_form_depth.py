"""How deep and long forms may be: deep ones are refused before the grammar engine's stack ends, cycles are none."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import pytest

from edgellm.errors import InvalidArgumentError
from edgellm.sampling import deep_stack, structured
from edgellm.sampling.deep_stack import on_deep_stack
from edgellm.sampling.form_depth import MAX_FORM_DEPTH, GrammarShape, grammar_shape, schema_depth
from edgellm.sampling.guidance import Guidance
from edgellm.sampling.literal_length import MAX_LITERAL_BYTES, regex_literal_bytes, schema_literal_bytes
from edgellm.sampling.structured import MAX_GUIDE_BYTES, StructuredOutput
from edgellm.testing.toy_tokenizer import ToyTokenizer

REF = {"$ref": "#/$defs/%d"}


def ref_chain(size: int, step: Any = REF) -> dict[str, Any]:
    """Definitions of which each refers to the next one; `step` says how."""
    text = json.dumps(step)
    defs = {str(number): json.loads(text.replace("%d", str(number + 1))) for number in range(size)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(size): {"type": "string"}}}


def rule_chain(size: int, body: str = "%s", name: str = "a") -> str:
    """Rules of which each uses the next one."""
    rules = [f"{name}{number}: {body % f'{name}{number + 1}'}" for number in range(size)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{size}: "y"'])


def anchor_chain(size: int) -> dict[str, Any]:
    defs = {str(number): {"$anchor": f"a{number}", "$ref": f"#a{number + 1}"} for number in range(size)}
    return {"$ref": "#a0", "$defs": {**defs, "z": {"$anchor": f"a{size}", "type": "string"}}}


def property_chain(size: int) -> dict[str, Any]:
    named = {f"a{number}": {"$ref": f"#/properties/a{number + 1}"} for number in range(size)}
    return {"type": "object", "properties": {**named, f"a{size}": {"type": "string"}}}


CHAINS: dict[str, Any] = {
    "ref": lambda size: {"json_schema": ref_chain(size)},
    "ref beside others": lambda size: {"json_schema": ref_chain(size, {**REF, "minLength": 1})},
    "anchor": lambda size: {"json_schema": anchor_chain(size)},
    "ref to a property": lambda size: {"json_schema": property_chain(size)},
    "allOf": lambda size: {"json_schema": ref_chain(size, {"allOf": [REF]})},
    "anyOf": lambda size: {"json_schema": ref_chain(size, {"anyOf": [REF, {"type": "null"}]})},
    "items": lambda size: {"json_schema": ref_chain(size, {"items": REF})},
    "properties": lambda size: {"json_schema": ref_chain(size, {"properties": {"a": REF}})},
    "additionalProperties": lambda size: {"json_schema": ref_chain(size, {"additionalProperties": REF})},
    "rule": lambda size: {"ebnf": rule_chain(size)},
    "rule with others": lambda size: {"ebnf": rule_chain(size, '%s "b" | "x"')},
    "optional rule": lambda size: {"ebnf": rule_chain(size, '"b" %s?')},
    "repeated rule": lambda size: {"ebnf": rule_chain(size, "%s{2,3}")},
    "bracketed rule": lambda size: {"ebnf": rule_chain(size, "((%s))")},
    "terminal": lambda size: {"ebnf": rule_chain(size, name="A")},
    "schema in a grammar": lambda size: {"ebnf": f"start: %json {json.dumps(ref_chain(size))}"},
    "grammar in a grammar": lambda size: {"ebnf": f"start: %lark {{ {rule_chain(size)}\n}}"},
}


class TestForms:
    # 3000 of most of these ended the process: the engine recurses.
    @pytest.mark.parametrize("kind", CHAINS)
    @pytest.mark.parametrize("size", [MAX_FORM_DEPTH, 1200])
    def test_deep_chains_are_refused(self, kind, size):
        with pytest.raises(InvalidArgumentError, match=r"nests \d+ levels deep .*, the limit is 512; shorten chains"):
            StructuredOutput(**CHAINS[kind](size))

    @pytest.mark.parametrize("kind", CHAINS)
    def test_chains_within_the_limit_compile(self, kind):
        assert StructuredOutput(**CHAINS[kind](100))

    @pytest.mark.parametrize("kind", ["ref", "rule", "terminal"])
    def test_the_limit_itself(self, kind):
        size = MAX_FORM_DEPTH - 2
        form = StructuredOutput(**CHAINS[kind](size))
        assert Guidance(ToyTokenizer(300), 300).start(form)
        with pytest.raises(InvalidArgumentError, match="nests 513 levels deep"):
            StructuredOutput(**CHAINS[kind](size + 1))

    @pytest.mark.parametrize(
        "form",
        [
            {"regex": "(" * 20_000 + "a" + ")" * 20_000},
            {"regex": "a" + "*" * 60_000},
            {"ebnf": "start: /" + "(b" * 20_000 + ")?" * 20_000 + "/"},
            {"ebnf": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
            {"ebnf": "start: " + "[" * 20_000 + '"a"' + "]" * 20_000},
            {"ebnf": "start: " + "a{" * 20_000 + '"x"' + "}" * 20_000 + "\na{p}: p"},
            {"ebnf": "start: a::0\na::_: %if " + "not(" * 20_000 + "true" + ")" * 20_000 + ' "x"'},
            {"ebnf": "start: A\nA: " + "~" * 60_000 + '"a"'},
            {"ebnf": "start: " + "%lark { start: " * 5_000 + '"a"' + "}" * 5_000},
            {"ebnf": "start: %json " + '{"items":' * 9_000 + "{}" + "}" * 9_000},
            {"json_schema": {"type": "string", "pattern": "(b" * 10_000 + ")?" * 10_000}},
            {"json_schema": '{"const":' + "[" * 40_000 + "]" * 40_000 + "}"},
        ],
    )
    def test_deep_brackets_are_refused(self, form):
        with pytest.raises(InvalidArgumentError):
            StructuredOutput(**form)

    def test_recursive_forms_are_not_deep(self):
        tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
        names = [f"n{number}" for number in range(200)]
        every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
        node = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/any"}}}}
        syntax = {"$ref": "#/$defs/any", "$defs": {"any": every, **dict.fromkeys(names, node)}}
        rules = "\n".join(f'n{number}: "{number}" "(" any ")"' for number in range(1000))
        grammar = f"start: any\nany: {' | '.join(f'n{number}' for number in range(1000))}\n{rules}"
        assert (schema_depth(tree), schema_depth(syntax), grammar_shape(grammar).depth) == (2, 6, 3)
        for form in ({"json_schema": tree}, {"json_schema": syntax}, {"ebnf": grammar}):
            assert StructuredOutput(**form)

    def test_looking_takes_linear_time(self):
        started = time.process_time()
        for unit in ("/\\", '"\n', "a:a\n", "(", "<", "@", "%json ", "%lark {", "%json [[1],", '"\\', "a ", ":", "#"):
            grammar_shape(unit * (MAX_GUIDE_BYTES // len(unit)))
        schema_depth({"$defs": {"a": {}}, "anyOf": [{"$ref": "#/$defs/a"}] * 20_000})
        schema_depth({"items": [{"$ref": f"#a{number}"} for number in range(20_000)]})
        assert time.process_time() - started < 20


class TestSchemaDepth:
    @pytest.mark.parametrize(
        ("schema", "depth"),
        [
            (5, 0),
            ({}, 1),
            ({"$defs": {"a": {"items": {}}}}, 1),  # nobody refers to it
            ({"items": {"items": {}}}, 3),
            ({"items": [{}, {"not a keyword": {"items": {}}}]}, 2),
            ({"properties": {"items": {"type": "string"}}}, 2),
            ({"allOf": [{"anyOf": [{"oneOf": [{}]}]}]}, 4),
            ({"$ref": "#"}, 1),
            ({"$ref": "#/$defs/a~1b%20c~0", "$defs": {"a/b c~": {"items": {}}}}, 3),
            ({"$ref": "#/allOf/1", "allOf": [{}, {"items": {}}]}, 3),
            ({"$ref": "#name", "$defs": {"x": {"$anchor": "name", "items": {}}}}, 3),
            ({"$ref": "#/nowhere"}, 1),
            ({"$ref": "#/allOf/7", "allOf": [{}]}, 2),
            ({"$ref": 5, "properties": 5, "allOf": 5}, 1),
        ],
    )
    def test_depth(self, schema, depth):
        assert schema_depth(schema) == depth


class TestGrammarShape:
    @pytest.mark.parametrize(
        ("grammar", "depth", "literal_bytes"),
        [
            ('start: "a"', 1, 1),
            ('start: b "é"i\nb: c\nc: C\nC: "x"', 4, 2),
            ('start: ((b))\nb: "x"', 4, 1),
            ('start: "a: b" | /b(abc/is | <b> // b\nb: c\nc: "x"', 1, 4),
            ('start: "x"\n  | b # c\n\n  | c\nc: d\nb: "x"\nd: "y"', 3, 1),
            ('?start: b\n!b{p,q}.5[capture="c", lazy]: c\nc: "x"', 3, 1),
            ('start: a::0\na::_: "x" a::incr(_[0:3]) | b\nb: "y"', 3, 1),
            ('start: "x"\n%ignore A\nA: B\nB: " "', 3, 1),
            ('start: %json {"items": {"const": "a: b("}} b\nb: "x"', 2, 5),
            ('start: a b\nb: %lark { start: a\na: b\nb: "x"\n}\na: "y"', 3, 1),
            ('start: b\nb: "never', 2, 0),
            ('start: "x"\nc: d\nd: e', 1, 1),  # not used
        ],
    )
    def test_shape(self, grammar, depth, literal_bytes):
        assert grammar_shape(grammar) == GrammarShape(depth, literal_bytes)


class TestLiterals:
    @pytest.mark.parametrize(
        "form",
        [
            {"choice": ["a", "é" * (MAX_LITERAL_BYTES // 2) + "a"]},
            {"json_schema": {"const": "a" * (MAX_LITERAL_BYTES + 1)}},
            {"json_schema": {"items": {"enum": [1, "a" * (MAX_LITERAL_BYTES + 1)]}}},
            {"json_schema": {"properties": {"a" * (MAX_LITERAL_BYTES + 1): {}}}},
            {"json_schema": {"required": ["a" * (MAX_LITERAL_BYTES + 1)]}},
            {"json_schema": {"pattern": "^" + "a" * (MAX_LITERAL_BYTES + 1)}},
            {"regex": "[a-z]" + "b" * (MAX_LITERAL_BYTES + 1) + "[c]*"},
            {"ebnf": 'start: "' + "b" * (MAX_LITERAL_BYTES + 1) + '"i'},
            {"ebnf": "start: /x?" + "b" * (MAX_LITERAL_BYTES + 1) + "/"},
            {"ebnf": 'start: %json {"const": "' + "b" * (MAX_LITERAL_BYTES + 1) + '"}'},
        ],
    )
    def test_a_long_one_is_refused(self, form):
        mode = next(iter(form))
        with pytest.raises(
            InvalidArgumentError, match=f"^{mode} has a literal of 16385 bytes, the limit is 16384; short"
        ):
            StructuredOutput(**form)

    def test_the_limit_itself_is_allowed(self):
        text = "a" * MAX_LITERAL_BYTES
        for form in ({"choice": [text, "b"]}, {"json_schema": {"enum": [text]}}, {"regex": text}):
            assert StructuredOutput(**form)
        assert StructuredOutput(json_schema={"description": text + "a", "default": text + "a"})

    def test_sizes(self):
        assert regex_literal_bytes("ab|é{3}[cde]") == 3
        assert schema_literal_bytes({"const": "\ud800"}) == 3
        assert schema_literal_bytes([{}]) == 0


class TestDeepStack:
    def test_results_and_errors_come_back(self):
        assert on_deep_stack(lambda: 5) == 5
        with pytest.raises(KeyError, match="x"):
            on_deep_stack(lambda: {}["x"])

    def test_the_stack_is_deep_and_those_of_other_threads_are_as_before(self):
        before = threading.stack_size()
        assert on_deep_stack(lambda: threading.current_thread().name) == "edgellm-grammar"
        assert threading.stack_size() == before

    def test_forms_that_pass_unseen_have_room(self, monkeypatch):
        """Should the depth be misjudged, the largest form still ends in an answer."""
        monkeypatch.setattr(structured, "check_depth", lambda *_: None)
        size = 0
        while len(rule_chain(size)) < MAX_GUIDE_BYTES - 2000:
            size += 100
        form = StructuredOutput(ebnf=rule_chain(size))
        assert size > 7000
        assert Guidance(ToyTokenizer(300), 300).start(form)

    @pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
    def test_without_room_for_one_it_runs_on_the_callers(self, monkeypatch, error):
        def fail(thread: threading.Thread) -> None:
            raise error

        monkeypatch.setattr(threading.Thread, "start", fail)
        before = threading.stack_size()
        assert on_deep_stack(threading.current_thread) is threading.current_thread()
        assert threading.stack_size() == before

    def test_a_size_that_the_platform_refuses(self, monkeypatch):
        monkeypatch.setattr(deep_stack, "STACK_BYTES", sys.maxsize + 1 if sys.maxsize < 2**63 - 1 else 1)
        assert on_deep_stack(threading.current_thread) is threading.current_thread()
