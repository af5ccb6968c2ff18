"""Rotary frequencies of each rope kind, and the angles of a step's positions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies and the factor that multiplies cosine and sine.

    Returns:
        ((head_dim / 2,) float32 radians per position, scale).  Pure.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.freq_factors:
        base = base / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim), _yarn_scale(rope)
    return base, 1.0


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between."""
    turns = rope.original_max_positions * base / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(base: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """NTK by parts (Peng et al. 2023): dimensions with many turns are kept, those with few are interpolated."""

    def dim_of(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # a ramp of zero width has no slope
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return base / rope.factor * ramp + base * (1 - ramp)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class RotaryAngles:
    """Cosine and sine of a step's positions; computed anew each step, so no table grows with the context."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._inv_freq, self._scale = inverse_frequencies(rope, head_dim)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Cosine in row 0, sine in row 1.

        Args:
            positions: (T,) int32 or int64.
        Returns:
            (2, T, head_dim / 2) float32, C-contiguous.
        """
        angles = positions.to(torch.float32)[:, None] * self._inv_freq
        table = torch.stack((angles.cos(), angles.sin()))
        return table.mul_(self._scale) if self._scale != 1.0 else table
