"""References of the row-wise kernels, in float32 with one rounding at the end."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim / 2).

    Args:
        heads: (T, num_heads, head_dim).
        angles: (2, T, head_dim / 2) float32.
    """
    cosine, sine = angles[:, :, None, :]
    low, high = heads.float().chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).to(heads.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)
