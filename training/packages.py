"""Debian packages as a source of text: downloaded once by apt, unpacked without being installed."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("python3.11-doc", "wordnet-base")


def fetch_packages(folder: Path) -> dict[str, Path]:
    """The root of each unpacked package; what is there already is not fetched again.

    Raises:
        RuntimeError: apt cannot fetch one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return {name: _unpack(folder, name) for name in PACKAGES}


def _unpack(folder: Path, name: str) -> Path:
    root = folder / name
    if root.is_dir():
        return root
    archives = sorted(folder.glob(f"{name}_*.deb"))
    if not archives:
        _run(["apt-get", "download", name], folder, name)
        archives = sorted(folder.glob(f"{name}_*.deb"))
    staging = folder / f"{name}.partial"
    _run(["dpkg-deb", "-x", str(archives[-1].resolve()), str(staging.resolve())], folder, name)
    staging.rename(root)
    return root


def _run(command: list[str], folder: Path, name: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed: {done.stderr.strip()[-400:]}; put {name}_*.deb into {folder} by hand"
        )
