"""Reference of the rotary angles."""

from __future__ import annotations

import torch


def rotary_angles(positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """out (2, T, D/2) = cosine and sine of positions (T,) * inv_freq (D/2,), times scale.  Effects: writes out."""
    angles = positions.to(torch.float32)[:, None] * inv_freq
    out[0] = angles.cos() * scale
    out[1] = angles.sin() * scale
