"""Reference of the gated delta rule: one token after the other, in the state's precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from edgellm.kernels.cpu.recurrent_rows import RecurrentRows

L2_EPS = 1e-6


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    rows: RecurrentRows,
    out: torch.Tensor,
    *,
    scale: float,
    l2norm: bool,
    checkpoint: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """S = exp(decay) S; u = beta (v - S^T k); S = S + k u^T; out = scale S^T q.

    The rule is that of Yang et al., Gated Delta Networks, 2024.

    Args:
        q, k: (T, Hk, dk); v head h uses head h // (Hv / Hk).
        v: (T, Hv, dv).
        decay: (T, Hv) logarithms, 0 or less.
        beta: (T, Hv).
        state: (slots, Hv, dk, dv) float32 or float64.
        out: (T, Hv, dv).
        l2norm: divide each q and k by sqrt(sum of squares + 1e-6) first.
        checkpoint: (CK, Hv, dk, dv) or None.
        workspace, deterministic: for kernels; here they change nothing.
    Effects: writes out, state, checkpoint.
    """
    dtype = state.dtype
    group = v.shape[1] // k.shape[1]
    query, key = (_heads(part.to(dtype), group, l2norm) for part in (q, k))
    for first, end, slot, kept in rows.spans():
        held = state[slot].clone()
        for t in range(first, end):
            held = held * decay[t].to(dtype).exp()[:, None, None]
            error = v[t].to(dtype) - torch.einsum("hkv,hk->hv", held, key[t])
            held = held + torch.einsum("hk,hv->hkv", key[t], error * beta[t].to(dtype)[:, None])
            out[t] = scale * torch.einsum("hkv,hk->hv", held, query[t])
            if kept >= 0 and checkpoint is not None:
                checkpoint[kept + t - first] = held
        state[slot] = held


def _heads(part: torch.Tensor, group: int, l2norm: bool) -> torch.Tensor:
    if l2norm:
        part = part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + L2_EPS)
    return part.repeat_interleave(group, dim=1)
