"""`SafetensorsSource`: a Hugging Face directory, one `model.safetensors` or shards named by an index."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.models.weights import TensorSpec, sample_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LARGEST_HEADER_BYTES = 100 << 20


class SafetensorsSource:
    """Reads tensors by name; each file's header is checked against its length before anything is read."""

    def __init__(self, directory: Path) -> None:
        self._specs: dict[str, TensorSpec] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for path in weight_files(directory):
            self._open(path)

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
        return torch.frombuffer(buffer, dtype=FLOAT_DTYPES[spec.dtype]).reshape(spec.shape)

    def sample(self, name: str, num_bytes: int) -> bytes:
        """First, middle and last `num_bytes` of the stored tensor."""
        path, offset = self._places[name]
        return sample_file(path, offset, self._specs[name].num_bytes, num_bytes)

    def _open(self, path: Path) -> None:
        header, data_start = read_header(path)
        size = path.stat().st_size
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if data_start + end > size:
                raise _truncated(path, data_start + end, size)
            spec = TensorSpec(tuple(entry["shape"]), entry["dtype"], end - begin)
            _check_dtype(path, name, spec)
            self._specs[name] = spec
            self._places[name] = (path, data_start + begin)


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a directory, in a fixed order.

    Raises:
        WeightFileError: there are none, or the index names a file that is not there.
    """
    index_path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if not index_path.is_file():
        raise WeightFileError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; download the safetensors files of the model"
        )
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightFileError(f"{index_path} is damaged ({error!r}); download it again") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise WeightFileError(
            f"{index_path} names {len(names)} files, {len(missing)} are missing: {', '.join(missing)}; "
            "download them into the same directory"
        )
    return [directory / name for name in names]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the offset at which data starts.

    Raises:
        WeightFileError: the file is shorter than its header, or is no safetensors file.
    """
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
            header = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise WeightFileError(f"{path} has a damaged header ({error}); download it again") from error
    if not isinstance(header, dict):
        raise WeightFileError(f"{path} has a damaged header; download it again")
    return header, 8 + header_bytes


def _check_dtype(path: Path, name: str, spec: TensorSpec) -> None:
    dtype = FLOAT_DTYPES.get(spec.dtype)
    if dtype is None:
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} has dtype {spec.dtype}; supported: {', '.join(FLOAT_DTYPES)}. "
            "Use an unquantised checkpoint or a GGUF file"
        )
    if math.prod(spec.shape) * dtype.itemsize != spec.num_bytes:
        raise WeightFileError(
            f"{path}: tensor {name!r} of shape {list(spec.shape)} takes {spec.num_bytes} bytes; "
            f"{math.prod(spec.shape) * dtype.itemsize} are needed. The file is damaged, download it again"
        )


def _truncated(path: Path, needed: int, size: int) -> WeightFileError:
    return WeightFileError(f"{path} is truncated: {size} bytes, {needed} needed; download it again")
