"""The text of a device source and of every header of ours that it reaches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgellm.errors import KernelError
from edgellm.kernels.cu.spec import FOLDER

INCLUDE_FOLDER = FOLDER / "include"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Source:
    """A translation unit in memory: its text, and its quoted headers by the name they are included with."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]  # sorted by name


def read_source(path: Path) -> Source:
    """Read a device source with all headers that it includes in quotes, directly or not.

    Headers stand beside the source or in `include/`; names in angle brackets are the toolkit's and are not read.

    Raises:
        KernelError: the source or one of its headers is not there.
    """
    text = _read(path, wanted_by="")
    headers: dict[str, str] = {}
    pending = [(name, path.name) for name in _INCLUDE.findall(text)]
    while pending:
        name, wanted_by = pending.pop()
        if name not in headers:
            headers[name] = _read(_find(name, path.parent), wanted_by=wanted_by)
            pending += [(inner, name) for inner in _INCLUDE.findall(headers[name])]
    return Source(path.name, text, tuple(sorted(headers.items())))


def _find(name: str, folder: Path) -> Path:
    beside = folder / name
    return beside if beside.is_file() else INCLUDE_FOLDER / name


def _read(path: Path, *, wanted_by: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        origin = f", included by {wanted_by}," if wanted_by else ""
        raise KernelError(f"device source {path}{origin} cannot be read ({error}); reinstall edgellm") from error
