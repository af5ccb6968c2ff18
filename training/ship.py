"""A trained student to the plugin that brings it: its export becomes part of that package."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

PLUGINS = Path(__file__).parents[1] / "plugins"
WEIGHTS = ("config.json", "model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """Where a student goes.

    Attributes:
        folder: below `plugins`, as the plugin registers it.
        files: of the export.
        most_megabytes: that they may have together.
    """

    folder: str
    files: tuple[str, ...]
    most_megabytes: int


PLACES = {
    "eagle": Place("edgellm-eagle/src/edgellm_eagle/drafts/smollm2-135m-instruct", WEIGHTS, 25),
    "assistant": Place("edgellm-shared-kv/src/edgellm_shared_kv/drafts/smollm2-135m-instruct", WEIGHTS, 16),
    "hybrid": Place("edgellm-hybrid/src/edgellm_hybrid/model", WEIGHTS + TOKENIZER, 16),
}


def ship(name: str, export: Path, plugins: Path = PLUGINS) -> list[Path]:
    """Copy a student's files to their place; returns the copies.

    Raises:
        FileNotFoundError: the export lacks a file; nothing was copied.
        ValueError: it is too large; nothing was copied.
    """
    place = PLACES[name]
    sources = [export / file for file in place.files]
    for source in sources:
        if not source.is_file():
            raise FileNotFoundError(f"{source} does not exist; train {name} first, or join the parts that came back")
    size = sum(source.stat().st_size for source in sources)
    if size > place.most_megabytes * MEGABYTE:
        raise ValueError(
            f"{export} has {size / MEGABYTE:.1f} MB, and {place.most_megabytes} MB may go into the package; "
            "export a smaller student"
        )
    folder = plugins / place.folder
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(source, folder / source.name)) for source in sources]
