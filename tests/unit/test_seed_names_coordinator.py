"""Every name that the coordinator's name table gives as ours exists; every "next" says what it waits for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

TABLE = Path(__file__).resolve().parents[2] / "docs" / "seed-names-coordinator.md"

pytestmark = pytest.mark.skipif(not TABLE.is_file(), reason="the documentation is not beside an installed package")


def table_rows():
    """(name on the page, ours, note) of each row before the section on differing rules."""
    if not TABLE.is_file():
        return []
    text = TABLE.read_text(encoding="utf-8").split("## Rules that differ")[0]
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(cells[0].strip("` "), cells[1].strip("` "), (cells[2:] or [""])[0].strip("| ")) for cells in rows]


def names():
    return sorted({ours for _, ours, _ in table_rows() if ours not in ("next", "none")})


def look_up(dotted):
    """The object behind a dotted path: the longest importable module, then attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if name in getattr(found, "__dataclass_fields__", {}):
                return found.__dataclass_fields__[name]
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def test_the_table_is_complete_enough_to_be_the_page():
    assert len(table_rows()) > 120
    assert len(names()) > 110
    pages = {page for page, _, _ in table_rows()}
    for method in ("beginRequest", "admitSequence", "compactBatch", "retractSequenceAdmission", "shutdown"):
        assert method in pages


@pytest.mark.parametrize("dotted", names())
def test_our_name_exists(dotted):
    look_up(dotted)


def test_look_up_notices_a_missing_name():
    with pytest.raises(AttributeError):
        look_up("edgellm.cache.coordinator.ContextCacheCoordinator.begin_requests")


def test_what_is_missing_says_where_it_comes_from():
    for page, ours, note in table_rows():
        if ours in ("next", "none"):
            assert note, f"{page} is {ours!r} without a note"
