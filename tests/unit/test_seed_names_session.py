"""Every name in the table of `docs/seed-names-session.md` exists."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "seed-names-session.md"
ROWS = re.findall(r"^\| `([^`]+)` \| `(edgellm\.[\w.]+)` \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def resolve(path: str) -> object:
    """The object a dotted name stands for; raises AttributeError or ImportError when there is none."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            if dataclasses.is_dataclass(found) and name in {field.name for field in dataclasses.fields(found)}:
                return name
            found = getattr(found, name)
        return found
    raise ImportError(path)


def test_the_table_is_complete() -> None:
    assert len(ROWS) == 78
    assert len({published for published, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("published", "ours"), ROWS, ids=[published for published, _ in ROWS])
def test_name_exists(published: str, ours: str) -> None:
    assert resolve(ours) is not None


def test_a_missing_name_is_noticed() -> None:
    with pytest.raises(AttributeError):
        resolve("edgellm.session.types.StepResult.no_such_field")
    with pytest.raises(AttributeError):
        resolve("edgellm.session.types.NoSuchName")
