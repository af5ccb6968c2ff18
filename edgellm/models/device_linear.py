"""Linear layers of the device graph: torch's GEMM into the caller's memory, and our kernels where they are better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.models.device_ops import Linear, Op

# torch 2.8 and newer multiply 16-bit rows into float32; without it, logits are rounded to 16 bits first.
_HAS_WIDE_PRODUCT = hasattr(torch.ops.aten.mm, "dtype_out")
_PIECE_ELEMENTS = 8  # the skinny kernel reads rows by 16 bytes
# Measured on one H200, in graphs: where our kernel is as fast as cuBLAS or faster.  Rows, largest weight.
_SKINNY_UP_TO = ((8, 128 << 20), (16, 16 << 20))


def torch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual by torch's GEMM; see `device_ops.Linear`.

    Float32 accumulation.  The residual is added before the product is rounded, a bias beside it after.
    """
    columns = weight.t()
    if out.dtype != x.dtype:
        _widen(x, columns, out)
    elif residual is not None:
        torch.addmm(residual, x, columns, out=out)
    elif bias is not None:
        torch.addmm(bias, x, columns, out=out)
        return
    else:
        torch.mm(x, columns, out=out)
    if bias is not None:
        out.add_(bias)


def _widen(x: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
    """A float32 product of 16-bit rows, for logits: rounding them would make ties."""
    if x.device.type == "cuda" and _HAS_WIDE_PRODUCT:
        torch.ops.aten.mm.dtype_out(x, columns, torch.float32, out=out)
    elif x.device.type == "cuda":
        out.copy_(torch.mm(x, columns))
    else:
        torch.mm(x.float(), columns.float(), out=out)


@dataclass(frozen=True, slots=True)
class Projections:
    """The linear layers of a step.

    Attributes:
        linear: see `device_ops.Linear`.
        gated: `(x, weight, out, bias, gate_up)`: out (T, F) = silu_mul of linear by the (2F, D) weight.  `gate_up`
            (T, 2F) is the caller's memory for the result between; it may stay unused.
    """

    linear: Linear
    gated: Op


def composed(linear: Linear, silu_mul: Op) -> Projections:
    """One operator after the other."""

    def gated(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, gate_up: torch.Tensor
    ) -> None:
        linear(x, weight, gate_up, bias)
        silu_mul(gate_up, out)

    return Projections(linear, gated)


def cuda_projections(*, deterministic: bool) -> Projections:
    """Our kernels for few rows and weights that are not large, where a GEMM is slow to start; torch's for the rest.

    Args:
        deterministic: our kernels for any number of rows: a row's bits do not depend on the others.
    """
    from edgellm.kernels.cu import deterministic_linear, silu_mul, skinny_linear

    if deterministic:
        return composed(deterministic_linear.deterministic_linear, silu_mul.silu_mul)

    def linear(
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
    ) -> None:
        if _is_skinny(x, weight):
            skinny_linear.skinny_linear(x, weight, out, bias, residual=residual)
        else:
            torch_linear(x, weight, out, bias, residual=residual)

    apart = composed(linear, silu_mul.silu_mul)

    def gated(
        x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, gate_up: torch.Tensor
    ) -> None:
        if _is_skinny(x, weight):
            skinny_linear.gated_linear(x, weight, out, bias)
        else:
            apart.gated(x, weight, out, bias, gate_up)

    return Projections(linear, gated)


def _is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether our kernel takes it and is the faster one."""
    from edgellm.kernels.cu.skinny_linear import HALF_TYPES

    most = next((most for rows, most in _SKINNY_UP_TO if x.shape[0] <= rows), 0)
    return weight.nbytes <= most and x.dtype in HALF_TYPES and x.shape[1] % _PIECE_ELEMENTS == 0
