"""Reference of the causal depthwise convolution: one token after the other, in the state's precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: RecurrentRows,
    out: torch.Tensor,
    *,
    silu: bool,
    checkpoint: torch.Tensor | None = None,
) -> None:
    """out[t] = silu?(bias + sum_j weight[:, j] * window[:, j]); the window ends with x[t].

    Args:
        x: (T, C) rows.
        weight: (C, W).
        bias: (C,) or None.
        state: (slots, C, W - 1) last inputs of each sequence, oldest first; float32 or float64.
        out: (T, C).
        checkpoint: (CK, C, W - 1) or None.
    Effects: writes out, state, checkpoint.
    """
    dtype = state.dtype
    for first, end, slot, kept in rows.spans():
        window = state[slot].clone()
        for t in range(first, end):
            window = torch.cat((window, x[t].to(dtype)[:, None]), dim=1)
            total = (window * weight.to(dtype)).sum(1)
            if bias is not None:
                total = total + bias.to(dtype)
            out[t] = torch.nn.functional.silu(total) if silu else total
            window = window[:, 1:]
            if kept >= 0 and checkpoint is not None:
                checkpoint[kept + t - first] = window
        state[slot] = window
