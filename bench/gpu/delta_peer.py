"""The gated delta rule of others, to compare with: flash-linear-attention's, transformers', or plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

CHUNK = 64
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def peers() -> tuple[str, Rule, Rule]:
    """(whose, chunked rule, rule token by token).

    Each takes q, k (B, T, Hk, dk), v (B, T, Hv, dv), decay, beta (B, T, Hv) and the state (B, Hv, dk, dv), and returns
    outputs and the state after; q and k are brought to unit length and q is scaled by dk ** -0.5.
    """
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

        return "flash-linear-attention", _named(chunk_gated_delta_rule), _named(fused_recurrent_gated_delta_rule)
    except ImportError:
        pass
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next as model

        return (
            "transformers",
            _named(model.torch_chunk_gated_delta_rule),
            _named(model.torch_recurrent_gated_delta_rule),
        )
    except ImportError:
        return "plain torch", torch_chunks, torch_tokens


def _named(rule: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Rule:
    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = v.shape[2] // k.shape[2]
        wide = [part.repeat_interleave(group, dim=2) for part in (q, k)]
        return rule(
            *wide, v, g=decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return call


def _unit_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> list[torch.Tensor]:
    """Everything in float32 as (B, Hv, T, ...), q and k of unit length."""
    group = v.shape[2] // k.shape[2]
    rows = [torch.nn.functional.normalize(part.float(), dim=-1).repeat_interleave(group, 2) for part in (q, k)]
    return [part.float().transpose(1, 2) for part in (*rows, v, decay, beta)]


def torch_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after the other."""
    query, key, value, decays, betas = _unit_heads(q, k, v, decay, beta)
    out = torch.empty_like(value)
    for t in range(value.shape[2]):
        state = state * decays[:, :, t, None, None].exp()
        error = value[:, :, t] - (key[:, :, t, None] @ state).squeeze(2)
        state = state + key[:, :, t, :, None] * (error * betas[:, :, t, None])[:, :, None]
        out[:, :, t] = (query[:, :, t, None] @ state).squeeze(2)
    return (out * k.shape[-1] ** -0.5).transpose(1, 2).to(v.dtype), state


def torch_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk after the other, each one triangular system (Yang et al. 2024); T is a multiple of CHUNK."""
    parts = [part.unflatten(2, (-1, CHUNK)) for part in _unit_heads(q, k, v, decay, beta)]
    query, key, value, decays, betas = parts
    totals = decays.cumsum(-1)
    between = (totals[..., :, None] - totals[..., None, :]).tril().exp().tril()
    system = (key * betas[..., None]) @ key.transpose(-1, -2) * between
    right = torch.cat((value * betas[..., None], key * (betas * totals.exp())[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system.tril(-1), right, upper=False, unitriangular=True)
    updates, reads = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    scores = query @ key.transpose(-1, -2) * between
    asked, left = query * totals.exp()[..., None], key * (totals[..., -1:] - totals).exp()[..., None]
    out = torch.empty_like(value)
    for c in range(value.shape[2]):
        new = updates[:, :, c] - reads[:, :, c] @ state
        out[:, :, c] = asked[:, :, c] @ state + scores[:, :, c] @ new
        state = state * totals[:, :, c, -1, None, None].exp() + left[:, :, c].transpose(-1, -2) @ new
    return (out * k.shape[-1] ** -0.5).flatten(2, 3).transpose(1, 2).to(v.dtype), state
