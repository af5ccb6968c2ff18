"""The gated delta rule over whole sequences, chunk by chunk (Yang et al., "Gated Delta Networks", 2024, section 3.3).

With G the summed log decay within a chunk,
    u_i = beta_i (v_i - e^{G_i} S^T k_i - sum_{j<i} e^{G_i - G_j} (k_i . k_j) u_j)
is a unit triangular system a chunk; its solution gives outputs and the next state by matrix products.
"""

from __future__ import annotations

import torch
from torch.nn import functional

CHUNK = 32
_L2_EPS = 1e-6


def gated_delta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Outputs (B, H, T, dv) float32 from a zero state.

    Args:
        query, key: (B, H, T, dk); normalised here.
        value: (B, H, T, dv).
        decay: (B, H, T) logarithms, 0 or less.
        beta: (B, H, T).
    """
    count = query.shape[2]
    padding = -count % CHUNK
    query, key = (_unit(part.float()) for part in (query, key))
    query, key, value = (
        _chunks(functional.pad(part.float(), (0, 0, 0, padding)))
        for part in (query * query.shape[-1] ** -0.5, key, value)
    )
    decay, beta = (_chunks(functional.pad(part.float(), (0, padding))) for part in (decay, beta))
    summed = decay.cumsum(-1)
    ages = (summed[..., :, None] - summed[..., None, :]).tril().exp().tril()
    system = torch.eye(CHUNK, device=key.device) + (beta[..., None] * ages * (key @ key.mT)).tril(-1)
    from_state = beta[..., None] * summed.exp()[..., None] * key
    right = torch.cat((beta[..., None] * value, from_state), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, through = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    out = _across_chunks(query, key, own, through, summed, ages)
    return out.flatten(2, 3)[:, :, :count]


def _across_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    own: torch.Tensor,
    through: torch.Tensor,
    summed: torch.Tensor,
    ages: torch.Tensor,
) -> torch.Tensor:
    state = own.new_zeros((*own.shape[:2], key.shape[-1], own.shape[-1]))
    within = (query @ key.mT) * ages
    decayed_query = query * summed.exp()[..., None]
    left = key * (summed[..., -1:] - summed).exp()[..., None]
    outs = []
    for chunk in range(own.shape[2]):
        written = own[:, :, chunk] - through[:, :, chunk] @ state
        outs.append(decayed_query[:, :, chunk] @ state + within[:, :, chunk] @ written)
        state = state * summed[:, :, chunk, -1, None, None].exp() + left[:, :, chunk].mT @ written
    return torch.stack(outs, dim=2)


def _chunks(rows: torch.Tensor) -> torch.Tensor:
    """(B, H, T, ...) to (B, H, T / CHUNK, CHUNK, ...)."""
    return rows.reshape(*rows.shape[:2], -1, CHUNK, *rows.shape[3:])


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.pow(2).sum(-1, keepdim=True) + _L2_EPS)
