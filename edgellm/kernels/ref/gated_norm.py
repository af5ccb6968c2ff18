"""Reference of the per-head RMS norm with a silu gate behind."""

from __future__ import annotations

import torch

from edgellm.kernels.ref.gates import gate_
from edgellm.kernels.ref.rms_norm import rms_norm


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = rms_norm of each head of x (T, H * D), times silu(gate); both steps round to x's type.  Writes out."""
    heads = x.reshape(-1, weight.numel())
    normed = torch.empty_like(heads)
    rms_norm(heads, weight, eps, normed)
    out.copy_(normed.view(x.shape))
    gate_(out, gate, silu=True)
