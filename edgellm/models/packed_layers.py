"""Which checkpoints keep their linear layers packed on the device, and the memory for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.kernels.packed_weight import PANEL_ROWS, PackedKind, PackedWeight, empty_packed, workspace_elements
from edgellm.models.quantisation import WHOLE_ROW

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgellm.models.config import ModelConfig
    from edgellm.models.loader import LoadedModel
    from edgellm.models.quantisation import Quantisation
    from edgellm.models.weights import TensorSpec

_HALF_TYPES = (torch.bfloat16, torch.float16)


def why_expanded(config: ModelConfig, dtype: torch.dtype, specs: Mapping[str, TensorSpec] | None = None) -> str:
    """Why the kernels cannot take the stored linear layers as they are; empty where they can.

    Args:
        dtype: that the model computes in.
        specs: of the checkpoint; None where all linear layers are stored alike.
    """
    quantisation = config.quantisation
    if quantisation is None:
        return "the checkpoint is not quantised"
    if dtype not in _HALF_TYPES:
        return f"the kernels compute in 16 bits, not {str(dtype).removeprefix('torch.')}"
    return _unfit_groups(quantisation) or _unfit_shape(config) or _unfit_layers(specs or {}, quantisation)


def describe_packed(model: LoadedModel) -> str:
    """How the linear layers lie in memory, "int4, a scale for 128 columns (awq)"; empty where they are not packed."""
    matrices = (getattr(layer, "qkv", None) for layer in model.weights.layers[:1])
    quantisation = model.config.quantisation
    if quantisation is None or not any(isinstance(matrix, PackedWeight) for matrix in matrices):
        return ""
    return quantisation.describe()


def kind_of(quantisation: Quantisation) -> PackedKind:
    return PackedKind.INT4 if quantisation.stored.is_int4 else PackedKind.FP8


def _unfit_groups(quantisation: Quantisation) -> str:
    least, size = kind_of(quantisation).unit_columns, quantisation.group_columns
    if size != WHOLE_ROW and (size < least or size & (size - 1)):
        return f"groups have {size} columns; the kernels take whole rows, and powers of two from {least}"
    in_blocks = size != WHOLE_ROW and not quantisation.stored.is_int4
    if in_blocks and quantisation.block_rows % PANEL_ROWS:
        return f"blocks have {quantisation.block_rows} rows; the kernels take multiples of {PANEL_ROWS}"
    return ""


def _unfit_shape(config: ModelConfig) -> str:
    assert config.quantisation is not None
    columns = kind_of(config.quantisation).unit_columns
    rows = (("num_key_value_heads * head_dim", config.kv_size), *config.linear_widths)
    for (name, width), step in ((each, PANEL_ROWS) for each in rows):
        if width % step:
            return f"{name} is {width}; the kernels take multiples of {step}"
    for name, width in config.linear_widths:
        if width % columns:
            return f"{name} is {width}; the kernels take multiples of {columns}"
    return ""


def _unfit_layers(specs: Mapping[str, TensorSpec], quantisation: Quantisation) -> str:
    kind = kind_of(quantisation).value
    for name, spec in specs.items():
        if ".layers." in name and name.endswith("_proj.weight") and spec.dtype != kind:
            return f"{name} is stored in {spec.dtype}"
    return ""


class PackedTensors:
    """Gives a family its empty tensors: ordinary ones, and packed ones for linear layers.

    Args:
        shapes: of all linear layers, by which their common workspace is sized.
    """

    def __init__(
        self, quantisation: Quantisation, dtype: torch.dtype, device: torch.device, shapes: list[tuple[int, int]]
    ) -> None:
        self._quantisation = quantisation
        self._workspace = torch.empty(workspace_elements(shapes), dtype=dtype, device=device)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._workspace.dtype, device=self._workspace.device)

    def linear(self, rows: int, columns: int) -> PackedWeight:
        quantisation = self._quantisation
        return empty_packed(
            kind_of(quantisation),
            rows,
            columns,
            group_columns=quantisation.group_columns or columns,
            shares_scales=quantisation.block_rows > 1,
            workspace=self._workspace,
        )
