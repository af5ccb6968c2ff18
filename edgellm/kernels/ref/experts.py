"""References of the routed experts, in float64."""

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


def experts(
    rows: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    total: torch.Tensor,
    *,
    gelu: bool = False,
    accumulate: bool = True,
    workspace: torch.Tensor | None = None,
) -> None:
    """As `few_experts`; expert numbers outside the experts are skipped.

    Args:
        gelu: the tanh form of gelu in the place of silu.
        accumulate: add to total; otherwise overwrite it.
        workspace: not used.
    Effects: writes total.
    """
    num_experts = len(gate_up)
    if not accumulate:
        total.zero_()
    for token, row in enumerate(rows.double()):
        for share, expert in zip(shares[token].double(), chosen[token].tolist(), strict=True):
            if not 0 <= expert < num_experts:
                continue
            gate, up = (gate_up[expert].double() @ row).chunk(2)
            gate = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
            total[token] += share * (down[expert].double() @ (gate * up))
