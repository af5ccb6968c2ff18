"""Reference of the linear on few rows."""

from __future__ import annotations

import torch


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> None:
    """out (M, N) = x (M, K) weight (N, K)^T + bias (N,) + residual (M, N), in float64, rounded once.  Writes out."""
    total = x.double() @ weight.double().T
    if bias is not None:
        total = total + bias.double()
    if residual is not None:
        total = residual.double() + total
    out.copy_(total)
