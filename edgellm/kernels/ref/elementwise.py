"""References of the row-wise kernels, in float32 with one rounding at the end."""

from __future__ import annotations

import math

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + R / 2) of the R leading elements.

    Args:
        heads: (T, num_heads, head_dim).
        angles: (2, T, R / 2) float32.
    """
    cosine, sine = angles[:, :, None, :]
    half = angles.shape[2]
    low, high, rest = torch.split(heads.float(), [half, half, heads.shape[2] - 2 * half], dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine, rest), dim=-1).to(heads.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with the tanh form of gelu."""
    wide = gate.float()
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (0.5 * wide * (1 + torch.tanh(inner)) * up.float()).to(gate.dtype)
