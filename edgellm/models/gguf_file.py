"""The header of a GGUF file: single metadata values and where each tensor lies.  Every byte is checked.

The `gguf` package's reader builds an object per token of the vocabulary (seconds), and a damaged length can keep
it busy for ever.  Here arrays are stepped over, and nothing is believed that the file is too short for.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm.errors import UnsupportedModelError, WeightFileError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class GgufArray:
    """Stands for an array among the metadata values: its length alone."""

    length: int


GgufScalar = int | float | bool | str
GgufValue = GgufScalar | GgufArray

_MAGIC = b"GGUF"
_STRING_TYPE = 8
_ARRAY_TYPE = 9
_SCALARS = {
    number: struct.Struct(form)
    for number, form in {
        0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"
    }.items()
}  # fmt: skip
_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")
_DEEPEST_ARRAY = 4
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32

# Number in the file: name, values of a block, bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
}
SUPPORTED_TYPES = tuple(name for name, _, _ in TENSOR_TYPES.values())


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A stored tensor.

    Attributes:
        shape: slowest dimension first (the file lists the fastest first).
        offset: from the start of the file, bytes.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata values by key and tensors by name, both in the order of the file."""

    values: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a file.

    Raises:
        WeightFileError: the file is missing, no GGUF file of version 2 or 3, damaged or truncated.
        UnsupportedModelError: a tensor of a type that is not supported.
    Cost: milliseconds; a pass over the strings of the vocabulary.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise WeightFileError(f"{path} is not a GGUF file (its first bytes differ); download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                return _Cursor(blob).header()
    except FileNotFoundError as error:
        raise WeightFileError(f"{path} does not exist; check the path or fetch the model again") from error
    except OSError as error:
        raise WeightFileError(f"{path} cannot be read ({error}); check its permissions") from error
    except _Damage as damage:
        size = path.stat().st_size
        raise WeightFileError(
            f"{path} is not a readable GGUF file (damaged or truncated at {size} bytes: {damage}); download it again"
        ) from None
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None


class _Damage(Exception):
    """What is wrong with the file."""


class _Cursor:
    """A place in a GGUF file and the rules for moving on from it."""

    def __init__(self, blob: mmap.mmap) -> None:
        self._blob = blob
        self._size = len(blob)
        self._at = 4

    def header(self) -> GgufHeader:
        version = self._unsigned(_UINT32)
        if version not in (2, 3):
            raise _Damage(f"version {version} is not supported, 2 and 3 are")
        num_tensors, num_values = self._unsigned(_UINT64), self._unsigned(_UINT64)
        values: dict[str, GgufValue] = {}
        for _ in range(num_values):
            key = self._string("a metadata key")
            if key in values:
                raise _Damage(f"metadata key {key!r} stands there twice")
            values[key] = self._value(key, self._unsigned(_UINT32))
        return GgufHeader(values, self._tensors(num_tensors, _alignment(values)))

    def _value(self, key: str, kind: int) -> GgufValue:
        if kind == _STRING_TYPE:
            return self._string(f"metadata {key!r}")
        if kind == _ARRAY_TYPE:
            return GgufArray(self._skip_array(key, 1))
        if kind not in _SCALARS:
            raise _Damage(f"metadata {key!r} has the unknown type {kind}")
        value: GgufScalar = self._unpack(_SCALARS[kind])
        return value

    def _skip_array(self, key: str, depth: int) -> int:
        kind, length = self._unsigned(_UINT32), self._unsigned(_UINT64)
        if kind in _SCALARS:
            self._skip(length * _SCALARS[kind].size)
        elif kind == _STRING_TYPE:
            for _ in range(length):
                self._skip(self._unsigned(_UINT64))
        elif kind == _ARRAY_TYPE and depth < _DEEPEST_ARRAY:
            for _ in range(length):
                self._skip_array(key, depth + 1)
        else:
            raise _Damage(f"metadata {key!r} is an array of the unknown type {kind}")
        return length

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        stored: dict[str, GgufTensor] = {}
        expected = 0  # tensors follow each other without a gap but the alignment's
        for _ in range(count):
            tensor = self._tensor()
            if tensor.name in stored:
                raise _Damage(f"tensor {tensor.name!r} stands there twice")
            if tensor.offset != expected:
                raise _Damage(f"tensor {tensor.name!r} is at data offset {tensor.offset} instead of {expected}")
            expected = _aligned(tensor.offset + tensor.num_bytes, alignment)
            stored[tensor.name] = tensor
        start = _aligned(self._at, alignment)
        return {name: self._placed(tensor, start) for name, tensor in stored.items()}

    def _placed(self, tensor: GgufTensor, data_start: int) -> GgufTensor:
        begin = data_start + tensor.offset
        if begin + tensor.num_bytes > self._size:
            raise _Damage(f"tensor {tensor.name!r} ends at byte {begin + tensor.num_bytes}")
        return GgufTensor(tensor.name, tensor.shape, tensor.type_name, begin, tensor.num_bytes)

    def _tensor(self) -> GgufTensor:
        """A tensor's entry; its offset is as stored, from the start of the data."""
        name = self._string("a tensor's name")
        num_dims = self._unsigned(_UINT32)
        if not 1 <= num_dims <= _MOST_DIMENSIONS:
            raise _Damage(f"tensor {name!r} has {num_dims} dimensions")
        dims = [self._unsigned(_UINT64) for _ in range(num_dims)]
        number = self._unsigned(_UINT32)
        if number not in TENSOR_TYPES:
            raise _unsupported_type(name, number)
        type_name, block, block_bytes = TENSOR_TYPES[number]
        # Every block is at least two bytes: a tensor with more blocks than the file has bytes cannot be in it.
        if 0 in dims or dims[0] % block or math.prod(dims) // block > self._size:
            raise _Damage(f"tensor {name!r} of type {type_name} has the impossible dimensions {dims}")
        return GgufTensor(
            name, tuple(reversed(dims)), type_name, self._unsigned(_UINT64), math.prod(dims) // block * block_bytes
        )

    def _string(self, what: str) -> str:
        start, length = self._at + 8, self._unsigned(_UINT64)
        self._skip(length)
        try:
            return self._blob[start : self._at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Damage(f"{what} is not UTF-8 text ({error.reason} at byte {start + error.start})") from None

    def _unsigned(self, form: struct.Struct) -> int:
        value: int = self._unpack(form)
        return value

    def _unpack(self, form: struct.Struct) -> Any:
        start = self._at
        self._skip(form.size)
        return form.unpack_from(self._blob, start)[0]

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > self._size - self._at:
            raise _Damage(f"the header goes on beyond the end of the file, at byte {self._at + num_bytes}")
        self._at += num_bytes


def _alignment(values: dict[str, GgufValue]) -> int:
    value = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or not 8 <= value <= 1 << 20 or value & (value - 1):
        raise _Damage(f"general.alignment is {value!r}, a power of two from 8 to {1 << 20} is needed")
    return value


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


def _unsupported_type(name: str, number: int) -> UnsupportedModelError:
    import gguf

    remedy = f"supported: {', '.join(SUPPORTED_TYPES)}. Use a file quantised to one of these"
    try:
        type_name = gguf.GGMLQuantizationType(number).name
    except ValueError:
        return UnsupportedModelError(f"tensor {name!r} has a GGUF type that is not known ({number}); {remedy}")
    return UnsupportedModelError(f"tensor {name!r} has GGUF type {type_name}; {remedy}")
