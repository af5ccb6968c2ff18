"""Every numbered behaviour of the session and of the scheduler has a test that says so in its name.

`test_behaviour_<n>_...` tests number n; `test_behaviours_<n>_and_<m>_...` and `..._<n>_to_<m>_...` test several.  Both
lists count from 1, so the file decides which of them a name belongs to: see `FILES`.  In other files the name says it:
`test_session_behaviour_<n>_...`, `test_scheduler_behaviour_<n>_...`.  A name may begin with a number of the context
cache's list, which `test_behaviour_numbers.py` counts.  The list of the decoders (`test_decoder_behaviour_<n>_...`) is
not counted here.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from test_behaviour_numbers import ROOT, test_functions

LAST = {"session": 90, "scheduler": 46}  # 47 to 51 of the scheduler are about an HTTP server
FILES = {
    "session": (
        "test_slots",
        "test_plan_check",
        "test_*session*",
        "test_admission*",
        "test_finish*",
        "test_growth",
        "test_speculative*",
    ),
    "scheduler": (
        "test_command_queue",
        "test_engine*",
        "test_backlog*",
        "test_compatibility",
        "test_step_planner*",
        "test_step_cost*",
        "test_stream*",
        "test_deadlines*",
        "test_scheduling*",
    ),
}
NAME = re.compile(r"test_(?:\d+_(?:and_\d+_)*)?(session_|scheduler_)?behaviours?_(\d+)((?:_(?:and|to)_\d+)*)_[a-z]")
NEARLY = re.compile(r"(?<!decoder_)behaviours?_\d")

pytestmark = pytest.mark.skipif(
    not (ROOT / "plugins").is_dir(), reason="the plugins are not beside an installed package"
)


def owner(stem: str) -> str | None:
    """The list whose numbers a file's names are; None where each name must say it.

    Raises:
        ValueError: both lists claim the file.
    """
    owners = [name for name, patterns in FILES.items() if any(fnmatch(stem, pattern) for pattern in patterns)]
    if len(owners) > 1:
        raise ValueError(f"{stem} belongs to both lists")
    return owners[0] if owners else None


def numbers(name: str, owned_by: str | None) -> set[tuple[str | None, int]]:
    """(list, number) that a test's name says it tests; the list is None where nothing tells it."""
    found = NAME.match(name)
    if found is None:
        return set()
    which = found[1].removesuffix("_") if found[1] else owned_by
    last = int(found[2])
    named = {last}
    for word, text in re.findall(r"_(and|to)_(\d+)", found[3]):
        number = int(text)
        named |= set(range(last, number + 1)) if word == "to" else {number}
        last = number
    return {(which, number) for number in named}


def names_by_file() -> dict[Path, list[str]]:
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if not path.stem.startswith("test_behaviour")]
    return {path: test_functions(path.read_text(encoding="utf-8")) for path in files}


@pytest.mark.parametrize("which", LAST)
def test_every_behaviour_has_a_test_and_no_other_number_is_named(which: str) -> None:
    named = {
        number
        for path, names in names_by_file().items()
        for name in names
        for belongs_to, number in numbers(name, owner(path.stem))
        if belongs_to == which
    }
    assert sorted(set(range(1, LAST[which] + 1)) - named) == []
    assert sorted(named - set(range(1, LAST[which] + 1))) == []


def test_each_name_belongs_to_one_list() -> None:
    homeless = [
        name
        for path, names in names_by_file().items()
        for name in names
        if any(belongs_to is None for belongs_to, _ in numbers(name, owner(path.stem)))
    ]
    assert homeless == []


def test_no_name_hides_a_number() -> None:
    """`test_x_behaviour_3_y` would not count; `test_behaviour_3_4_x` might count as 3 alone."""
    every = [name for names in names_by_file().values() for name in names]
    hidden = [name for name in every if NEARLY.search(name) and not numbers(name, None)]
    assert hidden == []


def test_names_are_read_as_they_are_meant() -> None:
    def of_session(name: str) -> list[int]:
        return sorted(number for which, number in numbers(name, "session") if which == "session")

    assert of_session("test_behaviour_7_x") == [7]
    assert of_session("test_164_behaviour_8_x") == [8]
    assert of_session("test_162_and_163_behaviours_10_and_11_x") == [10, 11]
    assert of_session("test_behaviours_67_to_69_and_80_x") == [67, 68, 69, 80]
    assert of_session("test_scheduler_behaviour_18_x") == []
    assert numbers("test_scheduler_behaviour_18_x", None) == {("scheduler", 18)}
    assert numbers("test_behaviour_18_x", None) == {(None, 18)}
    for name in ("test_behaviour_3_4_x", "test_my_behaviour_3_x", "test_behaviour_numbers"):
        assert numbers(name, "session") == set()
    assert owner("test_rank_session") == "session"
    assert owner("test_step_planner_properties") == "scheduler"
    assert owner("test_cache_manager") is None
