"""Reference of the move of a decode step's inputs to the step behind it."""

from __future__ import annotations

import torch


def advance_rows(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    past_len: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """token_ids = tokens, and the other three (N,) int32 grow by 1, where slots (N,) >= 0.  Effects: writes them."""
    rows = slots >= 0
    token_ids[rows] = tokens[rows]
    for counter in (positions, past_len, lengths):
        counter += rows.int()
