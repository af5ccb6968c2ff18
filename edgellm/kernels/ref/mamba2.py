"""Reference of the Mamba-2 selective scan: one token after the other, in the state's precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows
    from edgellm.kernels.cu.state_rows import StateRows


def mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    rows: RecurrentRows | StateRows,
    out: torch.Tensor,
    checkpoint: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
) -> None:
    """S = exp(dt a) S + dt x b^T; out = S c + d x (Dao and Gu, Transformers are SSMs, 2024).

    Args:
        x: (T, H, P).
        dt: (T, H) step sizes, after softplus and limits.
        a: (H,) negative.
        b, c: (T, G, N); head h uses group h // (H / G).
        d: (H,).
        state: (slots, H, P, N) float32 or float64.
        out: (T, H, P).
        checkpoint: (CK, H, P, N) or None.
        deterministic: one token after the other either way.
    Effects: writes out, state, checkpoint.
    """
    dtype = state.dtype
    group = x.shape[1] // b.shape[1]
    wide_b, wide_c = (part.to(dtype).repeat_interleave(group, dim=1) for part in (b, c))
    wide_x, wide_dt, skip = x.to(dtype), dt.to(dtype), d.to(dtype)[:, None]
    for first, end, slot, kept in rows.spans():
        held = state[slot].clone()
        for t in range(first, end):
            step = wide_dt[t]
            added = torch.einsum("hp,hn->hpn", wide_x[t] * step[:, None], wide_b[t])
            held = held * (step * a.to(dtype)).exp()[:, None, None] + added
            out[t] = torch.einsum("hpn,hn->hp", held, wide_c[t]) + skip * wide_x[t]
            if kept >= 0 and checkpoint is not None:
                checkpoint[kept + t - first] = held
        state[slot] = held
