"""Reference of the routed experts of few rows."""

from __future__ import annotations

import torch
from torch.nn import functional


def few_experts(
    rows: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """total (T, D) += shares (T, k) times what experts chosen (T, k) make of rows (T, D), in float64.  Writes total."""
    for token, row in enumerate(rows.double()):
        for share, expert in zip(shares[token].double(), chosen[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ row).chunk(2)
            total[token] += share * (down[expert].double() @ (functional.silu(gate) * up))
