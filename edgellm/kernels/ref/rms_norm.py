"""Reference of the RMS norm with residual sum."""

from __future__ import annotations

import torch

from edgellm.kernels.ref import elementwise


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, residual: torch.Tensor | None = None
) -> None:
    """out = norm of x, or of residual + x, which replaces residual.

    Args:
        x, out, residual: (T, D), one dtype.
        weight: (D,) float32.
    Effects: writes out, and residual.
    """
    rows = x
    if residual is not None:
        rows = (residual.float() + x.float()).to(x.dtype)
        residual.copy_(rows)
    out.copy_(elementwise.rms_norm(rows, weight, eps))
