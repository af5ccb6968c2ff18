"""Every numbered behaviour of the context cache has a test that says so in its name.

`test_<n>_...` (or `test_<n>_and_<m>_...`) tests number n of the context cache's list; `test_behaviour_<n>_...` tests a
number of the session's or the scheduler's list, which count from 1 again.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAST_BEHAVIOUR = 173
NAME = re.compile(r"test_(\d+(?:_and_\d+)*)_[a-z]")
UNCLEAR = re.compile(r"test_\d+(?:_and_\d+)*_(?:to_)?\d")

pytestmark = pytest.mark.skipif(
    not (ROOT / "plugins").is_dir(), reason="the plugins are not beside an installed package"
)


def test_functions(source: str) -> list[str]:
    """Names of the tests in a module, its classes' included, as pytest collects them."""
    names = []
    for node in ast.parse(source).body:
        members = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
        for member in members:
            if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)) and member.name.startswith("test_"):
                names.append(member.name)
    return names


test_functions.__test__ = False  # type: ignore[attr-defined]


def numbers(name: str) -> set[int]:
    found = NAME.match(name)
    return {int(number) for number in found[1].split("_and_")} if found else set()


def all_names() -> list[str]:
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "plugins").glob("*/tests/**/test_*.py")]
    return [name for file in sorted(files) for name in test_functions(file.read_text(encoding="utf-8"))]


def test_every_behaviour_has_a_test_and_no_other_number_is_named() -> None:
    named: set[int] = set().union(*(numbers(name) for name in all_names()))
    assert sorted(set(range(1, LAST_BEHAVIOUR + 1)) - named) == []
    assert sorted(named - set(range(1, LAST_BEHAVIOUR + 1))) == []


def test_no_name_hides_a_number() -> None:
    """`test_3_to_5_x` and `test_3_4_x` would count as 3 alone."""
    assert [name for name in all_names() if UNCLEAR.match(name)] == []


def test_names_are_read_as_pytest_reads_them() -> None:
    source = """
def test_7_x(): ...
def helper_8_x(): ...
def outer():
    def test_9_x(): ...
class TestA:
    def test_10_and_11_and_12_x(self): ...
class Rig:
    def test_13_x(self): ...
async def test_14_x(): ...
def test_behaviour_15_x(): ...
def test_162_behaviour_12_x(): ...
"""
    names = test_functions(source)
    assert names == [
        "test_7_x",
        "test_10_and_11_and_12_x",
        "test_14_x",
        "test_behaviour_15_x",
        "test_162_behaviour_12_x",
    ]
    assert [numbers(name) for name in names] == [{7}, {10, 11, 12}, {14}, set(), {162}]
    for name in ("test_3_to_5_x", "test_3_4_x", "test_3_and_4_5_x"):
        assert UNCLEAR.match(name)
    assert not UNCLEAR.match("test_3_and_4_of_5_x")
