"""Reference of the linear layers on packed weights: expand, then as on any weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgellm.kernels.packed_weight import (
    BLOCK_COLUMNS,
    unpack_bytes,
    unpack_nibbles,
    unpack_rows,
    unpack_zeros,
)
from edgellm.kernels.ref import gated_linear as plain_gated
from edgellm.kernels.ref import skinny_linear as plain

if TYPE_CHECKING:
    from edgellm.kernels.packed_weight import PackedWeight


def expand_weight(weight: PackedWeight, out: torch.Tensor) -> None:
    """out (N, K) = the weight, in its type: the product in float32, rounded once.  Writes out."""
    columns = torch.arange(weight.shape[1], device=weight.device)
    group = (columns // BLOCK_COLUMNS) >> weight.group_shift
    scales = unpack_rows(weight.scales).float()[:, group]
    if weight.zeros is None:
        values = unpack_bytes(weight.packed).view(torch.float8_e4m3fn).float()
    else:
        values = unpack_nibbles(weight.packed).float() - unpack_zeros(weight.zeros).float()[:, group]
    out.copy_(values * scales)


def quantised_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> None:
    """out (M, N) = x (M, K) weight^T + bias (N,) + residual (M, N), in float64, rounded once.  Writes out."""
    plain.skinny_linear(x, _expanded(weight), out, bias, residual=residual)


def quantised_gated_linear(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """out (M, N) = silu_mul of `quantised_linear` by a weight of 2N rows; both steps round to x's type.  Writes out."""
    plain_gated.gated_linear(x, _expanded(weight), out, bias)


def _expanded(weight: PackedWeight) -> torch.Tensor:
    matrix = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    expand_weight(weight, matrix)
    return matrix
