"""Rotary positions that turn the halves of a head, over all or its leading elements."""

from __future__ import annotations

import torch


def rotary_angles(positions: torch.Tensor, width: int, theta: float) -> torch.Tensor:
    """(2, ..., width / 2) float32, cosine and sine, of positions of any shape."""
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions[..., None].float() / theta**steps
    return torch.stack((angles.cos(), angles.sin()))


def heads_of(rows: torch.Tensor, width: int) -> torch.Tensor:
    """(B, T, H * width) to (B, H, T, width)."""
    return rows.view(*rows.shape[:-1], -1, width).transpose(1, 2)


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Heads (B, H, T, head_dim), turned; `angles` broadcasts over B and H and may cover the leading elements only."""
    width = 2 * angles.shape[-1]
    turned, rest = heads[..., :width], heads[..., width:]
    cos, sin = angles.to(heads.dtype)
    first, second = turned.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(parts if rest.shape[-1] else parts[:2], dim=-1)
