"""`SafetensorsSource`: a Hugging Face directory, one `model.safetensors` or shards named by an index."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.fields import parse_json_object, read_json_object, show
from edgellm.models.weights import TensorSpec, sample_file

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LARGEST_HEADER_BYTES = 100 << 20


_MOST_DIMENSIONS = 8


class SafetensorsSource:
    """Reads tensors by name; each file's header is checked against its length before anything is read.

    Args:
        dtypes: the types that tensors may have, by their stored name.
    Raises (at construction):
        WeightFileError: a file is missing, truncated or damaged; the message names file and tensor.
        UnsupportedModelError: a tensor of a dtype that is not supported.
    """

    def __init__(self, directory: Path, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> None:
        self._dtypes = dtypes
        self._specs: dict[str, TensorSpec] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        weight_map = read_index(directory)
        if weight_map is None:
            self._open(directory / SINGLE_FILE)
            return
        for file in sorted(set(weight_map.values())):
            self._open(directory / file)
        for name, file in weight_map.items():
            if name not in self._places or self._places[name][0] != directory / file:
                raise WeightFileError(
                    f"{directory / INDEX_FILE} says that tensor {show(name)} is in {file}, which does not hold it; "
                    "download both again"
                )

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def read(self, name: str) -> torch.Tensor:
        path, offset = self._places[name]
        spec = self._specs[name]
        buffer = bytearray(spec.num_bytes)
        with path.open("rb") as file:
            file.seek(offset)
            if file.readinto(buffer) != spec.num_bytes:
                raise _truncated(path, offset + spec.num_bytes, path.stat().st_size)
        return torch.frombuffer(buffer, dtype=self._dtypes[spec.dtype]).reshape(spec.shape)

    def read_pieces(self, name: str, buffers: Iterator[memoryview]) -> Iterator[int]:
        """Fill one buffer after another with the stored bytes of a tensor, in order; no other memory is used.

        Args:
            buffers: asked for the next one when it is needed, so that the last may still be on its way elsewhere.
        Returns:
            Bytes in each buffer, as they are read: all that it holds, or the rest of the tensor.
        Raises:
            WeightFileError: the file is shorter than when it was opened.
        """
        path, offset = self._places[name]
        left = self._specs[name].num_bytes
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while left:
                piece = next(buffers)[:left]
                _read_fully(file, piece, path, left)
                left -= len(piece)
                yield len(piece)

    def dtype(self, name: str) -> torch.dtype:
        """The stored element type."""
        return self._dtypes[self._specs[name].dtype]

    def sample(self, name: str, num_bytes: int) -> bytes:
        """First, middle and last `num_bytes` of the stored tensor."""
        path, offset = self._places[name]
        return sample_file(path, offset, self._specs[name].num_bytes, num_bytes)

    def _open(self, path: Path) -> None:
        for name, (spec, offset) in read_entries(path, self._dtypes).items():
            if name in self._places:
                other = self._places[name][0]
                raise WeightFileError(f"tensor {show(name)} is in {other} and in {path}; download both again")
            self._specs[name] = spec
            self._places[name] = (path, offset)


def _read_fully(file: io.FileIO, piece: memoryview, path: Path, left: int) -> None:
    """Fill `piece`; a read may return less than was asked for."""
    filled = 0
    while filled < len(piece):
        count = file.readinto(piece[filled:])
        if not count:
            raise _truncated(path, file.tell() + left - filled, path.stat().st_size)
        filled += count


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name to file name as the index says; None where one file holds the model.

    Raises:
        WeightFileError: there are no weights, the index is damaged, or it names a file that is not there.
    """
    index_path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        return None
    if not index_path.is_file():
        raise WeightFileError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; download the safetensors files of the model"
        )
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightFileError(f"{index_path} is damaged (weight_map is {show(weight_map)}); download it again")
    for name, file in weight_map.items():
        # A plain name: an index must not lead out of the model's folder.
        if not isinstance(file, str) or not file or "/" in file or "\\" in file or file in (".", ".."):
            raise WeightFileError(
                f"{index_path} is damaged (weight_map places {show(name)} in {show(file)}; the name of a file beside "
                "it is needed); download it again"
            )
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise WeightFileError(
            f"{index_path} names {len(names)} files, {len(missing)} are missing: {', '.join(missing)}; "
            "download them into the same directory"
        )
    return weight_map


def read_entries(path: Path, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> dict[str, tuple[TensorSpec, int]]:
    """What a safetensors file holds: name to spec and offset in the file.  Tensors fill the data without a gap.

    Raises:
        WeightFileError: the file is missing, truncated or damaged.
        UnsupportedModelError: a tensor of a dtype that is not supported.
    """
    try:
        header, data_start, size = _read_header(path)
    except OSError as error:
        raise WeightFileError(f"{path} cannot be read ({error}); check its permissions") from error
    entries = {name: _read_entry(path, name, entry, dtypes) for name, entry in header.items() if name != "__metadata__"}
    expected = 0
    for name, (begin, end, _) in sorted(entries.items(), key=lambda item: item[1][:2]):
        if data_start + end > size:
            raise _truncated(path, data_start + end, size)
        if begin != expected:
            raise _damaged_entry(path, name, f"data_offsets begin at {begin}, the tensor before ends at {expected}")
        expected = end
    if data_start + expected != size:
        raise WeightFileError(
            f"{path} is damaged: its tensors end at byte {data_start + expected} of {size}; download it again"
        )
    return {name: (spec, data_start + begin) for name, (begin, _, spec) in entries.items()}


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The JSON header, the offset at which data starts, and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _truncated(path, 8, size)
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > _LARGEST_HEADER_BYTES:
            raise WeightFileError(f"{path} is not a safetensors file; download it again")
        if 8 + header_bytes > size:
            raise _truncated(path, 8 + header_bytes, size)
        try:
            header = parse_json_object(file.read(header_bytes))
        except ValueError as error:
            raise WeightFileError(f"{path} has a damaged header ({error}); download it again") from error
    return header, 8 + header_bytes, size


def _read_entry(path: Path, name: str, entry: Any, dtypes: Mapping[str, torch.dtype]) -> tuple[int, int, TensorSpec]:
    """Begin and end in the data, and the spec."""
    if not isinstance(entry, dict):
        raise _damaged_entry(path, name, f"its entry is {show(entry)}, an object is needed")
    offsets, shape, dtype = entry.get("data_offsets"), entry.get("shape"), entry.get("dtype")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged_entry(path, name, f"data_offsets is {show(offsets)}, two ascending offsets are needed")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise _damaged_entry(path, name, f"shape is {show(shape)}, a list of sizes is needed")
    if not isinstance(dtype, str):
        raise _damaged_entry(path, name, f"dtype is {show(dtype)}, a name is needed")
    begin, end = offsets
    spec = TensorSpec(tuple(shape), dtype, end - begin)
    _check_dtype(path, name, spec, dtypes)
    return begin, end, spec


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _check_dtype(path: Path, name: str, spec: TensorSpec, dtypes: Mapping[str, torch.dtype]) -> None:
    dtype = dtypes.get(spec.dtype)
    if dtype is None:
        raise UnsupportedModelError(
            f"{path}: tensor {show(name)} has dtype {show(spec.dtype)}; supported: {', '.join(dtypes)}. "
            "Use an unquantised checkpoint or a GGUF file, or download it again"
        )
    needed = math.prod(spec.shape) * dtype.itemsize
    if needed != spec.num_bytes:
        raise _damaged_entry(
            path, name, f"shape {show(list(spec.shape))} needs {needed} bytes, data_offsets span {spec.num_bytes}"
        )


def _damaged_entry(path: Path, name: str, detail: str) -> WeightFileError:
    return WeightFileError(f"{path} has a damaged header (tensor {show(name)}: {detail}); download it again")


def _truncated(path: Path, needed: int, size: int) -> WeightFileError:
    return WeightFileError(f"{path} is truncated: {size} bytes, {needed} needed; download it again")
