"""Reference of the step sizes of a Mamba-2 scan."""

from __future__ import annotations

import torch
from torch.nn import functional


def step_sizes(
    x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, *, least: float = 0.0, greatest: float = float("inf")
) -> None:
    """out (T, H) float32 = softplus(x (T, H) + bias (H,)) within [least, greatest].  Effects: writes out."""
    out.copy_(functional.softplus(x.float() + bias).clamp(least, greatest))
