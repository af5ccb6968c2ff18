"""Linear layers of the device graph on packed weights: by our kernel for few rows, by the expanded weight for many.

What is expanded is a piece of the weight at a time, into the workspace that all weights of a model share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgellm.kernels.packed_weight import PackedWeight
from edgellm.models.device_linear import Projections

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgellm.models.device_ops import Linear, Op


@dataclass(frozen=True, slots=True)
class PackedOps:
    """
    Attributes:
        linear, gated: on packed weights, any number of rows; `gated` as `quantised_gated_linear`.
        expand: `(weight, out)`.
        by_kernel: `(rows, weight)`: whether `linear` is to be used for so many rows, rather than the expanded weight.
    """

    linear: Linear
    gated: Op
    expand: Op
    by_kernel: Callable[[int, PackedWeight], bool]


def with_packed(dense: Projections, packed: PackedOps, silu_mul: Op, *, one_kernel: bool) -> Projections:
    """Projections that take weights of both kinds.

    Args:
        dense: for weights that are tensors.
        one_kernel: gate and linear in one kernel, where `packed.linear` would be used.
    """

    def linear(
        x: torch.Tensor,
        weight: torch.Tensor | PackedWeight,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(weight, PackedWeight):
            dense.linear(x, weight, out, bias, residual=residual)
        elif packed.by_kernel(x.shape[0], weight):
            packed.linear(x, weight, out, bias, residual=residual)
        else:
            by_pieces(x, weight, out, bias, residual, packed.expand, dense.linear)

    def gated(
        x: torch.Tensor,
        weight: torch.Tensor | PackedWeight,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: torch.Tensor,
    ) -> None:
        if not isinstance(weight, PackedWeight):
            dense.gated(x, weight, out, bias, gate_up)
        elif one_kernel and packed.by_kernel(x.shape[0], weight):
            packed.gated(x, weight, out, bias)
        else:
            linear(x, weight, gate_up, bias)
            silu_mul(gate_up, out)

    return Projections(linear, gated)


def by_pieces(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    expand: Op,
    linear: Linear,
) -> None:
    """Columns of out, a piece of the weight's rows at a time."""
    rows, columns = weight.shape
    step = weight.piece_rows()
    for start in range(0, rows, step):
        end = min(start + step, rows)
        piece = weight.workspace[: (end - start) * columns].view(end - start, columns)
        expand(weight.rows(start, end), piece)
        linear(
            x,
            piece,
            out[:, start:end],
            None if bias is None else bias[start:end],
            residual=None if residual is None else residual[:, start:end],
        )


def cuda_packed_ops(*, deterministic: bool) -> PackedOps:
    """Our kernels.

    Args:
        deterministic: rows have the same bits by the kernel and by the expanded weight; where sums would have another
            order, the kernel takes any number of rows.
    """
    from edgellm.kernels.cu import quantised_linear as kernels

    def by_kernel(rows: int, weight: PackedWeight) -> bool:
        if rows <= kernels.MAX_ROWS:
            return True
        return deterministic and not kernels.sums_as_dense(weight.kind, weight.shape[1])

    return PackedOps(kernels.quantised_linear, kernels.quantised_gated_linear, kernels.expand_weight, by_kernel)


def reference_packed_ops() -> PackedOps:
    """Plain torch; the same number of rows goes either way."""
    from edgellm.kernels.cu.quantised_linear import MAX_ROWS
    from edgellm.kernels.ref import quantised_linear as reference

    return PackedOps(
        reference.quantised_linear,
        reference.quantised_gated_linear,
        reference.expand_weight,
        lambda rows, weight: rows <= MAX_ROWS,
    )
