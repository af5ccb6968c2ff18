"""Reference of the gated activation with gelu, in float64 with one rounding at the end."""

from __future__ import annotations

import math

import torch


def gelu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    """out (T, F) = gelu(gate (T, F)) * up (T, F), the tanh form of gelu.  Effects: writes out."""
    wide = gate.double()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    # (1 + tanh(y)) / 2, which cancels for negative y, is sigmoid(2 y).
    out.copy_(wide * torch.sigmoid(2 * inner) * up.double())
