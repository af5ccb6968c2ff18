"""The single values (not the arrays) of a GGUF file's metadata: what a tokenizer needs beside the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgellm.models.gguf_file import GgufArray, GgufScalar, read_gguf_header

if TYPE_CHECKING:
    from pathlib import Path


def read_gguf_values(path: Path) -> dict[str, GgufScalar]:
    """Every metadata key whose value is a number, a boolean or a string.

    Raises:
        WeightFileError, UnsupportedModelError: as `read_gguf_header`.
    """
    return {key: value for key, value in read_gguf_header(path).values.items() if not isinstance(value, GgufArray)}
