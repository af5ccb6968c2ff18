"""Reference of the gated activation."""

from __future__ import annotations

import torch

from edgellm.kernels.ref import elementwise


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out (T, F) = silu(first half of gate_up (T, 2F)) * second half.  Effects: writes out."""
    out.copy_(elementwise.silu_mul(gate_up))
