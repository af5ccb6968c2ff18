"""A large file in parts that a transfer takes one by one, and together again, checked by SHA-256."""

from __future__ import annotations

import hashlib
import json
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PART_BYTES = 15 << 20


def split(path: Path, folder: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write `<name>.part0`, `.part1`, ... and `<name>.parts` (sizes and digest) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes()
    paths = []
    for number, start in enumerate(range(0, max(len(data), 1), part_bytes)):
        paths.append(folder / f"{path.name}.part{number}")
        paths[-1].write_bytes(data[start : start + part_bytes])
    about = {"parts": len(paths), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / f"{path.name}.parts").write_text(json.dumps(about) + "\n", encoding="utf-8")
    return paths


def join(folder: Path, name: str, out: Path) -> None:
    """Put `<name>` together from a folder.

    Raises:
        FileNotFoundError: a part is missing; names it.
        ValueError: the parts are not those of one file.
    """
    about = json.loads((folder / f"{name}.parts").read_text("utf-8"))
    data = b"".join((folder / f"{name}.part{number}").read_bytes() for number in range(about["parts"]))
    if hashlib.sha256(data).hexdigest() != about["sha256"]:
        raise ValueError(f"the parts of {name} in {folder} do not give the file of {about['bytes']} bytes; copy again")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data)


def archive(folder: Path, out: Path) -> Path:
    """The files of a folder in one."""
    with tarfile.open(out, "w") as file:
        for path in sorted(folder.iterdir()):
            file.add(path, path.name, recursive=False)
    return out


def unpack(path: Path, folder: Path) -> None:
    """The files of an archive into a folder; plain names alone.

    Raises:
        ValueError: an entry is no file, or would lie elsewhere.
    """
    with tarfile.open(path) as file:
        for entry in file:
            content = file.extractfile(entry) if entry.isfile() else None
            if content is None or "/" in entry.name or entry.name.startswith("."):
                raise ValueError(f"{path} holds {entry.name!r}, which is no plain file; it is none of ours")
            (folder / entry.name).write_bytes(content.read())
