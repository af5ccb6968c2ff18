"""The documentation's links lead somewhere, its pictures can be shown, and its policy passes the suite."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
SVG = "{http://www.w3.org/2000/svg}"

pytestmark = pytest.mark.skipif(
    not (ROOT / "README.md").is_file(), reason="the documentation is not beside an installed package"
)

PATTERNS = ("*.md", "docs/*.md", "plugins/*/README.md", "changelog/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
PICTURES = sorted(ROOT.glob("docs/images/*.svg"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_self_contained_described_and_readable_on_any_ground(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert root.tag == f"{SVG}svg"
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert not tags & {"image", "script", "foreignObject", "a"}
    links = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)
    assert has_white_paper(root)  # its own ground: dark text on light paper in either theme


def has_white_paper(root: ElementTree.Element) -> bool:
    """Whether the first shape of the picture is a white sheet of the picture's own size."""
    shapes = (element for element in root.iter() if element.tag in {f"{SVG}rect", f"{SVG}path"})
    shape = next(element for element in shapes if is_white(element))  # before it: arrow heads, in <defs>
    if shape.tag == f"{SVG}rect":
        size = (float(shape.get("width", 0)) + 1, float(shape.get("height", 0)) + 1)
        return size == (float(root.get("width", 0)), float(root.get("height", 0)))
    width, height = root.get("viewBox", "").split()[2:]
    corners = set(re.findall(r"[ML] ([\d.]+ [\d.]+)", shape.get("d", "")))
    sheet = {f"0 {height}", f"{width} {height}", f"{width} 0", "0 0"}
    return corners == sheet


def is_white(element: ElementTree.Element) -> bool:
    return "#ffffff" in (element.get("fill"), element.get("style", "").removeprefix("fill: "))


@pytest.mark.parametrize("name", ["chain", "lease", "publication", "eviction", "copied-tail", "checkpoint"])
def test_the_page_about_the_cache_shows_every_picture(name: str) -> None:
    page = (ROOT / "docs" / "how-the-cache-works.md").read_text(encoding="utf-8")
    assert f"(images/{name}.svg)" in page


@pytest.mark.parametrize("name", ["step", "request-states", "budget"])
def test_the_page_about_session_and_engine_shows_every_picture(name: str) -> None:
    page = (ROOT / "docs" / "session-and-engine.md").read_text(encoding="utf-8")
    assert f"(images/{name}.svg)" in page


def test_every_scheduling_option_is_on_the_page() -> None:
    from edgellm.engine.config import EngineConfig, SchedulingOptions

    page = (ROOT / "docs" / "session-and-engine.md").read_text(encoding="utf-8")
    options = dataclasses.fields(SchedulingOptions)
    assert [option.name for option in options if option.name not in page] == []
    for name in ("max_pending_requests", "command_queue_capacity", "max_replays", "max_reopen_attempts"):
        assert name in page
        assert name in {entry.name for entry in dataclasses.fields(EngineConfig)}


def test_the_policy_on_the_page_is_complete_and_conforms() -> None:
    from edgellm.cache import policy, types
    from edgellm.testing.conformance import PolicyConformance

    page = (ROOT / "docs" / "write-a-policy.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(class MyPolicy.*?)```", page, re.DOTALL)
    assert source is not None
    names = {**vars(types), "PublicationPolicy": policy.PublicationPolicy}
    exec(source[1], names)
    suite = type("Suite", (PolicyConformance,), {"policy": names["MyPolicy"]})
    tests = [name for name in dir(suite) if name.startswith("test_")]
    assert len(tests) >= 20
    for name in tests:
        getattr(suite(), name)()
