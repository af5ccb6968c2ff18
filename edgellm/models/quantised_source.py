"""`QuantisedSource`: a quantised Hugging Face folder under the names of the unquantised one.

A linear layer that is stored as several tensors is one `weight` here.  `read` expands it, tensor by tensor;
`fill_packed` puts it into the order of the kernels instead, on the device, and expands nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.errors import UnsupportedModelError, WeightFileError
from edgellm.kernels.packed_weight import store_fp8, store_int4
from edgellm.models.quantisation import WHOLE_ROW, StoredFormat
from edgellm.models.quantised_tensors import awq_columns, block_scales, by_columns, gptq_weights, gptq_zeros
from edgellm.models.safetensors_source import FLOAT_DTYPES, SafetensorsSource
from edgellm.models.weights import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from edgellm.kernels.packed_weight import PackedWeight
    from edgellm.models.quantisation import Quantisation

INT4, FP8 = "int4", "fp8"  # what `TensorSpec.dtype` of a quantised weight says
_STORED_FP8 = "F8_E4M3"
_DTYPES = {**FLOAT_DTYPES, "I32": torch.int32, _STORED_FP8: torch.float8_e4m3fn}
_ACTIVATION_SCALES = (".input_scale", ".activation_scale")  # activations are not quantised here
_WORD_NUMBERS = 8
_WORDS, _FLOATS = ("I32",), tuple(FLOAT_DTYPES)
_INT4_PARTS = {"qweight": (_WORDS, 2), "qzeros": (_WORDS, 2), "scales": (_FLOATS, 2), "g_idx": (_WORDS, 1)}


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A weight as it is stored: (N, K) uint8 or e4m3, and what each group has: (N, groups)."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


class QuantisedSource:
    """A `WeightSource` and a `PieceReader`.

    Raises (at construction):
        WeightFileError: a file is missing or damaged, or the tensors of a layer do not fit together.
        UnsupportedModelError: a tensor of a dtype that is not supported, or groups that do not divide a row.
    """

    def __init__(self, directory: Path, quantisation: Quantisation) -> None:
        self._quantisation = quantisation
        self._stored = SafetensorsSource(directory, _DTYPES)
        self._parts: dict[str, dict[str, str]] = {}  # of a weight: kind of tensor to stored name
        self._specs = self._read_specs(self._stored.specs())

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def sample(self, name: str, num_bytes: int) -> bytes:
        """First, middle and last `num_bytes` of everything that makes up the tensor."""
        names = self._parts[name].values() if name in self._parts else (name,)
        return b"".join(self._stored.sample(each, num_bytes) for each in names)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, CPU; a quantised weight in float32."""
        if name not in self._parts:
            return self._stored.read(name)
        numbers = self._numbers(name, torch.device("cpu"))
        columns, group = numbers.values.shape[1], self._quantisation.group_columns
        expanded = numbers.values.float()
        if numbers.zeros is not None:
            expanded -= by_columns(numbers.zeros, group, columns)
        expanded *= by_columns(numbers.scales.float(), group, columns)
        return expanded

    def dtype(self, name: str) -> torch.dtype:
        """What `read_pieces` gives."""
        return torch.float32 if name in self._parts else self._stored.dtype(name)

    def read_pieces(self, name: str, buffers: Iterator[memoryview]) -> Iterator[int]:
        """As `SafetensorsSource.read_pieces`; a quantised weight is expanded in memory first."""
        if name not in self._parts:
            yield from self._stored.read_pieces(name, buffers)
            return
        left = self.read(name).view(-1).view(torch.uint8).numpy().data
        while len(left):
            piece = next(buffers)[: len(left)]
            piece[:] = left[: len(piece)]
            left = left[len(piece) :]
            yield len(piece)

    def fill_packed(self, name: str, target: PackedWeight) -> None:
        """Put a quantised weight into `target`, rearranged on its device.

        Raises:
            WeightFileError: a file is shorter than when it was opened.
            UnsupportedModelError: GPTQ columns in another order than they stand.
        """
        numbers = self._numbers(name, target.device)
        if self._quantisation.stored.is_int4:
            store_int4(target, numbers.values, numbers.scales, numbers.zeros)
        else:
            store_fp8(target, numbers.values, numbers.scales)

    def _numbers(self, name: str, device: torch.device) -> _Numbers:
        parts = {kind: self._stored.read(stored).to(device) for kind, stored in self._parts[name].items()}
        quantisation = self._quantisation
        if quantisation.stored is StoredFormat.FP8:
            values = parts["weight"]
            return _Numbers(values, block_scales(parts["scales"], len(values), quantisation.block_rows), None)
        scales = parts["scales"].T.contiguous()
        if quantisation.stored is StoredFormat.AWQ:
            return _Numbers(awq_columns(parts["qweight"]), scales, awq_columns(parts["qzeros"]))
        self._check_order(name, parts)
        zeros = gptq_zeros(parts["qzeros"], quantisation.zero_offset)
        return _Numbers(gptq_weights(parts["qweight"]), scales, zeros)

    def _check_order(self, name: str, parts: Mapping[str, torch.Tensor]) -> None:
        order, group = parts.get("g_idx"), self._quantisation.group_columns
        if order is None:
            return
        columns = torch.arange(len(order), device=order.device)
        expected = columns // group if group != WHOLE_ROW else torch.zeros_like(columns)
        if not torch.equal(order.long(), expected):
            raise UnsupportedModelError(
                f"tensor {name.removesuffix('weight')}g_idx puts columns into groups out of order (desc_act), which is "
                "not supported; use a checkpoint that was made with desc_act false"
            )

    def _read_specs(self, stored: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for name, spec in stored.items():
            if self._quantisation.stored.is_int4 and name.endswith(".qweight"):
                prefix = name.removesuffix("qweight")
                specs[f"{prefix}weight"] = self._int4_spec(prefix, stored)
            elif self._is_fp8_weight(name, spec):
                specs[name] = self._fp8_spec(name, stored)
        hidden = {each for parts in self._parts.values() for each in parts.values()}
        for name in stored:
            if name not in hidden and not name.endswith(_ACTIVATION_SCALES):
                self._check_plain(name, stored)
                specs[name] = stored[name]
        return specs

    def _is_fp8_weight(self, name: str, spec: TensorSpec) -> bool:
        is_weight = spec.dtype == _STORED_FP8 and name.endswith(".weight")
        return is_weight and self._quantisation.stored is StoredFormat.FP8

    def _check_plain(self, name: str, stored: Mapping[str, TensorSpec]) -> None:
        """A tensor that is no part of a quantised one."""
        if name in self._parts:
            raise WeightFileError(
                f"tensor {name!r} is stored beside {self._parts[name]['qweight']!r}, which stands for the same; "
                "download the model again"
            )
        if stored[name].dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"tensor {name!r} is stored in {stored[name].dtype}; supported outside quantised linear layers: "
                f"{', '.join(_FLOATS)}. Use the unquantised checkpoint, or download it again"
            )

    def _int4_spec(self, prefix: str, stored: Mapping[str, TensorSpec]) -> TensorSpec:
        names = {kind: f"{prefix}{kind}" for kind in ("qweight", "scales", "qzeros")}
        _check_stored(names.values(), stored, prefix)
        has_order = self._quantisation.stored is StoredFormat.GPTQ and f"{prefix}g_idx" in stored
        if has_order:
            names["g_idx"] = f"{prefix}g_idx"
        for kind, name in names.items():
            _check_kind(name, stored[name], *_INT4_PARTS[kind])
        first, second = stored[names["qweight"]].shape
        if self._quantisation.stored is StoredFormat.AWQ:
            rows, columns = second * _WORD_NUMBERS, first
        else:
            rows, columns = second, first * _WORD_NUMBERS
        groups = self._groups(prefix, columns)
        _check_shape(names["scales"], stored, (groups, rows))
        _check_shape(names["qzeros"], stored, (groups, rows // _WORD_NUMBERS))
        if has_order:
            _check_shape(names["g_idx"], stored, (columns,))
        return self._note(f"{prefix}weight", names, (rows, columns), INT4, stored)

    def _fp8_spec(self, name: str, stored: Mapping[str, TensorSpec]) -> TensorSpec:
        quantisation, prefix = self._quantisation, name.removesuffix("weight")
        names = {"weight": name, "scales": self._scale_name(prefix, stored)}
        _check_stored(names.values(), stored, prefix)
        _check_kind(name, stored[name], (_STORED_FP8,), 2)
        _check_kind(names["scales"], stored[names["scales"]], _FLOATS)
        rows, columns = stored[name].shape
        found = stored[names["scales"]].shape
        if quantisation.group_columns != WHOLE_ROW:
            blocks = (-(-rows // quantisation.block_rows), -(-columns // quantisation.group_columns))
            _check_shape(names["scales"], stored, blocks)
        elif math.prod(found) not in (1, rows):
            raise WeightFileError(
                f"tensor {names['scales']!r} is stored as {list(found)}; one scale, or one for each of {rows} rows, is "
                "needed: check that config.json belongs to these weights"
            )
        return self._note(name, names, (rows, columns), FP8, stored)

    def _scale_name(self, prefix: str, stored: Mapping[str, TensorSpec]) -> str:
        """Scales of rows or of the matrix have the name of those of blocks in some files."""
        usual = f"{prefix}{self._quantisation.scale_name}"
        of_blocks = f"{usual}_inv"
        takes_other = self._quantisation.group_columns == WHOLE_ROW and usual not in stored and of_blocks in stored
        return of_blocks if takes_other else usual

    def _note(
        self, name: str, parts: dict[str, str], shape: tuple[int, int], kind: str, stored: Mapping[str, TensorSpec]
    ) -> TensorSpec:
        self._parts[name] = parts
        return TensorSpec(shape, kind, sum(stored[each].num_bytes for each in parts.values()))

    def _groups(self, prefix: str, columns: int) -> int:
        size = self._quantisation.group_columns
        if size == WHOLE_ROW:
            return 1
        if columns % size:
            raise UnsupportedModelError(
                f"{prefix}qweight has {columns} input columns, which groups of {size} (group_size) do not divide; use "
                "a checkpoint with a group size that does"
            )
        return columns // size


def _check_stored(names: object, stored: Mapping[str, TensorSpec], prefix: str) -> None:
    missing = [name for name in names if name not in stored]  # type: ignore[attr-defined]
    if missing:
        raise WeightFileError(
            f"the quantised layer {prefix.removesuffix('.')!r} lacks {missing[0]!r}; download the model again, or "
            "check that config.json belongs to it"
        )


def _check_shape(name: str, stored: Mapping[str, TensorSpec], shape: tuple[int, ...]) -> None:
    if stored[name].shape != shape:
        raise WeightFileError(
            f"tensor {name!r} is stored as {list(stored[name].shape)}, {list(shape)} is needed; check that config.json "
            "belongs to these weights"
        )


def _check_kind(name: str, spec: TensorSpec, dtypes: tuple[str, ...], dimensions: int | None = None) -> None:
    """
    Args:
        dimensions: None takes any number.
    """
    if spec.dtype in dtypes and dimensions in (None, len(spec.shape)):
        return
    needed = ", ".join(dtypes) + ("" if dimensions is None else f" and {dimensions}")
    raise WeightFileError(
        f"tensor {name!r} is stored in {spec.dtype} and {len(spec.shape)} dimensions; {needed} are needed: check that "
        "config.json belongs to these weights, or download them again"
    )
