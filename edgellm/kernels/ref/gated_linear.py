"""Reference of the linear on few rows with a gate behind."""

from __future__ import annotations

import torch

from edgellm.kernels.ref import elementwise
from edgellm.kernels.ref.skinny_linear import skinny_linear


def gated_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out (M, N) = silu_mul(skinny_linear(x, weight (2N, K), bias)); both steps round to x's type.  Writes out."""
    both = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    skinny_linear(x, weight, both, bias)
    out.copy_(elementwise.silu_mul(both))
