"""References of the gates of rows, in float32 with one rounding at the end."""

from __future__ import annotations

import torch
from torch.nn import functional


def gate_(x: torch.Tensor, gate: torch.Tensor, *, silu: bool = False) -> None:
    """x (N, W) *= sigmoid(gate), or silu(gate); gate (N, W) or (N, 1).  Writes x."""
    wide = gate.float()
    x.copy_(x.float() * (functional.silu(wide) if silu else wide.sigmoid()))


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> None:
    """decay (N, H) = rate (H,) * softplus(a + bias) and beta (N, H) = sigmoid(b), float32.  Writes decay and beta."""
    decay.copy_(rate * functional.softplus(a.float() + bias))
    beta.copy_(b.float().sigmoid())
