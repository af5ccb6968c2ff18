"""Reference of the choice of experts."""

from __future__ import annotations

import torch


def choose_experts(
    scores: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    *,
    normalise: bool,
    factors: torch.Tensor | None = None,
) -> None:
    """chosen (T, k) int32: of the highest scores (T, E); shares (T, k): softmax, times factors (E,).  Writes both."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, : chosen.shape[1]]
    weights = scores.softmax(dim=-1).gather(1, order)
    if normalise:
        weights = scores.gather(1, order).softmax(dim=-1)
    shares.copy_(weights if factors is None else weights * factors[order])
    chosen.copy_(order)
