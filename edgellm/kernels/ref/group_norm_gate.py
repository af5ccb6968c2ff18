"""Reference of the gated norm behind a Mamba-2 scan, in float64 with one rounding at the end."""

from __future__ import annotations

import torch
from torch.nn import functional


def group_norm_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, num_groups: int
) -> None:
    """out (T, W) = RMS norm, over groups of columns, of x * silu(gate), times weight (W,).  Effects: writes out."""
    gated = x.double() * functional.silu(gate.double())
    groups = gated.view(len(x), num_groups, -1)
    normed = groups / (groups.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    out.copy_(normed.view(x.shape) * weight)
