"""Reference of the linear whose rows have the same bits at any number of rows: the same sum, in the kernel's order."""

from __future__ import annotations

import torch

SLICES = 16
BLOCK_K = 32


def slice_bounds(in_width: int) -> list[tuple[int, int]]:
    """Where K is cut: runs of whole 32-k blocks, as even as 16 runs of equal length can be, the last ones shorter."""
    length = -(-in_width // (BLOCK_K * SLICES)) * BLOCK_K
    return [(start, min(start + length, in_width)) for start in range(0, in_width, length)]


def deterministic_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
) -> None:
    """out (M, N) = x (M, K) weight (N, K)^T + bias (N,) + residual (M, N), in float32, rounded once.  Writes out.

    Every row is computed by itself, its runs of K added in order; inside a run, torch's own order.
    """
    for row in range(x.shape[0]):
        total = torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device)
        for start, end in slice_bounds(x.shape[1]):
            total += weight[:, start:end].float() @ x[row, start:end].float()
        if bias is not None:
            total += bias.float()
        if residual is not None:
            total = residual[row].float() + total
        out[row] = total.to(out.dtype)
