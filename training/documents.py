"""The corpus: plain text documents of two Debian packages and of the standard library, in a fixed order."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELD_OUT_SHARE = 40  # one document of so many
SYNSETS_PER_DOCUMENT = 40
LEAST_CHARACTERS = 400
MOST_FILE_CHARACTERS = 200_000
# Tests and tables of characters repeat themselves; the third party packages are no standard library.
_SKIPPED = ("test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__", "pydoc_data")
_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")


@dataclass(frozen=True, slots=True)
class Document:
    """A text of one origin.

    Attributes:
        source: "docs", "wordnet" or "library".
        name: unique; the split depends on it alone.
    """

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return int(digest(self.name)[:8], 16) % HELD_OUT_SHARE == 0


def digest(text: str) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()


def python_docs(root: Path) -> Iterator[Document]:
    """The sources of Python's documentation, in reStructuredText as written.

    Args:
        root: of the unpacked package python3.11-doc.
    """
    folder = root / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(folder.rglob("*.rst.txt")):
        name = f"docs/{path.relative_to(folder).as_posix()}"
        if name.startswith("docs/whatsnew/changelog"):
            continue  # a list of thousands of bug titles
        yield from _document("docs", name, clean(without_markup(path.read_text("utf-8"))))


def without_markup(text: str) -> str:
    """reStructuredText without what only its processor reads: labels, index entries, comments, roles of names."""
    text = re.sub(
        r"(?m)^ *\.\. (_|index::|highlight::|sectionauthor::|moduleauthor::|(?!\S+::)).*\n(?: {3,}\S.*\n)*", "", text
    )
    return re.sub(r"(?::[\w+.-]+)+:`[~!]?([^`<]*?)(?: <[^`>]*>)?`", r"\1", text)


def wordnet(root: Path) -> Iterator[Document]:
    """Words and their glosses, `SYNSETS_PER_DOCUMENT` a document, one a line.

    Args:
        root: of the unpacked package wordnet-base.
    """
    for part in _PARTS_OF_SPEECH:
        lines = (root / f"usr/share/wordnet/data.{part}").read_text("latin-1").splitlines()
        entries = [wordnet_entry(line) for line in lines if not line.startswith("  ")]  # the licence is indented
        for start in range(0, len(entries), SYNSETS_PER_DOCUMENT):
            text = "\n".join(entries[start : start + SYNSETS_PER_DOCUMENT])
            yield from _document("wordnet", f"wordnet/{part}/{start:06d}", text)


def wordnet_entry(line: str) -> str:
    """ "dog, domestic dog: a member of the genus ..." of a line of a data file (see wndb(5) for its fields)."""
    fields, _, gloss = line.partition("|")
    parts = fields.split()
    count = int(parts[3], 16)
    words = [re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in parts[4 : 4 + 2 * count : 2]]
    return f"{', '.join(words)}: {gloss.strip()}"


def standard_library(root: Path) -> Iterator[Document]:
    """Python files of a standard library.

    Args:
        root: folder that holds `os.py`.
    """
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if not any(part in _SKIPPED for part in inner.parts):
            text = path.read_text("utf-8", errors="replace")
            yield from _document("library", f"library/{inner.as_posix()}", clean(text))


def clean(text: str) -> str:
    """Line ends and blanks made uniform, control characters and runs of blank lines removed."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]", "", text.replace("\r\n", "\n").replace("\f", ""))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _document(source: str, name: str, text: str) -> Iterator[Document]:
    if len(text) >= LEAST_CHARACTERS:
        yield Document(source, name, text[:MOST_FILE_CHARACTERS])
