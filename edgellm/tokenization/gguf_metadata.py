"""The single values (not the arrays) of a GGUF file's metadata, read in milliseconds.

The `gguf` package's reader builds an object per token of the vocabulary (seconds); what a tokenizer needs
beside the vocabulary is a handful of numbers and strings.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from edgellm.errors import WeightFileError

GgufValue = int | float | bool | str

_MAGIC = b"GGUF"
_STRING_TYPE = 8
_ARRAY_TYPE = 9
_SCALAR_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"
}  # fmt: skip


def read_gguf_values(path: Path) -> dict[str, GgufValue]:
    """Every metadata key whose value is a number, a boolean or a string.

    Raises:
        WeightFileError: the file is missing, not GGUF version 2 or 3, or ends inside the metadata.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            return _Cursor(blob).values()
    except FileNotFoundError as error:
        raise WeightFileError(f"{path} does not exist; check the path or fetch the model again") from error
    except (struct.error, UnicodeDecodeError, ValueError, OSError) as error:
        if isinstance(error, WeightFileError):
            raise
        raise WeightFileError(f"{path} cannot be read as GGUF ({error}); fetch the file again") from error


class _Cursor:
    """A place in a GGUF file and the rules for moving on from it."""

    def __init__(self, blob: mmap.mmap) -> None:
        self._blob = blob
        self._at = 0

    def values(self) -> dict[str, GgufValue]:
        if self._blob[:4] != _MAGIC:
            raise WeightFileError(f"the file starts with {self._blob[:4]!r} instead of {_MAGIC!r}: not a GGUF file")
        self._at = 4
        version, _num_tensors, num_values = struct.unpack("<IQQ", self._take(20))
        if version not in (2, 3):
            raise WeightFileError(f"GGUF version {version} is not supported; versions 2 and 3 are: convert the file")
        found: dict[str, GgufValue] = {}
        for _ in range(num_values):
            key = self._string()
            value = self._value(self._uint32())
            if value is not None:
                found[key] = value
        return found

    def _value(self, kind: int) -> GgufValue | None:
        if kind == _STRING_TYPE:
            return self._string()
        if kind == _ARRAY_TYPE:
            self._skip_array()
            return None
        if kind not in _SCALAR_FORMATS:
            raise WeightFileError(f"metadata holds a value of unknown type {kind}; the file may be damaged")
        form = _SCALAR_FORMATS[kind]
        value: GgufValue = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _skip_array(self) -> None:
        kind = self._uint32()
        length = self._uint64()
        if kind in _SCALAR_FORMATS:
            self._take(length * struct.calcsize(_SCALAR_FORMATS[kind]))
        elif kind == _STRING_TYPE:
            for _ in range(length):
                self._take(self._uint64())
        elif kind == _ARRAY_TYPE:
            for _ in range(length):
                self._skip_array()
        else:
            raise WeightFileError(f"metadata holds an array of unknown type {kind}; the file may be damaged")

    def _string(self) -> str:
        return self._take(self._uint64()).decode("utf-8")

    def _uint32(self) -> int:
        value: int = struct.unpack("<I", self._take(4))[0]
        return value

    def _uint64(self) -> int:
        value: int = struct.unpack("<Q", self._take(8))[0]
        return value

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._blob):
            raise WeightFileError(f"the file ends at byte {len(self._blob)}, inside its metadata: it is truncated")
        taken = self._blob[self._at : end]
        self._at = end
        return taken
